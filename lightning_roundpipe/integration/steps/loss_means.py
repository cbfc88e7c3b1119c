"""Means of ``cross_entropy`` that micro-batches are not weighed for.

A loss over labels of which some are padding (``ignore_index=pad``, labels that the step masks itself) is a mean over
the others. ``loss_weight="auto"`` knows of those that a batch calls ``labels``. So the first training steps watch
``cross_entropy``: what its means are over should be to each other as the weights of the micro-batches.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...common.attributes import attribute_set
from ...usercode.lock import current
from .notices import Notices

# Training steps that are watched.
_NUM_STEPS = 3
_TOLERANCE = 1e-3
_ARGUMENTS = inspect.signature(F.cross_entropy)


class LossMeans:
    """Warns once of a mean over something else than what weighs; watches only while ``loss_weight`` is ``"auto"``."""

    def __init__(self, loss_weight: Any, notices: Notices) -> None:
        self._num_left = _NUM_STEPS if loss_weight == "auto" else 0
        self._notices = notices

    @contextlib.contextmanager
    def watching(self, weights: Sequence[float], sizes: Sequence[int]) -> Iterator[None]:
        """Around the run of a training step whose micro-batches have these weights, and so many rows."""
        if self._num_left == 0 or len(weights) < 2 or math.fsum(weights) > 1.5:  # sums
            yield
            return
        self._num_left -= 1
        counts: list[list[float]] = [[] for _ in weights]
        with attribute_set(F, "cross_entropy", _counting(F.cross_entropy, counts)):
            yield
        if [len(of_one) for of_one in counts] != list(sizes):  # one call for each sample: it is a mean over these
            for of_one_call in zip(*counts, strict=False):
                self._compare(of_one_call, weights)

    def _compare(self, counts: Sequence[float], weights: Sequence[float]) -> None:
        total = sum(counts)
        if total == 0.0 or all(
            math.isclose(count / total, weight, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE**2)
            for count, weight in zip(counts, weights, strict=True)
        ):
            return
        shown, given = (", ".join(f"{n:g}" for n in numbers) for numbers in (counts, [w * total for w in weights]))
        self._notices.warn(
            "loss means",
            f"a cross_entropy of training_step is a mean over {shown} labels in the micro-batches, which weigh as if "
            f"it were {given}: the loss may not be that of the whole batch. Give the number of labels: "
            "RoundPipeStrategy(loss_weight=function from a micro-batch to it). If that is not what the whole loss is a "
            "mean over, loss_weight='samples' keeps this quiet",
        )


def _counting(original: Any, counts: list[list[float]]) -> Any:
    """``cross_entropy`` that notes what its means are over, by micro-batch."""

    @functools.wraps(original)
    def cross_entropy(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        state = None if torch.compiler.is_compiling() else current()
        if state is not None and not state.is_recomputing and isinstance(result, Tensor) and result.requires_grad:
            counts[state.index].append(_num_labels(*args, **kwargs) if result.ndim == 0 else 0.0)
        return result

    return cross_entropy


def _num_labels(*args: Any, **kwargs: Any) -> float:
    """How many labels a call's result is a mean over; 0 if it is none, if a transform of torch hides them, or if a
    function of the user has taken the place of that of torch."""
    try:
        given = _ARGUMENTS.bind(*args, **kwargs)
        given.apply_defaults()
        target, weight = given.arguments["target"], given.arguments["weight"]
        if given.arguments["reduction"] != "mean" or target.is_floating_point():
            return 0.0
        labels = target.detach()[target != given.arguments["ignore_index"]]
        return float(labels.numel() if weight is None else weight.detach()[labels].sum())
    except (RuntimeError, TypeError, KeyError):
        return 0.0
