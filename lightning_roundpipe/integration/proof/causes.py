"""Why splitting a batch changes a value: the likeliest cause, found by looking, and the way out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ...common.trees import tensors_in
from ..batches.splitting import Batches
from ..steps.modules import ModuleScan
from .comparison import are_close

_SHARE_ROUNDING = 1e-3
_WHOLE_BATCH = (
    "lightning_roundpipe.whole_batch(x) in the step gives it the rows of all micro-batches, so that the loss is that "
    "of the batch, and what makes the rows runs in micro-batches"
)
_OWN_WEIGHT = "RoundPipeStrategy(loss_weight=a function from a micro-batch to what it has of that)"
# What of a tensor of the batch a mean may be over: in words, as an expression of it, and the count.
_COUNTS: tuple[tuple[str, str, Callable[[Tensor], Tensor]], ...] = (
    ("entries that are not -100", "({} != -100).sum()", lambda x: (x != -100).sum()),
    ("entries that are not 0", "({} != 0).sum()", lambda x: (x != 0).sum()),
    ("entries above 0", "({} > 0).sum()", lambda x: (x > 0).sum()),
    ("sum", "{}.sum()", lambda x: x.sum()),
    ("entries", "{}.numel()", lambda x: torch.tensor(x.numel())),
)


def cause_of_loss(
    scan: ModuleScan, batches: Batches, whole: float, parts: Sequence[float], square: int, rounding: float
) -> tuple[str, str]:
    """Why a loss differs, and what to do about it.

    Args:
        whole, parts: the losses of rows as one micro-batch, and of each part of them in ``batches``.
        square: rows of a classification with as many classes, in the former.
    """
    norms = [(name, one) for name, one in scan.named if isinstance(one, _BatchNorm) and one.training]
    if norms:
        (name, norm), more = norms[0], f", and {len(norms) - 1} more" if len(norms) > 1 else ""
        return (
            f"the batch norm {name!r} ({type(norm).__name__}{more}) takes its statistics from each micro-batch",
            "eval() keeps its statistics, and GroupNorm or LayerNorm need no batch",
        )
    if square and square == sum(batches.sizes):
        return (
            f"the loss compares all rows with each other (it classifies {square} rows into {square} classes)",
            _WHOLE_BATCH,
        )
    if are_close(whole, math.fsum(parts), rounding):
        return "the loss is a sum over rows", "RoundPipeStrategy(loss_weight='sum')"
    if any(map(math.isnan, parts)) and not math.isnan(whole):
        return "the loss is a mean over something that one of them has nothing of", _OWN_WEIGHT
    share = _share(whole, parts)
    if share is None:
        return "the loss depends on all rows together", _WHOLE_BATCH
    exactness = max(_SHARE_ROUNDING, 4 * rounding * abs(whole) / max(abs(parts[0] - parts[1]), 1e-12))
    for what, expression, counts in _counts_in(batches.microbatches):
        if sum(counts) <= 0 or are_close(counts[0] / sum(counts), batches.weights[0], rounding):
            continue  # it has no weight of its own, or the one that the micro-batches have already
        if abs(counts[0] / sum(counts) - share) <= exactness:
            first, second = (f"{count:g}" for count in counts)
            return (
                f"the loss is a mean over the {what}, {first} and {second} in the two",
                f"RoundPipeStrategy(loss_weight=lambda batch: float({expression}))",
            )
    return (
        f"the loss is a mean over something of which the two have {share:.3g} and {1 - share:.3g} parts",
        f"{_OWN_WEIGHT}; or, if it compares rows with each other, {_WHOLE_BATCH}",
    )


def _share(whole: float, parts: Sequence[float]) -> float | None:
    """What the first of two losses would have to weigh in their mean; None if no mean gives ``whole``."""
    first, second = parts
    if first == second or not all(map(math.isfinite, (whole, first, second))):
        return None
    share = (whole - second) / (first - second)
    return share if 0.0 < share < 1.0 else None


def _counts_in(parts: Sequence[Any]) -> Iterator[tuple[str, str, list[float]]]:
    """Of each tensor of the batch what a mean may be over: in words, as an expression, and how many each part has."""
    found = [dict(tensors_in(part, "batch")) for part in parts]
    for path in found[0]:
        values = [tensors.get(path) for tensors in found]
        if all(isinstance(value, Tensor) and value.layout is torch.strided for value in values):
            for what, expression, count in _COUNTS:
                try:
                    counts = [float(count(value)) for value in values if value is not None]
                except (RuntimeError, TypeError):  # dtypes that do not compare
                    continue
                yield f"{what} of {path}", expression.format(path), counts


def cause_of_log(whole: Any, parts: Sequence[Any], rounding: float) -> str:
    """What to do about a logged value that differs."""
    values = [float(part) for part in parts if isinstance(part, (Tensor, int, float))]
    if len(values) == len(parts) and are_close(float(whole), math.fsum(values), rounding, beside=values):
        return "it is a count or a sum: log it with reduce_fx='sum', which Lightning also applies over the epoch"
    return "it is no mean over rows: log the mean and take the function of it in a hook, or log a metric object"
