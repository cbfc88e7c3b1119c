"""Weights of which this process keeps what travels to devices, and no master: that is another rank's.

[Note: weights kept low]
A rank that does not update a weight itself ([Note: sharded optimizer] in :mod:`optimizer.sharding`) needs its master to
make the low-precision copy alone. So it may keep the copy instead. To all other code the parameter stays what it was:
its shape and dtype, its gradient, its place in optimizers. Its data is a single NaN in the place of all elements, and
its class the one of weights that are looked at with care ([Note: parameter futures] in :mod:`weights.futures`): ::

    whole --- watch ---> watched --- keep_low ---> kept low
      ^                     |                         |
      +------ a look -------+------- a look ----------+    the values of the copy, which are rounded

A watched weight is whole: who watches wants to know whether code looks at it. The engine itself does not look: it asks
for :func:`low_of`. What holds the memory of a weight could not notice that this is given up: see :func:`is_alone`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .futures import call_at_look, unwaited

_low: dict[int, Tensor] = {}
_lock = threading.RLock()  # a signal handler may look at a weight while its thread does


def low_of(weight: nn.Parameter) -> Tensor | None:
    """What this process keeps of ``weight``; None for a whole one. For any thread."""
    return _low.get(id(weight))


def watch(weight: nn.Parameter, told: Callable[[nn.Parameter, bool], None]) -> None:
    """Waits for a look at ``weight``, which is then whole and not watched any more.

    Args:
        told: is called by the thread that looks, with the weight, and whether its values had to be made of a low copy.
    """

    def look() -> None:
        with _lock:
            was_low = low_of(weight) is not None
            make_whole(weight)
        told(weight, was_low)

    call_at_look(weight, look)


def keep_low(weight: nn.Parameter, low: Tensor) -> None:
    """A watched weight, which is contiguous, is given up for ``low``, its values in a lower dtype."""
    with torch.inference_mode(False), unwaited():
        placeholder = torch.full((), torch.nan, dtype=weight.dtype).expand(weight.shape)
        _low[id(weight)] = low
        weight.data = placeholder


def make_whole(weight: nn.Parameter, data: Tensor | None = None) -> None:
    """Ends the watch. What was kept low has these values again; None for those of the copy."""
    with _lock:
        if (low := low_of(weight)) is not None:
            with torch.inference_mode(False), torch.no_grad(), unwaited():
                weight.data = low.to(weight.dtype) if data is None else data
            del _low[id(weight)]
        call_at_look(weight, None)


def is_alone(weight: nn.Parameter) -> bool:
    """Whether nothing else holds the memory of ``weight``, which is plain and contiguous; False where torch cannot tell
    (versions without CUDA may not)."""
    with unwaited():
        if (
            not hasattr(torch._C, "_storage_Use_Count")
            or weight.layout is not torch.strided
            or not weight.is_contiguous()
        ):
            return False
        # Of one that is known to be alone, with the object through which it is counted.
        return _num_holders(weight) <= _num_holders(nn.Parameter(torch.empty(1)))


def _num_holders(tensor: Tensor) -> int:
    storage = tensor.untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count
