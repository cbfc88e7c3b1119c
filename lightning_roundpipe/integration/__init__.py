"""What Lightning, Hugging Face and PEFT expect of a strategy, on top of the engine.

- :mod:`batches`: from a batch to weighted micro-batches, and from their results to those of the batch.
- :mod:`checks`, :mod:`misuse`: what is refused before a run, and mistakes in user code that would train something else.
- :mod:`user_step`, :mod:`log_merging`, :mod:`loss`: the user's step, its logs, its loss with the gradients behind it.
- :mod:`manual`, :mod:`overlap`, :mod:`retry`: manual optimization, updates behind the pipeline, steps that do not fit.
- :mod:`foreign_checkpoints`, :mod:`huggingface`, :mod:`profiling`: checkpoints of other strategies, settings of
  models, Lightning's profilers.
- :mod:`single_process`, :mod:`workers`: collective operations of one process; the pool of devices.
"""
