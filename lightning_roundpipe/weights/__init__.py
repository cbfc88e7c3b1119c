"""Weights: from masters on the host to replicas on devices, and their gradients home.

- :mod:`units`: which modules of a model are run whole.
- :mod:`parameters`, :mod:`placement`: replicas of units on devices; what is where, prefetched, evicted.
- :mod:`compiled`: what the user has compiled, for replicas.
- :mod:`buffers`: buffers that units write, on their way home; :mod:`attributes`: tensors that units keep elsewhere.
- :mod:`gradients`: gradients on their way home, added up in an order that does not depend on timing.
- :mod:`casts`, :mod:`low_precision`: which weights may travel in the dtype of autocast, and their copies in it.
- :mod:`futures`, :mod:`harmless`: weights whose update is still running, and who need not wait for it.
- :mod:`events`: the hook by which tests follow weights.
"""
