"""What Lightning, Hugging Face and PEFT expect of a strategy, on top of the engine.

- :mod:`steps`: a step, from the batch to what it returns; all that happens around the engine.
- :mod:`proof`: shown on the first batch, that splitting it changes nothing.
- :mod:`batches`: from a batch to weighted micro-batches, and from their results to those of the batch.
- :mod:`host_strategy`, :mod:`checks`: what Lightning asks of a strategy beside steps, and what is refused before a run.
- :mod:`rank_strategy`, :mod:`launcher`: what it asks about other processes, which this one is, and their start.
- :mod:`uneven_loaders`: training loaders of ranks that have different numbers of batches.
- :mod:`overlap`, :mod:`sharding`: updates behind the pipeline; gradients and optimizer state divided among ranks.
- :mod:`foreign_checkpoints`, :mod:`huggingface`, :mod:`profiling`: checkpoints of other strategies, settings of
  models, Lightning's profilers.
- :mod:`verify`: training steps beside plain autograd, for those who look for an error.
- :mod:`pool`, :mod:`links`: the devices that the options ask for, and the engine on them; what is known of their links.
"""
