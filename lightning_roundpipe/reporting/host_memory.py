"""What a training run needs on the host, in bytes: arithmetic, and what there is.

[Note: host memory]
Everything that does not fit on devices lives on the host. Weights are there before the first step; gradients appear in
it, the state of the optimizer after it, and inputs of calls that are run again in the backward come and go with every
step. So the most that a run will ever need can be told when the first micro-batch has shown the calls, before the other
ones fill the memory. Two numbers are estimates. The state of an optimizer that has not made a step is tried on a small
weight, see [Note: optimizer trial] in :mod:`optimizer_trial`. And the inputs are those of
:meth:`planning.plan.StepPlan.host_activation_bytes`, an upper bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from ..lightning_packages import rank_zero_info
from ..optimizer.state import plain_state
from ..planning.quantities import format_bytes
from ..weights.futures import unwaited
from .optimizer_trial import StateShape, tensors_of, tried_state

# Of an optimizer that cannot be tried: as Adam.
_UNKNOWN_STATE_TENSORS = 2


@dataclass(frozen=True)
class HostMemory:
    """Bytes on the host, by purpose; see [Note: host memory].

    Attributes:
        weights: parameters and buffers.
        gradients: of the weights that are trained.
        optimizer_state: of all optimizers.
        snapshots: of trained weights, see [Note: stale weights] in :mod:`optimizer.stale`.
        working_copies: weights in the type in which they travel, where that is another one.
        activations: inputs of calls that wait for the backward.
    """

    weights: int = 0
    gradients: int = 0
    optimizer_state: int = 0
    snapshots: int = 0
    working_copies: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        """The sum of all."""
        return sum(getattr(self, field.name) for field in fields(self))

    def describe(self) -> str:
        """For people: the total, and what it consists of, the largest first."""
        parts = sorted(((getattr(self, f.name), f.name.replace("_", " ")) for f in fields(self)), reverse=True)
        listed = ", ".join(f"{name} {format_bytes(num_bytes)}" for num_bytes, name in parts if num_bytes)
        return f"{format_bytes(self.total)} ({listed or 'nothing'})"


def model_memory(
    root: nn.Module,
    optimizers: Iterable[torch.optim.Optimizer] = (),
    num_snapshots: int = 0,
    is_mine: Callable[[nn.Parameter], bool] = lambda weight: True,
) -> HostMemory:
    """What a model and its optimizers need, whatever the batch is: weights, gradients, optimizer state, snapshots.

    Args:
        num_snapshots: of every weight that an optimizer trains.
        is_mine: whether this process, one of several, updates a weight.
    """
    parameters = list(root.parameters())
    optimizers = list(optimizers)
    return HostMemory(
        weights=sum(_bytes_of(tensor) for tensor in (*parameters, *root.buffers())),
        gradients=sum(
            _bytes_of(parameter) for parameter in parameters if parameter.requires_grad and is_mine(parameter)
        ),
        optimizer_state=sum(optimizer_state_bytes(optimizer, is_mine) for optimizer in optimizers),
        snapshots=num_snapshots * sum(_bytes_of(p) for optimizer in optimizers for p in trained_by(optimizer)),
    )


def trained_by(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The weights that ``optimizer`` trains at the moment."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad]


def allocated_bytes(root: nn.Module, optimizers: Iterable[torch.optim.Optimizer] = ()) -> int:
    """The part of :func:`model_memory` that is there already."""
    parameters = list(root.parameters())
    with unwaited():
        gradients = [p.grad for p in parameters if p.grad is not None]
    states = [tensor for o in optimizers for state in list(plain_state(o).values()) for tensor in tensors_of(state)]
    return sum(_bytes_of(tensor) for tensor in (*parameters, *root.buffers(), *gradients, *states))


def optimizer_state_bytes(
    optimizer: torch.optim.Optimizer, is_mine: Callable[[nn.Parameter], bool] = lambda weight: True
) -> int:
    """What the state of an optimizer takes: as it is where it exists, else as a trial shows."""
    total = 0
    for group in optimizer.param_groups:
        trained = [p for p in group["params"] if p.requires_grad and is_mine(p)]
        # Some keep one state for all parameters of a group with the first one.
        known = sum(
            _bytes_of(tensor) for p in trained if p in optimizer.state for tensor in tensors_of(optimizer.state[p])
        )
        total += known or _expected_bytes(optimizer, group, [p for p in trained if _bytes_of(p)])
    return total


def _expected_bytes(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], weights: list[nn.Parameter]) -> int:
    """What the state of these weights will take; says so where that cannot be found out."""
    shapes: dict[tuple[int, torch.dtype], StateShape] = {}
    try:
        for weight in weights:
            key = weight.dim(), weight.dtype
            if key not in shapes:
                shapes[key] = tried_state(optimizer, group, weight)
    except Exception as error:  # of any kind, from code that is not ours
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        rank_zero_info(
            f"what {type(optimizer).__name__} keeps for its weights could not be tried on a small one ({reason}): its "
            f"state is counted as {_UNKNOWN_STATE_TENSORS} tensors for each, as that of Adam."
        )
        return _UNKNOWN_STATE_TENSORS * sum(map(_bytes_of, weights))
    return sum(shapes[weight.dim(), weight.dtype].num_bytes(weight) for weight in weights)


def _bytes_of(tensor: Tensor) -> int:
    return 0 if nn.parameter.is_lazy(tensor) else tensor.numel() * tensor.element_size()
