"""Weights of replicas that user code got hold of: their gradient would be lost."""

from __future__ import annotations

from typing import Any

from ..common.graphs import walk_graph


class UnitEscapeError(RuntimeError):
    """A tensor left a unit on a way that the engine cannot follow."""


def check_escape(roots: list[Any], leaves: dict[int, str]) -> None:
    """Looks for parameters of replicas that are reachable from user code.

    Args:
        roots: autograd nodes to start from: of the loss and of the inputs of every call.
        leaves: id of a replica's leaf -> name of its unit.

    Raises:
        UnitEscapeError: if there is one.
    """
    variables = (getattr(node, "variable", None) for node in walk_graph(roots))
    name = next((leaves[id(v)] for v in variables if v is not None and id(v) in leaves), None)
    if name is not None:
        raise UnitEscapeError(
            f"a tensor leaves unit {name!r} on a way that RoundPipe cannot follow (inside an object that is neither a "
            "container, a dataclass nor a registered pytree, or through a global), so its gradient would be lost. "
            "Return it from the unit's forward, or make a coarser module the unit: "
            "RoundPipeStrategy(units=[TheClassAroundIt])."
        )
