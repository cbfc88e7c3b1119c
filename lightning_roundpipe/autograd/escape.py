"""Graphs of units that user code got hold of: their gradient would be lost."""

from __future__ import annotations

from typing import Any, cast

from ..common.graphs import walk_graph
from .recompute import Entry

_ENTRY_NODE = Entry._backward_cls


class UnitEscapeError(RuntimeError):
    """A tensor left a unit on a way that the engine cannot follow."""


def check_escape(roots: list[Any], leaves: dict[int, str]) -> None:
    """Looks for graphs of units behind what user code has: they begin at leaves of replicas and at entries of calls.

    Args:
        roots: autograd nodes to start from: of the loss and of the inputs of every call.
        leaves: id of a replica's leaf -> name of its unit.

    Raises:
        UnitEscapeError: if there is one.
    """
    names = (_unit_of(node, leaves) for node in walk_graph(roots))
    name = next((name for name in names if name is not None), None)
    if name is not None:
        raise UnitEscapeError(
            f"a tensor leaves unit {name!r} on a way that RoundPipe cannot follow (inside an object that is neither a "
            "container, a dataclass nor a registered pytree, through a global, in a list or dict that several modules "
            "share, or as an argument that a hook keeps), so its gradient would be lost. Return it from the unit's "
            "forward, or choose other units: coarser ones, by the class of a module around it, "
            "RoundPipeStrategy(units=['...']), or finer ones, such as units=['Linear']."
        )


def _unit_of(node: Any, leaves: dict[int, str]) -> str | None:
    """The unit in which the graph that has ``node`` begins there; None if none does."""
    if isinstance(node, _ENTRY_NODE):
        return cast(Any, node).call.unit.name  # type: ignore[no-any-return]
    return leaves.get(id(getattr(node, "variable", None)))
