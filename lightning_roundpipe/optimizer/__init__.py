"""The optimizer's update behind the pipeline: buckets of weights, clipping by norm, state, stale weights."""
