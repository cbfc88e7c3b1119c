"""The update of some of the weights of an optimizer."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .optimizer_state import GuardedState
from .stale import StaleWeights

# Of a group, but for its weights.
Options = dict[str, Any]


def options_of(optimizer: Optimizer) -> dict[nn.Parameter, Options]:
    """The options of each weight as they are now: the same object for all of a group."""
    found: dict[nn.Parameter, Options] = {}
    for group in optimizer.param_groups:
        options = {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
        found.update(dict.fromkeys(group["params"], options))
    return found


class Part:
    """An optimizer of the same class for some of the weights: for tensors that share their memory, with their state.

    Args:
        gradients: of these weights.
        options: of these weights, and maybe others; see :func:`options_of`.
        state: of the whole optimizer.
        factor: a number that the gradients are multiplied by first.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        gradients: Mapping[nn.Parameter, Tensor],
        options: Mapping[nn.Parameter, Options],
        state: GuardedState,
        factor: Tensor | None = None,
    ) -> None:
        self._home = state
        # A factor of one would change nothing.
        self._factor = None if factor is None or factor.item() == 1.0 else factor
        self._shadows = {parameter: parameter.data for parameter in gradients}
        part: Any = object.__new__(type(optimizer))
        # A loss scaler leaves tensors there that it changes after the step.
        part.__dict__.update({k: v.clone() if isinstance(v, Tensor) else v for k, v in vars(optimizer).items()})
        part.__dict__.pop("step", None)
        part._optimizer_step_pre_hooks = OrderedDict()
        part._optimizer_step_post_hooks = OrderedDict()
        part.state = defaultdict(dict)
        groups: dict[int, Options] = {}
        for parameter, shadow in self._shadows.items():
            shadow.grad = gradients[parameter]
            if (known := state.lend(parameter)) is not None:
                part.state[shadow] = known
            own = options[parameter]
            groups.setdefault(id(own), {**own, "params": []})["params"].append(shadow)
        part.param_groups = list(groups.values())
        self._optimizer = part

    def step(self) -> None:
        """Updates the weights."""
        if self._factor is not None:
            with torch.no_grad():
                for shadow in self._shadows.values():
                    shadow.grad.mul_(self._factor)  # type: ignore[union-attr]
        try:
            type(self._optimizer).step(self._optimizer)
        finally:
            for parameter, shadow in self._shadows.items():
                if shadow in self._optimizer.state:
                    self._home.take_back(parameter, self._optimizer.state[shadow])
                shadow.grad = None

    def pass_on(self, stale: StaleWeights) -> None:
        """Snapshots of the updated weights."""
        for parameter, shadow in self._shadows.items():
            stale.refill(parameter, shadow)

    def let_go(self) -> None:
        """Nobody but the weights holds their memory any more."""
        self._shadows.clear()
        self._optimizer.param_groups.clear()
        self._optimizer.state.clear()
