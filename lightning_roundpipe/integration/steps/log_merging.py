"""``self.log`` calls of M micro-batches become one call with the value of the whole batch.

[Note: held logs]
All ways to log end in the ``log`` of Lightning's collection of results: ``self.log`` and ``log_dict``, ``log`` of
callbacks, ``super().log``, and bound methods that code was given before the step. So that is what is held back. By then
Lightning has checked the value and made a tensor of it, on the thread and the line of the user. What it checks later,
when the call is replayed, gets a note that says where the call was made.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from ...common.attributes import attribute_set
from ...lightning_packages import everywhere, pl
from ...usercode.lock import current
from ...usercode.outputs import brought_home
from ..batches.splitting import Batches
from .metrics import StepMetrics

_LIGHTNING_FILES = {kind.log.__code__.co_filename for kind in everywhere(pl.LightningModule)}


@dataclass
class _LogCall:
    index: int  # of the micro-batch
    fx: str
    name: str
    value: Any
    kwargs: dict[str, Any]
    place: str


class LogCapture:
    """Holds back what micro-batch threads log, and logs it once; see [Note: held logs].

    Lightning's logging is not thread-safe, and M calls would count M times. A replayed call has the arguments of the
    first micro-batch that made it; its value is the mean over the micro-batches weighted like the loss, or their sum,
    minimum or maximum where ``reduce_fx`` says so. A ``batch_size`` weighs batches against each other and nothing else,
    as in plain Lightning: what is given for micro-batches becomes that of the batch. ``Metric`` objects are logged as
    themselves. What the recomputation of a unit logs has been logged by its forward.
    """

    def __init__(self, root: pl.LightningModule, num_microbatches: int, metrics: StepMetrics) -> None:
        self._results = root.trainer._results  # None while predicting: there ``log`` raises
        self._metrics = metrics
        self._calls: list[list[_LogCall]] = [[] for _ in range(num_microbatches)]

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """While open, what is logged on micro-batch threads is held back."""
        results = self._results
        log = contextlib.nullcontext() if results is None else attribute_set(results, "log", self._capture(results.log))
        with log, self._metrics.following(len(self._calls)):
            yield

    def _capture(self, original: Callable[..., None]) -> Callable[..., None]:
        def log(fx: str, name: str, value: Any, **kwargs: Any) -> None:
            state = current()
            if state is None:
                original(fx, name, value, **kwargs)
            elif not state.is_recomputing:
                self._calls[state.index].append(_LogCall(state.index, fx, name, value, kwargs, _place_of_call()))

        return log

    def replay(self, batches: Batches) -> None:
        """Makes the merged calls, on the thread that Lightning expects them on.

        Where a call gives no batch size, Lightning takes what it infers from the whole batch, as on one device.
        """
        for group in self._grouped():
            assert self._results is not None
            first, kwargs = group[0], dict(group[0].kwargs)
            if len(self._calls) == 1:
                merged = brought_home(first.value)
            else:
                if isinstance(first.value, Metric):
                    self._metrics.show_batch_value(first.value)
                own = [batches.weights[call.index] for call in group]
                kwargs["batch_size"] = _batch_size(group, batches)
                merged = _merge(group, own)
            try:
                self._results.log(first.fx, first.name, merged, **kwargs)
            except Exception as error:
                if hasattr(error, "add_note"):  # Python 3.11
                    error.add_note(f"{first.name!r} was logged in {first.place}")
                raise

    def values(self, batches: Batches) -> dict[str, Any]:
        """What would be logged, by name; metric objects apart."""
        found: dict[str, Any] = {}
        for group in self._grouped():
            if not isinstance(group[0].value, Metric):
                name = group[0].name if group[0].name not in found else f"{group[0].name} ({len(found)})"
                weights = [batches.weights[call.index] for call in group]
                found[name] = brought_home(group[0].value) if len(group) == 1 else _merge(group, weights)
        return found

    def parts_of(self, name: str) -> list[Any]:
        """The first value with a name of each micro-batch that has logged one."""
        return next(([call.value for call in group] for group in self._grouped() if group[0].name == name), [])

    def _grouped(self) -> list[list[_LogCall]]:
        """Calls that belong together: the n-th call with a name in every micro-batch; in order of appearance."""
        groups: dict[tuple[str, int], list[_LogCall]] = {}
        for calls in self._calls:
            seen: dict[str, int] = {}
            for call in calls:
                seen[call.name] = seen.get(call.name, 0) + 1
                groups.setdefault((call.name, seen[call.name]), []).append(call)
        return list(groups.values())


def _batch_size(group: Sequence[_LogCall], batches: Batches) -> int | None:
    """The ``batch_size`` that one call for the whole batch would have been given; None if it would be guessed.

    Numbers that are those of the rows of micro-batches, or differ, count something in them, and add up. Another one
    that all give is taken for a constant, such as the size of the whole batch. (Where all have as many rows, it may
    have counted something in these.)
    """
    given: list[int | None] = [call.kwargs.get("batch_size") for call in group]
    known = [size for size in given if size is not None]
    if len(known) < len(given):
        return None
    has_rows = batches.batch_size is None or known == [batches.sizes[call.index] for call in group]
    return sum(known) if has_rows or len(set(known)) > 1 else known[0]


def _place_of_call() -> str:
    """Where the user logs: the innermost line outside Lightning and this file."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename in _LIGHTNING_FILES:
        frame = frame.f_back
    return "an unknown place" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _merge(group: list[_LogCall], weights: Sequence[float]) -> Any:
    values = [call.value for call in group]
    if not all(isinstance(value, Tensor) for value in values):
        return brought_home(values[0])
    stacked = torch.stack([_on_host(value) for value in values])
    how = _reduction_of(group[0])
    if how == "mean":
        return weighted_mean(stacked, weights)
    merge: Callable[[Tensor], Tensor] = getattr(torch, {"min": "amin", "max": "amax"}.get(how, how))
    return merge(stacked)


def _reduction_of(call: _LogCall) -> str:
    """``"sum"``, ``"min"``, ``"max"``, or ``"mean"`` for anything else: Lightning refuses what it does not know."""
    how = call.kwargs["reduce_fx"]
    how = how.lower() if isinstance(how, str) else getattr(how, "__name__", "mean")
    return how if how in ("sum", "min", "max") else "mean"


def _on_host(value: Tensor) -> Tensor:
    """In the dtype in which Lightning accumulates: float32, or float64 if the value or the default dtype is that."""
    if value.dtype == torch.float64 or (not value.is_floating_point() and torch.get_default_dtype() == torch.float64):
        return value.to("cpu", torch.float64)
    return value.to("cpu", torch.float32)


def weighted_mean(values: Tensor, weights: Sequence[float]) -> Tensor:
    """Mean of ``values`` (shape ``[M]``); a weight of zero leaves its value out, even if it is NaN."""
    used = [i for i, weight in enumerate(weights) if weight != 0.0] or list(range(len(weights)))
    if (values[used] == values[used[0]]).all():
        return values[used[0]]  # a rate or an index stays what it is, to the last digit
    share = torch.tensor([weights[i] or 1.0 for i in used], dtype=torch.float64)
    return ((values[used] * share).sum() / share.sum()).to(values.dtype)
