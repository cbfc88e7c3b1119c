"""The optimizer's update behind the pipeline.

- :mod:`updates`: optimizer steps on a thread, bucket by bucket.
- :mod:`buckets`, :mod:`state`: weights that are updated together; the state of the optimizer meanwhile.
- :mod:`clipping`: clipping by norm as a part of the update.
- :mod:`sharding`, :mod:`sharded_state`: optimizers whose state and updates are divided among ranks.
- :mod:`stale`: weights of the step before, for ``optimizer_overlap="stale"``.
"""
