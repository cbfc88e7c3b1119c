"""Buckets: the weights of an optimizer that are updated together, in the order in which the next step needs them."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..common.fingerprints import version_of
from ..common.sizes import num_bytes_of

# Of a group, but for its weights.
Options = dict[str, Any]
# Less is not worth its own call of the optimizer.
BUCKET_BYTES = 16 * 2**20


def buckets_of(weights: Iterable[nn.Parameter], order: Sequence[Iterable[nn.Parameter]]) -> list[list[nn.Parameter]]:
    """The weights that are to be updated, in the order in which they are needed, a few MiB at a time."""
    left = dict.fromkeys(weights)
    buckets: list[list[nn.Parameter]] = []
    num_bytes = BUCKET_BYTES
    for group in [*order, list(left)]:
        fresh = [parameter for parameter in dict.fromkeys(group) if parameter in left]
        for parameter in fresh:
            del left[parameter]
        if not fresh:
            continue
        if num_bytes >= BUCKET_BYTES:
            buckets.append([])
            num_bytes = 0
        buckets[-1].extend(fresh)
        num_bytes += num_bytes_of(fresh)
    return buckets


def options_of(optimizer: Optimizer) -> dict[nn.Parameter, Options]:
    """The options of each weight as they are now: the same object for all of a group."""
    found: dict[nn.Parameter, Options] = {}
    for group in optimizer.param_groups:
        options = {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
        found.update(dict.fromkeys(group["params"], options))
    return found


class Bucket:
    """An optimizer of the same class for some of the weights: for tensors that share their memory, with their state.

    Args:
        gradients: of these weights.
        options: of these weights, and maybe others; see :func:`options_of`.
        state: of the whole optimizer, see :func:`plain_state`.
        factor: a number that the gradients are multiplied by first.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        gradients: Mapping[nn.Parameter, Tensor],
        options: Mapping[nn.Parameter, Options],
        state: dict[Any, Any],
        factor: Tensor | None = None,
    ) -> None:
        self._state = state
        # A factor of one would change nothing.
        self._factor = None if factor is None or factor.item() == 1.0 else factor
        self._shadows = {parameter: _shadow_of(parameter) for parameter in gradients}
        part: Any = object.__new__(type(optimizer))
        # A loss scaler leaves tensors there that it changes after the step.
        part.__dict__.update({k: v.clone() if isinstance(v, Tensor) else v for k, v in vars(optimizer).items()})
        part.__dict__.pop("step", None)
        part._optimizer_step_pre_hooks = OrderedDict()
        part._optimizer_step_post_hooks = OrderedDict()
        part.state = defaultdict(dict)
        self._groups: dict[int, tuple[Options, dict[str, Any]]] = {}  # options as they were, group of the part
        for parameter, shadow in self._shadows.items():
            shadow.grad = gradients[parameter]
            if parameter in state:
                part.state[shadow] = state[parameter]
            own = options[parameter]
            self._groups.setdefault(id(own), (own, {**own, "params": []}))[1]["params"].append(shadow)
        part.param_groups = [group for _, group in self._groups.values()]
        self._optimizer = part
        self._before = None if _is_of_torch(part) else self._beside()

    def step(self) -> None:
        """Updates the weights.

        Raises:
            RuntimeError: if the optimizer writes something that is lost.
        """
        if self._factor is not None:
            with torch.no_grad():
                for shadow in self._shadows.values():
                    shadow.grad.mul_(self._factor)  # type: ignore[union-attr]
        try:
            type(self._optimizer).step(self._optimizer)
            if (what := self._lost()) is not None:
                raise RuntimeError(
                    f"the step of {type(self._optimizer).__name__} {what}, and so cannot be taken apart. Leave out "
                    "is_separable = True, or use optimizer_overlap='off'"
                )
        finally:
            for parameter, shadow in self._shadows.items():
                if shadow in self._optimizer.state:
                    self._state[parameter] = self._optimizer.state[shadow]
                shadow.grad = None

    def _beside(self) -> dict[str, Any]:
        """What must be the same after the step, by what is the matter if it is not."""
        shadows = self._shadows.values()
        return {
            "gives a parameter other memory instead of writing it in place": [s.data_ptr() for s in shadows],
            "gives a parameter another gradient instead of writing it in place": [id(s.grad) for s in shadows],
            "writes the options of its parameter groups": [
                {name: _mark(value) for name, value in group.items()} for _, group in self._groups.values()
            ],
            # What is in a list or dict there is shared with the optimizer itself.
            "writes attributes of the optimizer": {
                name: id(value) for name, value in vars(self._optimizer).items() if name != "state"
            },
            "keeps state that belongs to no parameter": self._optimizer.state.keys() - set(shadows),
        }

    def _lost(self) -> str | None:
        """What the step of an optimizer that is not torch's has written beside weights, gradients and their state;
        None for nothing."""
        if self._before is None:
            return None
        now = self._beside()
        return next((what for what, before in self._before.items() if now[what] != before), None)


def _is_of_torch(optimizer: Any) -> bool:
    return type(optimizer).__module__.startswith("torch.optim.")


def _mark(value: Any) -> Any:
    """Something that is equal as long as ``value`` is not written."""
    if isinstance(value, Tensor):
        return id(value), version_of(value)
    if isinstance(value, (list, tuple)):
        return [id(item) for item in value]
    return value if isinstance(value, (bool, int, float, str)) else id(value)


def _shadow_of(parameter: nn.Parameter) -> Tensor:
    """A tensor in the memory of ``parameter`` that an optimizer takes for it."""
    shadow: Tensor = parameter.data.requires_grad_(parameter.requires_grad)
    vars(shadow).update(vars(parameter), _is_param=True)  # by which torch makes it an instance of nn.Parameter
    return shadow
