"""What a training run needs on the host, in bytes: arithmetic, and what there is.

[Note: host memory]
Everything that does not fit on devices lives on the host. Weights are there before the first step; gradients appear in
it, the state of the optimizer after it, and inputs of calls that are run again in the backward come and go with every
step. So the most that a run will ever need can be told when the first micro-batch has shown the calls, before the other
ones fill the memory. Two numbers are estimates. The state of an optimizer that has not made a step is guessed from its
class. And the inputs are those of :meth:`planning.plan.StepPlan.host_activation_bytes`, an upper bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from ..optimizer.state import plain_state
from ..planning.quantities import format_bytes
from ..weights.futures import unwaited

# Optimizer class -> tensors of its state that are as large as a parameter. Subclasses count as their nearest ancestor.
_STATE_TENSORS: dict[str, Any] = {
    "Adadelta": 2,
    "Adafactor": 0,
    "Adagrad": 1,
    "Adam": lambda group: 2 + bool(group.get("amsgrad")),
    "AdamW": lambda group: 2 + bool(group.get("amsgrad")),
    "Adamax": 2,
    "ASGD": 1,
    "LBFGS": lambda group: 2 * group.get("history_size", 100) + 2,
    "Lion": 1,
    "Muon": 1,
    "NAdam": 2,
    "RAdam": 2,
    "RMSprop": lambda group: 1 + bool(group.get("momentum")) + bool(group.get("centered")),
    "Rprop": 2,
    "SGD": lambda group: int(bool(group.get("momentum"))),
    "SparseAdam": 2,
}
_UNKNOWN_STATE_TENSORS = 2  # as Adam


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
    states = [tensor for o in optimizers for state in list(plain_state(o).values()) for tensor in _tensors(state)]
    return sum(_bytes_of(tensor) for tensor in (*parameters, *root.buffers(), *gradients, *states))


def optimizer_state_bytes(
    optimizer: torch.optim.Optimizer, is_mine: Callable[[nn.Parameter], bool] = lambda weight: True
) -> int:
    """What the state of an optimizer takes: as it is where it exists, else what its class will make."""
    total = 0
    for group in optimizer.param_groups:
        trained = [p for p in group["params"] if p.requires_grad and is_mine(p)]
        # Some keep one state for all parameters of a group with the first one.
        known = sum(
            _bytes_of(tensor) for p in trained if p in optimizer.state for tensor in _tensors(optimizer.state[p])
        )
        total += known or _num_state_tensors(optimizer, group) * sum(_bytes_of(p) for p in trained)
    return total


def _num_state_tensors(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> int:
    for kind in type(optimizer).__mro__:
        if kind.__name__ in _STATE_TENSORS:
            known = _STATE_TENSORS[kind.__name__]
            return int(known(group)) if callable(known) else known
    return _UNKNOWN_STATE_TENSORS


def _tensors(state: Any) -> list[Tensor]:
    return [value for value in state.values() if isinstance(value, Tensor)] if isinstance(state, Mapping) else []


def _bytes_of(tensor: Tensor) -> int:
    return 0 if nn.parameter.is_lazy(tensor) else tensor.numel() * tensor.element_size()
