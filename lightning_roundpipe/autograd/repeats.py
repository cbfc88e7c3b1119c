"""Whether a unit does the same when it is run again for its backward.

[Note: repeats]
Gradients are right only if the recomputation gives what the forward gave. In the recorded micro-batch, which runs alone
on one device and is recomputed as a whole, some elements of the results of each call are kept, and compared with those
of the recomputation: ::

    forward      results --samples_of--> some elements of each        (recorded micro-batch)
    backward     recomputed results --check_repeats--> the same?  -- no --> RuntimeError

Units that draw from generators of their own, count their calls, or fill an object that they were given are found so.
Rounding is allowed to differ: other kernels may run.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..common.fingerprints import MAX_SAMPLED, sample_of
from .recompute import Call, Slot, flagged_of

# Of the largest value. Kernels for the same product differ by less, also where one of them rounds to TF32.
_TOLERANCE = 0.01


def samples_of(slots: Mapping[Slot, Tensor]) -> dict[Slot, tuple[torch.Size, Tensor]]:
    """Shapes and some elements of the floating-point tensors among the results of a unit, on their device."""
    return {slot: (tensor.shape, sample_of(tensor)) for slot, tensor in slots.items() if _is_compared(tensor)}


def _is_compared(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.layout is torch.strided


def check_repeats(call: Call, slots: Mapping[Slot, Tensor]) -> None:
    """Compares the results of a recomputation with what is known of those of the forward. On the thread of the
    micro-batch; waits for the device where there are samples.

    Raises:
        RuntimeError: if they differ by more than rounding, or in what requires a gradient.
    """
    now = flagged_of(slots)
    if now != call.flagged:
        raise RuntimeError(
            f"unit {call.unit.name!r} gave another result when it was recomputed for the backward: outputs "
            f"{sorted(map(str, now ^ call.flagged))} require a gradient in one of the runs only. A unit must "
            "do the same when it is called again with the same arguments."
        )
    for slot, (shape, before) in call.samples.items():
        found = slots.get(slot)
        if found is None or not _is_compared(found):
            continue
        if found.shape != shape:
            raise _error(call, slot, f"the shape was {tuple(shape)}, and is {tuple(found.shape)}")
        after = sample_of(found)
        if not _is_alike(before, after):
            raise _error(call, slot, f"of the elements compared, up to {MAX_SAMPLED}, some differ")


def _is_alike(before: Tensor, after: Tensor) -> bool:
    if before.dtype != after.dtype:
        return False
    finite = before[before.isfinite()].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    tolerance = max(_TOLERANCE, torch.finfo(before.dtype).eps ** 0.5) * largest
    return torch.allclose(before, after, rtol=0.0, atol=tolerance, equal_nan=True)


def _error(call: Call, slot: Slot, difference: str) -> RuntimeError:
    return RuntimeError(
        f"unit {call.unit.name!r} gave another result when it was recomputed for the backward: in output {slot!r} "
        f"{difference}. Its gradients would be wrong. A unit must do the same when it is called again with the same "
        "arguments: it may draw from the generators of torch, numpy.random and random, not from one of its own "
        "(random.Random, numpy.random.default_rng), must not change objects that it is given, nor depend on how "
        "often it was called. Change it, or keep that part out of the units: RoundPipeStrategy(units=[...])."
    )
