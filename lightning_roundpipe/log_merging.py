"""``self.log`` calls of M micro-batches become one call with the value of the whole batch."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from torchmetrics import Metric

from .engine.glue import current
from .engine.offload import version_of
from .engine.outputs import brought_home


@dataclass
class _LogCall:
    module: LightningModule
    name: str
    value: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def reduce_fx(self) -> Any:
        return self.kwargs.get("reduce_fx", "mean")


class LogCapture:
    """Holds back ``log`` calls that micro-batch threads make, and replays each of them once.

    Lightning's logging is not thread-safe, and M calls would count M times. A replayed call has the arguments of the
    first micro-batch that made it; its value is the mean over the micro-batches weighted like the loss (or by the
    ``batch_size`` given to the calls), or their sum, minimum or maximum where ``reduce_fx`` says so. ``Metric``
    objects are logged as themselves. Lightning checks the arguments when the call is replayed.
    """

    def __init__(self, root: LightningModule, num_microbatches: int, metrics: MetricTwins) -> None:
        self._root = root
        self._modules = [m for m in root.modules() if isinstance(m, LightningModule)]
        self._metrics = metrics if num_microbatches > 1 else None
        self._arguments = MetricArguments()
        self._calls: list[list[_LogCall]] = [[] for _ in range(num_microbatches)]

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """While open, ``log`` of every LightningModule in the tree is held back on micro-batch threads."""
        with contextlib.ExitStack() as stack:
            for module in self._modules:
                stack.enter_context(_attribute(module, "log", self._capture(module, module.log)))
            if self._metrics is not None:
                stack.enter_context(self._metrics.following(self._root, self._arguments))
            stack.enter_context(self._arguments.following(self._root))
            yield

    def _capture(self, module: LightningModule, original: Callable[..., None]) -> Callable[..., None]:
        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            state = current()
            if state is None:
                return original(name, value, *args, **kwargs)
            held = value.detach().clone() if isinstance(value, Tensor) else value
            self._calls[state.index].append(_LogCall(module, name, held, args, kwargs))
            return None

        return log

    def replay(self, weights: Sequence[float], batch_size: int | None) -> None:
        """Makes the merged calls, on the thread that Lightning expects them on.

        Args:
            weights: of the micro-batches, for means.
            batch_size: rows of the whole batch, for calls that give none; None leaves it to Lightning.
        """
        single = len(self._calls) == 1
        for group in self._grouped():
            first = group[0][1]
            if self._metrics is not None and isinstance(first.value, Metric):
                self._metrics.show_batch_value(first.value)
            kwargs = dict(first.kwargs)
            if not single:
                sizes = [call.kwargs.get("batch_size") for _, call in group]
                given = [size for size in sizes if size is not None]
                if len(given) == len(group):
                    kwargs["batch_size"] = sum(given)
                    merged = _merge(group, [float(size) for size in given])
                else:
                    kwargs["batch_size"] = batch_size
                    merged = _merge(group, [weights[index] for index, _ in group])
            else:
                merged = brought_home(first.value)
            first.module.log(first.name, merged, *first.args, **kwargs)

    def _grouped(self) -> list[list[tuple[int, _LogCall]]]:
        """Calls that belong together: the n-th call with a name in every micro-batch; in order of appearance."""
        groups: dict[tuple[int, str, int], list[tuple[int, _LogCall]]] = {}
        for index, calls in enumerate(self._calls):
            seen: dict[tuple[int, str], int] = {}
            for call in calls:
                key = (id(call.module), call.name)
                seen[key] = seen.get(key, 0) + 1
                groups.setdefault((*key, seen[key]), []).append((index, call))
        return list(groups.values())


@contextlib.contextmanager
def _attribute(module: nn.Module, name: str, value: Any) -> Iterator[None]:
    """Sets an instance attribute for a while."""
    missing = object()
    before = module.__dict__.get(name, missing)
    module.__dict__[name] = value
    try:
        yield
    finally:
        if before is missing:
            module.__dict__.pop(name, None)
        else:
            module.__dict__[name] = before


class MetricArguments:
    """Brings what metrics are updated with to their device: they live on the host, predictions may be on any GPU."""

    def __init__(self) -> None:
        # Several metrics are shown the same predictions.
        self._brought: Any = WeakTensorKeyDictionary()

    @contextlib.contextmanager
    def following(self, root: nn.Module) -> Iterator[None]:
        """While open, arguments of ``update`` (which ``forward`` calls) are brought to the metrics below ``root``."""
        with contextlib.ExitStack() as stack:
            for metric in [m for m in root.modules() if isinstance(m, Metric)]:
                stack.enter_context(_attribute(metric, "update", self._update(metric, metric.update)))
            yield

    def _update(self, metric: Metric, original: Callable[..., Any]) -> Callable[..., Any]:
        def update(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self.bring(metric, args, kwargs)
            return original(*args, **kwargs)

        return update

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

        return apply_to_collection(arguments, Tensor, brought)


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
                stack.enter_context(_attribute(metric, "forward", self._follow(metric, metric.forward, arguments)))
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
    if isinstance(values[0], Metric) or not all(_is_scalar(value) for value in values):
        return brought_home(values[0])
    stacked = torch.stack([_as_tensor(value) for value in values])
    how = group[0][1].reduce_fx
    how = how if isinstance(how, str) else getattr(how, "__name__", "mean")
    if how in ("sum", "min", "max", "amin", "amax"):
        merge: Callable[[Tensor], Tensor] = getattr(torch, {"min": "amin", "max": "amax"}.get(how, how))
        return merge(stacked)
    return weighted_mean(stacked, weights)


def _is_scalar(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float))


def _as_tensor(value: Any) -> Tensor:
    tensor = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.get_default_dtype())
    tensor = tensor.reshape(()).to("cpu")
    return tensor if tensor.is_floating_point() else tensor.to(torch.get_default_dtype())


def weighted_mean(values: Tensor, weights: Sequence[float]) -> Tensor:
    """Mean of ``values`` (shape ``[M]``); a weight of zero leaves its value out, even if it is NaN."""
    used = [i for i, weight in enumerate(weights) if weight != 0.0] or list(range(len(weights)))
    share = torch.tensor([weights[i] or 1.0 for i in used], dtype=torch.float64)
    share = (share / share.sum()).to(values.dtype)
    return (values[used] * share).sum()
