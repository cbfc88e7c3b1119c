"""The engine: runs a schedule of micro-batches over a pool of devices. Knows torch, never Lightning.

Reading order: :mod:`devices`, :mod:`units`, :mod:`dispatch`, :mod:`glue`, :mod:`parameters`, :mod:`recompute`,
:mod:`profiler`, :mod:`plans`, :mod:`runner`.
"""
