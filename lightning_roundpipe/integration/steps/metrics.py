"""Metrics that the micro-batches of a step update together.

All micro-batches share the states of a metric. So, while a step runs,

- what a metric is updated with is brought to its device: metrics live on the host, predictions may be on any GPU;
- a unit that updates a metric holds the user-code lock meanwhile, and its recomputation leaves the metric alone;
- a *twin* of the metric gets the same updates, from none at the begin of the step. Lightning logs what the last
  ``forward`` of a metric returned, which is the value of one micro-batch: the twin has that of the whole batch.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from torchmetrics import Metric

from ...common.attributes import attribute_set
from ...common.fingerprints import version_of
from ...common.trees import mapped
from ...usercode.lock import UserCodeState, current
from .modules import ModuleScan


class StepMetrics:
    """The metrics of a module in its steps."""

    def __init__(self, scan: ModuleScan) -> None:
        self._scan = scan
        self._brought: Any = WeakTensorKeyDictionary()  # several metrics are shown the same predictions
        # Metric and twin, by id: the hash of a metric changes with its state.
        self._twins: dict[int, tuple[Metric, Metric]] = {}
        self._updated: set[int] = set()  # those with a twin that has seen an update in this step

    @contextlib.contextmanager
    def following(self, num_microbatches: int) -> Iterator[None]:
        """Around a step."""
        self._updated.clear()
        with contextlib.ExitStack() as stack:
            for metric in self._scan.metrics:
                forward = self._forward(metric, metric.forward, has_twin=num_microbatches > 1)
                stack.enter_context(attribute_set(metric, "update", self._update(metric, metric.update)))
                stack.enter_context(attribute_set(metric, "forward", forward))
            try:
                yield
            finally:
                self._brought.clear()

    def show_batch_value(self, metric: Metric) -> None:
        """Makes the value over the whole batch the one that Lightning logs."""
        if id(metric) in self._updated:
            metric._forward_cache = self._twins[id(metric)][1].compute()

    def _update(self, metric: Metric, original: Callable[..., Any]) -> Callable[..., Any]:
        def update(*args: Any, **kwargs: Any) -> Any:
            state = current()
            if state is not None and state.is_recomputing:
                return None
            with _user_code_lock_held(state):
                args, kwargs = self._bring(metric, args, kwargs)
                return original(*args, **kwargs)

        return update

    def _forward(self, metric: Metric, original: Callable[..., Any], *, has_twin: bool) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            state = current()
            with _user_code_lock_held(state):
                args, kwargs = self._bring(metric, args, kwargs)
                if state is not None and state.is_recomputing:
                    return _empty_copy(metric).forward(*args, **kwargs)
                value = original(*args, **kwargs)
                if has_twin:
                    with torch.no_grad():
                        self._twin_of(metric).update(*args, **kwargs)
                return value

        return forward

    def _bring(self, metric: Metric, *arguments: Any) -> Any:
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

    def _twin_of(self, metric: Metric) -> Metric:
        """The twin, empty at the first call in a step."""
        if id(metric) not in self._twins:
            self._twins[id(metric)] = (metric, _empty_copy(metric))
        twin = self._twins[id(metric)][1]
        if id(metric) not in self._updated:
            self._updated.add(id(metric))
            twin.reset()
        return twin


def _user_code_lock_held(state: UserCodeState | None) -> contextlib.AbstractContextManager[None]:
    """The user-code lock for a unit; user code has it."""
    if state is None or state.unit_writes is None or state.lock is None:
        return contextlib.nullcontext()
    return state.lock.in_user_code(state)


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
