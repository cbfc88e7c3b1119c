"""Costs of unit calls, for the planner.

Nothing is measured: a call's time is guessed from the sizes of its weights, which is what dense layers of one model
have in common. The guess is the same on every machine and in every run, and so is the plan.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..planning.costs import CallCost, CostProfile
from .units import Unit

# Backward without recomputation over forward, of matrix products: two products instead of one.
_BACKWARD_RATIO = 2.0
_MS_PER_WEIGHT = 1e-6


def guess_costs(sequence: Sequence[Unit]) -> CostProfile:
    """A :class:`CostProfile` for calls of ``sequence``; only ratios of its times mean anything.

    Weights of matrix products (two or more dimensions) count, tables that are looked up do not; a floor of one percent
    of the mean keeps calls without weights from being free.
    """
    known: dict[Unit, tuple[int, int, int]] = {}
    for unit in sequence:
        if unit not in known:
            known[unit] = (_multiplied_weights(unit.module), unit.weight_bytes(), _gradient_bytes(unit.module))
    mean = sum(known[unit][0] for unit in sequence) / max(1, len(sequence))
    calls = []
    for unit in sequence:
        weights, weight_bytes, gradient_bytes = known[unit]
        forward_ms = (max(weights, 0.01 * mean) + 1.0) * _MS_PER_WEIGHT
        calls.append(CallCost(unit.name, forward_ms, _BACKWARD_RATIO * forward_ms, weight_bytes, gradient_bytes))
    return CostProfile(tuple(calls))


def _multiplied_weights(module: nn.Module) -> int:
    tables = {id(m.weight) for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
    return sum(p.numel() for p in module.parameters() if p.dim() >= 2 and id(p) not in tables)


def _gradient_bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
