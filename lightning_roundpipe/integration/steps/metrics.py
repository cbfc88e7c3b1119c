"""Metrics that the micro-batches of a step update together.

All micro-batches share the states of a metric. So, while a step runs,

- what a metric is updated with is brought to its device: metrics live on the host, predictions may be on any GPU;
- no other micro-batch runs user code before the update is complete, even if it calls a network: that runs at once;
- a unit that updates a metric holds the user-code lock meanwhile, and its recomputation leaves the metric alone;
- what micro-batches append to its lists is put into their order when the step ends;
- a *twin* of the metric gets the same updates, from none at the begin of the step. Lightning logs what the last
  ``forward`` of a metric returned, which is the value of one micro-batch: the twin has that of the whole batch.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import nn
from torchmetrics import Metric

from ...common.attributes import attribute_set
from ...common.trees import mapped
from ...usercode.lock import UserCodeState, current
from .modules import ModuleScan


class StepMetrics:
    """The metrics of a module in its steps."""

    def __init__(self, scan: ModuleScan) -> None:
        self._scan = scan
        # Metric and twin, by id: the hash of a metric changes with its state.
        self._twins: dict[int, tuple[Metric, Metric]] = {}
        self._updated: set[int] = set()  # those with a twin that has seen an update in this step
        self._entries = _Entries()

    @contextlib.contextmanager
    def following(self, num_microbatches: int) -> Iterator[None]:
        """Around a step."""
        self._updated.clear()
        self._entries = _Entries()
        with contextlib.ExitStack() as stack:
            for metric in self._scan.metrics:
                forward = self._forward(metric, metric.forward, has_twin=num_microbatches > 1)
                stack.enter_context(attribute_set(metric, "update", self._update(metric, metric.update)))
                stack.enter_context(attribute_set(metric, "forward", forward))
            yield
            self._entries.put_in_order()

    def show_batch_value(self, metric: Metric) -> None:
        """Makes the value over the whole batch the one that Lightning logs."""
        if id(metric) in self._updated and metric._forward_cache is not None:  # some metrics show no such value
            metric._forward_cache = self._twins[id(metric)][1].compute()

    def _update(self, metric: Metric, original: Callable[..., Any]) -> Callable[..., Any]:
        def update(*args: Any, **kwargs: Any) -> Any:
            state = current()
            if state is not None and state.is_recomputing:
                return None
            with _alone(state), self._entries.noted(metric, state):
                args, kwargs = _on_device_of(metric, args, kwargs)
                return original(*args, **kwargs)

        return update

    def _forward(self, metric: Metric, original: Callable[..., Any], *, has_twin: bool) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            state = current()
            with _alone(state):
                args, kwargs = _on_device_of(metric, args, kwargs)
                if state is not None and state.is_recomputing:
                    return _empty_copy(metric).forward(*args, **kwargs)
                with self._entries.noted(metric, state):
                    value = original(*args, **kwargs)
                if has_twin:
                    with torch.no_grad():
                        self._twin_of(metric).update(*args, **kwargs)
                return value

        return forward

    def _twin_of(self, metric: Metric) -> Metric:
        """The twin, empty at the first call in a step."""
        if id(metric) not in self._twins:
            self._twins[id(metric)] = (metric, _empty_copy(metric))
        twin = self._twins[id(metric)][1]
        if id(metric) not in self._updated:
            self._updated.add(id(metric))
            _reset(twin)
        return twin


def _on_device_of(metric: Metric, *arguments: Any) -> Any:
    """``arguments`` with their tensors on the device of ``metric``; the graph stays."""
    device = metric.device
    return mapped(arguments, lambda tensor: tensor if tensor.device == device else tensor.to(device))


@contextlib.contextmanager
def _alone(state: UserCodeState | None) -> Iterator[None]:
    """With the user-code lock, which user code has and keeps: what a metric does, other micro-batches must not see half
    done. Units that it calls run as a part of it."""
    if state is None:
        yield
    elif state.unit_writes is not None and state.lock is not None:
        with state.lock.in_user_code(state):
            yield
    else:
        with attribute_set(state, "call_unit", None):
            yield


class _Entries:
    """What micro-batches append to the list states of metrics, in the order in which they come, which may be any."""

    def __init__(self) -> None:
        # Of a state: the metric, its length since it was noted, and the micro-batch of each entry at its end.
        self._noted: dict[tuple[int, str], tuple[Metric, int, list[int]]] = {}
        self._inside: set[tuple[int, int]] = set()

    @contextlib.contextmanager
    def noted(self, metric: Metric, state: UserCodeState | None) -> Iterator[None]:
        """Around an update of ``metric``, in which other updates of it may be."""
        if state is None or (place := (id(metric), state.index)) in self._inside:
            yield
            return
        before = {name: len(entries) for name, entries in _list_states(metric)}
        self._inside.add(place)
        try:
            yield
        finally:
            self._inside.remove(place)
        for name, entries in _list_states(metric):
            _, length, indices = self._noted.get((id(metric), name), (metric, -1, []))
            if length != before.get(name):  # user code has reset the metric
                indices = []
            indices = indices + [state.index] * (len(entries) - before.get(name, 0))
            self._noted[id(metric), name] = (metric, len(entries), indices)

    def put_in_order(self) -> None:
        """The step has ended: what it has appended comes in the order of the micro-batches."""
        for (_, name), (metric, length, indices) in self._noted.items():
            entries = dict(_list_states(metric)).get(name, [])
            if indices and len(entries) == length:
                added = zip(indices, entries[-len(indices) :], strict=True)
                entries[-len(indices) :] = [entry for _, entry in sorted(added, key=lambda pair: pair[0])]


def _list_states(metric: Metric) -> list[tuple[str, list[Any]]]:
    """Name and value of its own states that are lists, not of those of a metric inside."""
    states = ((name, vars(metric).get(name)) for name in metric._defaults)
    return [(name, value) for name, value in states if isinstance(value, list)]


def _empty_copy(metric: Metric) -> Metric:
    """A copy with states of its own, also of metrics inside, which are of this rank alone. Not ``clone``: states may
    carry graphs, which cannot be copied deeply."""
    twin = cast(Metric, _with_own_metrics(metric))
    _reset(twin)
    return twin


def _with_own_metrics(module: nn.Module) -> nn.Module:
    """A copy of ``module`` if metrics are in it, which are copies then."""
    if not any(isinstance(inside, Metric) for inside in module.modules()):
        return module
    twin = copy.copy(module)  # torchmetrics binds update and compute to the copy
    children = {name: None if child is None else _with_own_metrics(child) for name, child in module._modules.items()}
    twin.__dict__.update(_parameters=dict(module._parameters), _buffers=dict(module._buffers), _modules=children)
    if isinstance(twin, Metric):
        twin.__dict__["_defaults"] = dict(twin._defaults)
        for name, default in twin._defaults.items():
            if isinstance(default, list) and name in twin.__dict__:
                twin.__dict__[name] = []  # reset() clears lists in place
        twin.__dict__.pop("forward", None)
        twin._to_sync = twin.dist_sync_on_step  # as for the value that forward returns
    return twin


def _reset(twin: Metric) -> None:
    for metric in twin.modules():
        if isinstance(metric, Metric):
            metric.reset()
