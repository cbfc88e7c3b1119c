"""A simulated accelerator: the device type ``sim`` of torch, on a machine without a GPU.

It is late, works in order, has memory of its own, and follows CUDA's rules about streams, copies and freed memory. What
an engine forgets (a wait, a ``record_stream``, page-locked memory) shows as NaN, as a report with a Python stack, or as
a crash.

    host thread      x * 2          y.cpu()  . . . . . . waits . . . . . .  NaN, if a wait is missing
                       | shapes, memory     |                            |
    stream 0 (thread)  +---> late: the host's kernel --> memory that is poison until then
    stream 1 (thread)        ... wait for an event ... ---> copy --> page-locked memory of the host
                                              clocks of streams, events, waits: which uses of the same bytes are ordered

What happens
    * A stream is a thread (0: the default; 32 more, then they are given out again). An operator's meta kernel tells the
      shapes, memory for the results is taken at once, the host's kernel runs later. Where shapes depend on values
      (``nonzero``, masks), where there is no meta kernel, and for sparse tensors, the host waits:
      ``synchronous_operators``, and ``sync <name>`` for each. An error on the device comes up at the next
      synchronisation, once.
    * The host must not look where ``data_ptr()`` points to: with ``SIM_PROTECT=1`` it crashes. Fresh and freed memory
      is 0xFF: NaN, or -1. Blocks belong to the stream they were taken on and are used again at once, in its order;
      ``record_stream`` keeps them back. The limit raises ``OutOfMemoryError``.
    * Copies with the host are asynchronous if they are ``non_blocking``, page-locked (``pin_memory``,
      ``host_register``), contiguous, and without a cast on the way up. All others wait: ``blocking_copies``. A value
      that is read (``.item()``) counts as ``item_syncs``. The target of an asynchronous copy to the host is poison
      until it arrives.
    * Uses of device and page-locked memory are followed with vector clocks. Two uses of the same bytes on two streams
      that nothing orders are one of the ``races``, whatever the timing was.
    * A random operator draws a seed of its own when it is issued: results do not depend on when it runs.

What to ask (``torch.sim``, besides what engines use of ``torch.cuda``)
    ``stats()``, ``reset_stats()``, ``traced()`` (a context: list of (kind, text, Python stack)),
    ``on_report(function)``, ``options(**values)`` (a context), ``set_delay(us)``, ``_sleep(us)`` (the current stream
    does nothing), ``held()`` (a context: it does nothing until the end), ``losing(device, after)`` (a context: after so
    many more operations the device does nothing, and all that is asked of it raises an error),
    ``set_memory_limit(bytes, device)``, ``pinned_bytes()``, ``cudart().cudaHostRegister``.

Variables, read when it is installed; those in the second part are ``options``, too
    ``SIM_DEVICES`` (2, at most 8), ``SIM_MEMORY_MB`` (4096, of each), ``SIM_PROTECT``.

    ``SIM_DELAY_US`` (each operator and copy is so late), ``SIM_JITTER`` (1: between 0 and twice as late),
    ``SIM_EAGER_FREE`` (1: freed memory is poisoned at once, stricter than CUDA), ``SIM_PIN_MB`` (limit of page-locked
    memory).

What it does not model
    * Speed: kernels take the host's time, one thread per stream; copies are as fast as memory.
    * Fragmentation of the caching allocator: blocks serve for sizes up to a quarter smaller, and all that is cached is
      given up at the limit. ``memory_reserved`` counts pages.
    * CUDA's numbers: reductions, TF32, random numbers, fused attention (the math path runs).
    * Priorities of streams, graphs, IPC, peer access, NCCL, ``torch.compile``, quantized tensors. Errors of operators
      that stay; of a device that is lost, errors where memory is freed.
    * Which host thread saw what: what one has waited for, all know. Uses of page-locked memory by the host itself.
    * Gaps in strided views: columns of one matrix on two streams count as a race.
    * In a forked child only freeing works.
"""

from __future__ import annotations

import functools
import types

from tests.support.accelerator.build import why_not

__all__ = ["install", "why_not"]


@functools.cache
def install() -> types.ModuleType:
    """Builds and registers the device type, before the first backward of the process; returns ``torch.sim``.

    It is ``torch.accelerator``'s current accelerator from then on.
    """
    reason = why_not()
    if reason is not None:
        raise RuntimeError(reason)
    from tests.support.accelerator import device_module  # builds it

    device_module.register()
    return device_module
