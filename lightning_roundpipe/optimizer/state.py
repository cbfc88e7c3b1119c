"""State of an optimizer with updates behind the pipeline; see [Note: parameter futures] in :mod:`weights.futures`."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer


class GuardedState(defaultdict[Any, Any]):
    """The state of an optimizer; a look at it waits for updates that are under way."""

    def __init__(self, state: dict[Any, Any], wait: Callable[[], None]) -> None:
        super().__init__(dict, state)
        self.plain = state
        self.stateless: set[nn.Parameter] = set()  # got none in their first update
        self._wait = wait

    def copy(self) -> defaultdict[Any, Any]:  # type: ignore[override]
        """A plain state."""
        return defaultdict(dict, self)

    def __copy__(self) -> defaultdict[Any, Any]:  # type: ignore[override]
        return self.copy()

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())

    def peek(self) -> list[dict[str, Any]]:
        """The states of all parameters, without a wait: for what an update does not change."""
        return list(super().values())

    def peek_keys(self) -> list[Any]:
        """What it is the state of, without a wait."""
        return list(super().keys())

    def lend(self, parameter: nn.Parameter) -> dict[str, Any] | None:
        """The state of one parameter, without a wait; None if there is none."""
        return super().get(parameter)

    def take_back(self, parameter: nn.Parameter, state: dict[str, Any] | None) -> None:
        """The state of one parameter after its update; None if it has none."""
        if state is None:
            super().pop(parameter, None)
        else:
            super().__setitem__(parameter, state)


def _waiting(name: str) -> Callable[..., Any]:
    original = getattr(defaultdict, name)

    @functools.wraps(original)
    def method(self: GuardedState, *args: Any, **kwargs: Any) -> Any:
        self._wait()
        return original(self, *args, **kwargs)

    return method


for _name in (
    "__getitem__", "__setitem__", "__delitem__", "__contains__", "__iter__", "__len__", "__eq__", "__ne__", "__repr__",
    "__reversed__", "__ior__", "get", "keys", "values", "items", "pop", "popitem", "setdefault",
    "update", "clear",
):  # fmt: skip
    setattr(GuardedState, _name, _waiting(_name))


def unguard(optimizer: Optimizer) -> None:
    """Gives ``optimizer`` its plain state again: the object that it had before."""
    state = optimizer.state
    if isinstance(state, GuardedState):
        entries = dict(state)
        state.plain.clear()
        state.plain.update(entries)
        optimizer.state = state.plain  # type: ignore[assignment]
