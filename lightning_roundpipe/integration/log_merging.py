"""``self.log`` calls of M micro-batches become one call with the value of the whole batch."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from torchmetrics import Metric

from ..common.attributes import attribute_set
from ..common.fingerprints import version_of
from ..common.trees import mapped
from ..usercode.lock import current
from ..usercode.outputs import brought_home

_LIGHTNING_FILE = LightningModule.log.__code__.co_filename


# [Note: held logs]
# All ways to log end in the ``log`` of Lightning's collection of results: ``self.log`` and ``log_dict``, ``log`` of
# callbacks, ``super().log``, and bound methods that somebody was given before the step. So that is what is held back.
# By then Lightning has checked the value and made a tensor of it, on the thread and the line of the user. What it
# checks later, when the call is replayed, gets a note that says where the call was made.


@dataclass
class _LogCall:
    fx: str
    name: str
    value: Any
    kwargs: dict[str, Any]
    place: str


class LogCapture:
    """Holds back what micro-batch threads log, and logs it once; see [Note: held logs].

    Lightning's logging is not thread-safe, and M calls would count M times. A replayed call has the arguments of the
    first micro-batch that made it; its value is the mean over the micro-batches weighted like the loss (or by the
    ``batch_size`` given to the calls), or their sum, minimum or maximum where ``reduce_fx`` says so. ``Metric``
    objects are logged as themselves. What the recomputation of a unit logs has been logged by its forward.
    """

    def __init__(self, root: LightningModule, num_microbatches: int, metrics: MetricTwins) -> None:
        self._root = root
        self._results = root.trainer._results  # None while predicting: there ``log`` raises
        self._metrics = metrics if num_microbatches > 1 else None
        self._arguments = MetricArguments()
        self._calls: list[list[_LogCall]] = [[] for _ in range(num_microbatches)]

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """While open, what is logged on micro-batch threads is held back."""
        with contextlib.ExitStack() as stack:
            if self._results is not None:
                stack.enter_context(attribute_set(self._results, "log", self._capture(self._results.log)))
            if self._metrics is not None:
                stack.enter_context(self._metrics.following(self._root, self._arguments))
            stack.enter_context(self._arguments.following(self._root))
            yield

    def _capture(self, original: Callable[..., None]) -> Callable[..., None]:
        def log(fx: str, name: str, value: Any, **kwargs: Any) -> None:
            state = current()
            if state is None:
                original(fx, name, value, **kwargs)
            elif not state.is_recomputing:
                self._calls[state.index].append(_LogCall(fx, name, value, kwargs, _place_of_call()))

        return log

    def replay(self, weights: Sequence[float], sizes: Sequence[int], batch_size: int | None) -> None:
        """Makes the merged calls, on the thread that Lightning expects them on.

        Args:
            weights: of the micro-batches, for means.
            sizes: rows of the micro-batches.
            batch_size: rows of the whole batch, for calls that give none; None leaves it to Lightning.
        """
        single = len(self._calls) == 1
        for group in self._grouped():
            first = group[0][1]
            if self._metrics is not None and isinstance(first.value, Metric):
                self._metrics.show_batch_value(first.value)
            kwargs = dict(first.kwargs)
            if not single:
                given = [call.kwargs["batch_size"] for _, call in group if call.kwargs.get("batch_size") is not None]
                if len(given) == len(group) and _is_of_the_batch(given, sizes, batch_size):
                    merged = _merge(group, [weights[index] for index, _ in group])
                elif len(given) == len(group):
                    kwargs["batch_size"] = sum(given)
                    merged = _merge(group, [float(size) for size in given])
                else:
                    kwargs["batch_size"] = batch_size
                    merged = _merge(group, [weights[index] for index, _ in group])
                    self._warn_of_count(group, weights, batch_size)
            else:
                merged = brought_home(first.value)
            assert self._results is not None
            try:
                self._results.log(first.fx, first.name, merged, **kwargs)
            except Exception as error:
                if hasattr(error, "add_note"):  # Python 3.11
                    error.add_note(f"{first.name!r} was logged in {first.place}")
                raise

    def _warn_of_count(
        self, group: list[tuple[int, _LogCall]], weights: Sequence[float], batch_size: int | None
    ) -> None:
        """A count is logged as the mean of the counts of the micro-batches; said once, when the name is new."""
        name, values = group[0][1].name, [call.value for _, call in group]
        if _reduction_of(group[0][1]) != "mean" or not all(isinstance(value, Tensor) for value in values):
            return
        assert self._results is not None
        if any(result.meta.name == name for result in self._results.values()):
            return
        counts = [float(value) for value in values]  # of new names only: on a GPU this waits
        if not all(count.is_integer() for count in counts) or max(counts) <= 1.0:
            return
        rows = [round(weights[index] * (batch_size or 0)) for index, _ in group]
        if len(set(counts)) > 1 or counts == rows:
            shown = ", ".join(f"{count:.0f}" for count in counts)
            rank_zero_warn(
                f"{name!r}, logged in {group[0][1].place}, looks like a count: the micro-batches logged {shown}, and "
                "the mean of that is shown. If it is a count, log it with reduce_fx='sum', which Lightning also "
                "applies over the steps of an epoch."
            )

    def _grouped(self) -> list[list[tuple[int, _LogCall]]]:
        """Calls that belong together: the n-th call with a name in every micro-batch; in order of appearance."""
        groups: dict[tuple[str, int], list[tuple[int, _LogCall]]] = {}
        for index, calls in enumerate(self._calls):
            seen: dict[str, int] = {}
            for call in calls:
                seen[call.name] = seen.get(call.name, 0) + 1
                groups.setdefault((call.name, seen[call.name]), []).append((index, call))
        return list(groups.values())


def _is_of_the_batch(given: Sequence[int], sizes: Sequence[int], batch_size: int | None) -> bool:
    """Whether a ``batch_size`` that is logged is a constant: that of the whole batch, or 1 beside more rows."""
    if batch_size is None or len(set(given)) > 1:
        return False
    return given[0] >= batch_size > max(sizes) or given[0] == 1 < max(sizes)


def _place_of_call() -> str:
    """Where the user logs: the innermost line outside Lightning and this file."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename == _LIGHTNING_FILE:
        frame = frame.f_back
    return "an unknown place" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


class MetricArguments:
    """Brings what metrics are updated with to their device: they live on the host, predictions may be on any GPU.

    All micro-batches share the states of a metric: a unit that updates one has the user-code lock meanwhile, and its
    recomputation leaves the metric alone.
    """

    def __init__(self) -> None:
        # Several metrics are shown the same predictions.
        self._brought: Any = WeakTensorKeyDictionary()

    @contextlib.contextmanager
    def following(self, root: nn.Module) -> Iterator[None]:
        """While open, arguments of ``update`` (which ``forward`` calls) are brought to the metrics below ``root``."""
        with contextlib.ExitStack() as stack:
            for metric in [m for m in root.modules() if isinstance(m, Metric)]:
                stack.enter_context(attribute_set(metric, "update", self._update(metric, metric.update)))
                stack.enter_context(attribute_set(metric, "forward", self._forward(metric, metric.forward)))
            yield

    def _update(self, metric: Metric, original: Callable[..., Any]) -> Callable[..., Any]:
        def update(*args: Any, **kwargs: Any) -> Any:
            state = current()
            if state is not None and state.is_recomputing:
                return None
            with _user_code_lock_held():
                args, kwargs = self.bring(metric, args, kwargs)
                return original(*args, **kwargs)

        return update

    def _forward(self, metric: Metric, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            state = current()
            with _user_code_lock_held():
                if state is not None and state.is_recomputing:
                    args, kwargs = self.bring(metric, args, kwargs)
                    return _empty_copy(metric).forward(*args, **kwargs)
                return original(*args, **kwargs)

        return forward

    def bring(self, metric: Metric, *arguments: Any) -> Any:
        """``arguments`` with their tensors on the device of ``metric``; the graph stays."""
        device = metric.device

        def brought(tensor: Tensor) -> Tensor:
            if tensor.device == device:
                return tensor
            kind = (version_of(tensor), device, torch.is_grad_enabled())
            known = self._brought.get(tensor)
            if known is None or known[0] != kind:
                known = self._brought[tensor] = (kind, tensor.to(device))
            return cast(Tensor, known[1])

        return mapped(arguments, brought)


def _user_code_lock_held() -> contextlib.AbstractContextManager[None]:
    """The user-code lock for a unit; user code has it."""
    state = current()
    if state is None or state.unit_writes is None or state.lock is None:
        return contextlib.nullcontext()
    return state.lock.in_user_code(state)


class MetricTwins:
    """The value of a metric over the whole batch, for ``self.log(name, metric, on_step=True)``.

    Lightning logs what the last ``forward`` of the metric returned, which here is the value of one micro-batch. A twin
    of the metric sees the updates of all micro-batches of the step.
    """

    def __init__(self) -> None:
        # By id: the hash of a metric changes with its state.
        self._twins: dict[int, tuple[Metric, Metric]] = {}
        self._started: set[int] = set()

    @contextlib.contextmanager
    def following(self, root: nn.Module, arguments: MetricArguments) -> Iterator[None]:
        """While open, what metrics below ``root`` are called with goes to their twins as well."""
        self._started.clear()
        with contextlib.ExitStack() as stack:
            for metric in [m for m in root.modules() if isinstance(m, Metric)]:
                stack.enter_context(attribute_set(metric, "forward", self._follow(metric, metric.forward, arguments)))
            yield

    def _follow(self, metric: Metric, original: Callable[..., Any], arguments: MetricArguments) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = arguments.bring(metric, args, kwargs)
            value = original(*args, **kwargs)
            with torch.no_grad():
                self._twin_of(metric).update(*args, **kwargs)
            return value

        return forward

    def show_batch_value(self, metric: Metric) -> None:
        """Makes the value over the whole batch the one that Lightning logs."""
        if id(metric) in self._started:
            metric._forward_cache = self._twins[id(metric)][1].compute()

    def _twin_of(self, metric: Metric) -> Metric:
        """The twin, empty at the first call in a step."""
        if id(metric) not in self._twins:
            self._twins[id(metric)] = (metric, _empty_copy(metric))
        twin = self._twins[id(metric)][1]
        if id(metric) not in self._started:
            self._started.add(id(metric))
            twin.reset()
        return twin


def _empty_copy(metric: Metric) -> Metric:
    """A copy with states of its own. Not ``clone``: states may carry graphs, which cannot be copied deeply."""
    twin = copy.copy(metric)  # torchmetrics binds update and compute to the copy
    for name in ("_parameters", "_buffers", "_modules", "_defaults"):
        twin.__dict__[name] = dict(twin.__dict__[name])
    for name, default in twin._defaults.items():
        if isinstance(default, list):
            twin.__dict__[name] = []  # reset() clears lists in place
    for name in ("forward", "_forward_cache", "_computed"):
        twin.__dict__.pop(name, None)
    twin._forward_cache = twin._computed = None
    return twin


def _merge(group: list[tuple[int, _LogCall]], weights: Sequence[float]) -> Any:
    values = [call.value for _, call in group]
    if not all(isinstance(value, Tensor) for value in values):
        return brought_home(values[0])
    stacked = torch.stack([_on_host(value) for value in values])
    how = _reduction_of(group[0][1])
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
