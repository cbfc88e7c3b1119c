"""State of an optimizer with updates behind the pipeline; see [Note: parameter futures] in :mod:`weights.futures`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer


class GuardedState(defaultdict[Any, Any]):
    """The state of an optimizer as all others see it: whatever they ask it waits for updates that are under way.

    Attributes:
        plain: the state itself, for what need not wait; this holds nothing.
        stateless: weights that got none in their first update.
    """

    def __init__(self, plain: dict[Any, Any], wait: Callable[[], None]) -> None:
        super().__init__(dict)
        self.plain = plain
        self.stateless: set[nn.Parameter] = set()
        self._wait = wait

    def __copy__(self) -> Any:
        return self.copy()

    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())


def _waiting(name: str) -> Callable[..., Any]:
    def method(self: GuardedState, *args: Any, **kwargs: Any) -> Any:
        self._wait()
        return getattr(self.plain, name)(*args, **kwargs)

    return method


for _name in (
    "__getitem__", "__setitem__", "__delitem__", "__contains__", "__iter__", "__len__", "__eq__", "__ne__", "__repr__",
    "__reversed__", "__or__", "__ror__", "__ior__", "get", "keys", "values", "items", "pop", "popitem", "setdefault",
    "update", "clear", "copy",
):  # fmt: skip
    setattr(GuardedState, _name, _waiting(_name))


def plain_state(optimizer: Optimizer) -> dict[Any, Any]:
    """The state of ``optimizer`` itself; a look at it does not wait."""
    state = optimizer.state
    return state.plain if isinstance(state, GuardedState) else state
