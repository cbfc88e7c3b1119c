"""Whether a unit does the same when it is run again for its backward.

[Note: repeats]
Gradients are right only if the recomputation gives what the forward gave. In steps 1, 2, 4, 8, ... 1024 that train the
same weights (a branch that begins with zeros makes no difference in the first one), and where a unit is called in a new
way, some elements of the results of each call are kept, and compared with those of the recomputation: ::

    forward      results --samples_of--> some elements of each
    backward     recomputed results --check_repeats--> the same?  -- no --> RuntimeError

A call that has its graph in the forward, because facts are learned from it, is also known to reach certain weights: the
recomputation has to reach them, even if what they add is zero.

Units that draw from generators of their own, count their calls, fill an object that they were given, or read one that
was set for their forward alone, are found so. Mostly the same kernels run, and give the same bits. Rounding is allowed
to differ: sums may have another order, by where their numbers are in memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping

import torch
from torch import Tensor, nn

from ..common.fingerprints import MAX_SAMPLED, sample_of
from ..usercode.loose_gradients import leaves_behind, node_of
from ..usercode.moves import moved
from ..weights.parameters import Replica
from .recompute import Call, Slot, flagged_of
from .unit_context import UnitContext

_LAST_COMPARED = 1024
# Of the largest value that is compared. In float32 the same sums in another order differ by a hundredth of that, and
# what is computed in a lower precision by less than its epsilon, which is that of TF32 on GPUs.
_TOLERANCE = 1e-5
_TF32_EPS = 2.0**-10
# Where other kernels run: units are compiled with and without a graph, or the GPUs are not alike.
_TOLERANCE_OF_OTHERS = 0.01


class ComparedSteps:
    """In which steps units are compared; see [Note: repeats]."""

    def __init__(self) -> None:
        self._num_steps: Counter[tuple[Hashable, int]] = Counter()

    def begin(self, key: Hashable, parameters: Iterable[nn.Parameter]) -> bool:
        """A training step with this key begins, of a model with these parameters: whether it compares."""
        known = key, hash(tuple([p.requires_grad for p in parameters]))
        self._num_steps[known] += 1
        count = self._num_steps[known]
        return count <= _LAST_COMPARED and not count & (count - 1)

    def clear(self) -> None:
        """The next step is the first one."""
        self._num_steps.clear()


def samples_of(slots: Mapping[Slot, Tensor]) -> dict[Slot, tuple[torch.Size, Tensor]]:
    """Shapes and some elements of the floating-point tensors among the results of a unit, on their device."""
    return {slot: (tensor.shape, sample_of(tensor)) for slot, tensor in slots.items() if _is_compared(tensor)}


def weights_behind(slots: Mapping[Slot, Tensor], replica: Replica) -> frozenset[nn.Parameter]:
    """The master weights that the graph of the results of a unit leads to."""
    leaves = leaves_behind(node_of(tensor) for tensor in slots.values() if tensor.requires_grad)
    return frozenset([replica.leaves[leaf] for leaf in leaves if leaf in replica.leaves])  # type: ignore[index]


def _is_compared(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.layout is torch.strided


def check_repeats(context: UnitContext, call: Call, replica: Replica, slots: Mapping[Slot, Tensor]) -> None:
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
    if call.reached and (lost := call.reached - weights_behind(slots, replica)):
        names = [name for name, weight in call.unit.module.named_parameters() if any(weight is one for one in lost)]
        raise _error(call, f"its results do not depend on {', '.join(names)} any more")
    for slot, (shape, before) in call.samples.items():
        found = slots.get(slot)
        if found is None or not _is_compared(found):
            continue
        if found.shape != shape:
            raise _error(call, f"in output {slot!r} the shape was {tuple(shape)}, and is {tuple(found.shape)}")
        after = sample_of(found)
        if before.device != after.device:
            before = moved(before, after.device, context.activations, f"sample {call.unit.name}")
        if not _is_alike(before, after, _tolerance(context, call, replica, after)):
            raise _error(call, f"in output {slot!r} of the elements compared, up to {MAX_SAMPLED}, some differ")


def _tolerance(context: UnitContext, call: Call, replica: Replica, after: Tensor) -> float:
    """For a result of a call that has run again on ``replica``, relative to its largest value."""
    assert call.ran is not None
    eps: float = torch.finfo(after.dtype).eps
    if context.compiler is not None or call.ran.device.draws_as != replica.device.draws_as:
        return max(_TOLERANCE_OF_OTHERS, math.sqrt(eps))
    dtypes = {leaf.dtype for leaf in replica.leaves if leaf.is_floating_point()}
    if call.autocast[0]:
        dtypes.add(call.autocast[1])
    lowest = max([eps, 0.0 if after.is_cpu else _TF32_EPS, *(float(torch.finfo(dtype).eps) for dtype in dtypes)])
    return max(_TOLERANCE, lowest)


def _is_alike(before: Tensor, after: Tensor, tolerance: float) -> bool:
    if before.dtype != after.dtype:
        return False
    if not before.numel():
        return True
    largest = before.abs().nan_to_num(0.0, 0.0).max()
    is_close = (before - after).abs() <= tolerance * largest
    is_same = (before == after) | (before.isnan() & after.isnan())
    return bool((is_close | is_same).all())  # a GPU is waited for once


def _error(call: Call, difference: str) -> RuntimeError:
    return RuntimeError(
        f"unit {call.unit.name!r} gave another result when it was recomputed for the backward: {difference}. Its "
        "gradients would be wrong. A unit must do the same when it is called again with the same arguments: it may "
        "draw from the generators of torch, numpy.random and random, not from one of its own (random.Random, "
        "numpy.random.default_rng), must not change objects that it is given, nor depend on how often it was called, "
        "nor on globals and objects that the step sets for its call (attributes of modules are kept for it). Change "
        "it, or keep that part out of the units: RoundPipeStrategy(units=[...])."
    )
