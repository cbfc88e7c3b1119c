"""Running a unit: where its graph is cut, how it is recomputed, and what must be the same the second time.

- :mod:`recompute`, :mod:`escape`: cuts, calls, pending gradients; tensors that leave a unit unseen.
- :mod:`unit_run`, :mod:`unit_context`, :mod:`unit_backward`: one execution of a unit on a replica; its backward.
- :mod:`relays`, :mod:`fills`: hooks inside a unit, lists and dicts that it fills.
- :mod:`undo`, :mod:`repeats`: buffers before a run of a unit, and how they are put back; whether a second run does the
  same.
- :mod:`randomness`, :mod:`checkpointing`, :mod:`parametrizations`: random numbers, the user's own checkpointing, cached
  weights.
- :mod:`compiling`, :mod:`compiled_by_user`: units through ``torch.compile``; what the user has compiled.
"""
