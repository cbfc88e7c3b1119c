"""What an optimizer will keep for a weight, found out on a small one before the first step.

[Note: optimizer trial]
A second optimizer of the same class, with the same options, makes some steps on one small weight with as many
dimensions and of the same type. What is in its state then tells what the state of a large weight will be: ::

    state of a weight of 251 x 257                    of one of n x m

    a number                     step counter         as it is
    251 x 257, or 64507          moments              n x m
    251 x 1, 1 x 257             factored moments     n x 1, 1 x m
    anything else                scales of blocks     grows with n x m

The dimensions are primes, so that each is known again. The weight is not too small for optimizers that treat small
weights in another way. Steps go on while the state grows, as that of LBFGS does. Random numbers are put back.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

# About as many elements each, for any number of dimensions; more than these are counted as one.
_SHAPES: tuple[tuple[int, ...], ...] = (
    *((), (64507,), (251, 257), (37, 41, 43), (13, 17, 19, 23)),
    (7, 11, 13, 5, 17),
)
_MOST_STEPS = 50
# After so many steps without growth the state is taken to be whole.
_NUM_QUIET_STEPS = 3


class StateShape:
    """The state of one weight of some number of dimensions.

    Args:
        shape: Of the weight that it was found on.
        leaves: The tensors in its state.
    """

    def __init__(self, shape: tuple[int, ...], leaves: list[Tensor]) -> None:
        self._shape = shape
        self._leaves = [(tuple(leaf.shape), leaf.element_size()) for leaf in leaves]

    def num_bytes(self, weight: Tensor) -> int:
        """Of a weight with as many dimensions."""
        return sum(self._numel(leaf, weight) * size for leaf, size in self._leaves)

    def _numel(self, leaf: tuple[int, ...], weight: Tensor) -> int:
        numel, small = math.prod(leaf), math.prod(self._shape)
        if numel == 1:
            return 1
        if len(self._shape) == weight.dim() and all(size == 1 or size in self._shape for size in leaf):
            return math.prod(weight.shape[self._shape.index(size)] for size in leaf if size != 1)
        return -(-numel * weight.numel() // small)


def tried_state(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], weight: Tensor) -> StateShape:
    """What the optimizer keeps for weights of this type and number of dimensions in this group.

    Raises:
        Exception: Of any kind, from code of the optimizer, or because its class needs more than its options.
    """
    shape = _SHAPES[weight.dim()] if weight.dim() < len(_SHAPES) else _SHAPES[1]
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        small = nn.Parameter(torch.zeros(shape, dtype=weight.dtype, device="cpu"))
        twin = _twin(optimizer, group, small)
        generator = torch.Generator("cpu").manual_seed(0)

        def closure() -> Tensor:
            small.grad = torch.randn(shape, generator=generator, device="cpu").to(small.dtype)
            return torch.rand((), generator=generator, device="cpu")

        num_quiet = num_bytes = 0
        for _ in range(_MOST_STEPS):
            _step(twin, closure)
            leaves = tensors_of(twin.state.get(small))
            before, num_bytes = num_bytes, sum(leaf.nbytes for leaf in leaves)
            num_quiet = num_quiet + 1 if num_bytes == before else 0
            if num_quiet == _NUM_QUIET_STEPS:
                break
    return StateShape(shape, leaves)


def _twin(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], weight: nn.Parameter) -> torch.optim.Optimizer:
    kind: Any = type(optimizer)
    options = {name: value for name, value in group.items() if name not in ("params", "param_names")}
    taken = inspect.signature(kind).parameters
    twin: torch.optim.Optimizer = kind([weight], **{name: value for name, value in options.items() if name in taken})
    twin.param_groups[0].update(options)
    return twin


def _step(optimizer: torch.optim.Optimizer, closure: Callable[[], Tensor]) -> None:
    closure()
    step: Any = optimizer.step
    if inspect.signature(step).parameters:
        step(closure)
    else:
        step()


def tensors_of(state: Any) -> list[Tensor]:
    """The tensors in the state of a weight, also those in lists."""
    return [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
