"""A step that does not fit on the devices is run again, with more and so smaller micro-batches.

[Note: steps that do not fit]
Whether a step fits is only known when it runs: the planner, the books of a device or the driver of a GPU say that it
does not. Nothing is lost then. The engine leaves weights, gradients and attributes as they were, and what else a step
changes before it succeeds (buffers, metrics that user code updates, generators) is noted before it and put back
(:class:`StepState`). Then the same batch is split into twice as many micro-batches, and planned for anew.

- ``num_microbatches="auto"``: again and again, as long as there are rows.
- A given number: once in a step. Not if modules couple the rows of a micro-batch (batch norm), and not if the number
  is 1, which is how users say that something else does.

Lightning's batch size finder wants to see the limit, not a way around it. While it tries a size, nothing is run again,
and the error is in the words that it looks for: those of CUDA, whatever the device. So it finds the largest batch that
fits with the number of micro-batches that training starts with. Every trial starts without plan and costs, as training
does. What no batch size would make fit ends the search.

The number that fits stays. User code has run in the attempt that failed, and what it has done outside torch (prints,
files) stays as well. If it has changed weights or the batch in place, or something has written a large buffer that no
step has written before, the step is not run again.
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torchmetrics import Metric

from ..common.fingerprints import Versions, version_of
from ..common.sizes import num_bytes_of
from ..common.trees import mapped, tensors_in
from ..devices.memory import DeviceOutOfMemoryError
from ..planning.costs import CostProfile
from ..planning.plan import StageMemoryError, describe_need, needed_bytes
from .batches.splitting import Batches
from .modules import ModuleScan

T = TypeVar("T")
_OUT_OF_MEMORY = (DeviceOutOfMemoryError, torch.OutOfMemoryError, StageMemoryError)


class Retry:
    """Runs steps, and runs them again where they do not fit; see [Note: steps that do not fit].

    Args:
        scan: the user's module.
        num_microbatches: how many a batch is split into at first.
        is_auto: whether the number may be raised again and again.
        devices: of the pool. None where memory cannot run out: nothing is noted and nothing is run again.
        forget: called with the kind of step before such a step is run again: what was planned for it is void.
        costs: of the calls of a kind of step, as far as they are known.
        is_trial: whether Lightning is trying a batch size at the moment.

    Attributes:
        num_microbatches: kind of step -> how many micro-batches are asked for now.
    """

    def __init__(
        self,
        scan: ModuleScan,
        num_microbatches: int,
        *,
        is_auto: bool,
        devices: Sequence[torch.device] | None,
        forget: Callable[[str], None],
        costs: Callable[[str], CostProfile | None],
        is_trial: Callable[[], bool] = lambda: False,
    ) -> None:
        self._scan = scan
        self._start = num_microbatches
        self._is_auto = is_auto
        self._devices = devices
        self._forget = forget
        self._costs = costs
        self._is_trial = is_trial
        self._tried_rows: int | None = None
        self._written: set[str] = set()
        self._final: str | None = None
        self.num_microbatches: dict[str, int] = {}

    def forbid(self, why: str) -> None:
        """The step that is under way cannot be run again, because of what has been done in it."""
        self._final = why

    def run(
        self, kind: str, batch: Any, split: Callable[[Any, int], Batches], attempt: Callable[[Batches], T]
    ) -> tuple[Batches, T]:
        """Runs a step; returns the micro-batches it was run with, and what ``attempt`` gave.

        Args:
            kind: of the step; each has its own number of micro-batches.
            batch: of the step.
            split: (batch, number of micro-batches) -> micro-batches, at most as many.
            attempt: runs the step on them.

        Raises:
            DeviceOutOfMemoryError, StageMemoryError: if it does not fit and is not run again. The message says what
                takes the memory, why it was not run again, and what to change.
        """
        self._final = None
        wanted = self.num_microbatches.setdefault(kind, self._start)
        batches = split(batch, wanted)
        if self._devices is None:
            return batches, attempt(batches)
        if self._is_trial() and batches.batch_size != self._tried_rows:
            self._tried_rows = batches.batch_size
            self._forget(kind)
        state = StepState(self._scan, batch, self._devices, self._written)
        num_retries = 0
        while True:
            try:
                result = attempt(batches)
            except _OUT_OF_MEMORY as error:
                before = len(batches.microbatches)
                more = self._split_again(error, state, split, before, num_retries)
                state.restore()
                if self._is_trial() and getattr(error, "fits_if_split", True) and batches.batch_size != 1:
                    raise _for_finder(error, kind, before) from error
                if isinstance(more, str):
                    raise self._explained(error, kind, before, more) from error
                reason = str(error)
            else:
                self.num_microbatches[kind] = wanted
                state.note_written()
                return batches, result
            # Outside of the handler, where the traceback no longer holds tensors of the attempt.
            self._forget(kind)
            gc.collect()
            torch.cuda.empty_cache()  # smaller pieces are wanted now; does nothing where no GPU is used
            wanted, batches = 2 * before, more
            num_retries += 1
            self._announce(kind, before, len(batches.microbatches), reason)

    def _split_again(
        self,
        error: BaseException,
        state: StepState,
        split: Callable[[Any, int], Batches],
        before: int,
        num_retries: int,
    ) -> Batches | str:
        """More micro-batches of the same batch, or why not."""
        if self._final is not None:
            return self._final
        if not self._is_auto and num_retries:
            return "it was run again once with twice the micro-batches already"
        if not getattr(error, "fits_if_split", True):  # what a driver raises does not say
            return "smaller micro-batches would not help, because weights and gradients alone take too much"
        if not self._is_auto and self._start == 1:
            return "num_microbatches=1 is kept, because the loss may depend on all rows of the batch together"
        if not self._is_auto and any(module.training for module in self._scan.norms):
            return "num_microbatches is kept, because the statistics of batch norm depend on it"
        if (lost := state.lost()) is not None:
            return f"it cannot be run again, because {lost} has changed meanwhile"
        batches = split(state.batch, 2 * before)
        if len(batches.microbatches) <= before:
            return "the batch cannot be split further"
        return batches

    def _announce(self, kind: str, before: int, now: int, reason: str) -> None:
        announce = rank_zero_info if self._is_auto else rank_zero_warn
        announce(
            f"{kind} does not fit on the devices with {_microbatches(before)} per batch, and is run again with {now}, "
            f"as will be the next ones: {reason}"
        )

    def _explained(self, error: BaseException, kind: str, num_microbatches: int, why: str) -> Exception:
        """The error to raise: what happened, why it was final, what takes the memory, what to change."""
        text = (
            f"{kind} does not fit on the devices with {_microbatches(num_microbatches)} per batch, and {why}. {error}"
        )
        if isinstance(error, StageMemoryError):
            return StageMemoryError(text, fits_if_split=error.fits_if_split)
        is_training = kind == "training_step"
        costs = self._costs(kind)
        if costs is not None and costs.calls:
            largest = max(costs.calls, key=lambda call: needed_bytes(call, is_training=is_training))
            text += f" Of all units {describe_need(largest, is_training=is_training)}, which is the most."
        return DeviceOutOfMemoryError(
            f"{text} What helps: smaller micro-batches (a larger num_microbatches) for activations, finer units "
            "(units=[...]) for weights and gradients, a higher device_memory_limit for all of them."
        )


def _for_finder(error: BaseException, kind: str, num_microbatches: int) -> DeviceOutOfMemoryError:
    """The error that lets Lightning's batch size finder go on with a smaller batch: it goes by type and words."""
    count = _microbatches(num_microbatches)
    return DeviceOutOfMemoryError(f"CUDA out of memory: {kind} does not fit on the devices with {count}. {error}")


def _microbatches(count: int) -> str:
    return "1 micro-batch" if count == 1 else f"{count} micro-batches"


# Buffers that no step has written yet are copied up to this size: statistics are small, tables and masks are not.
_MAX_COPIED_BYTES = 2**20


class StepState:
    """The state before a step, so that the step can be run again; see [Note: steps that do not fit] in
    :mod:`integration.retry`.

    Weights, gradients, optimizer state and attributes are not in it: the engine gives them back as they were.

    Args:
        scan: the user's module.
        batch: of the step.
        devices: whose generators user code may draw from.
        written: names of the buffers that steps have written, which are copied whatever their size.

    Attributes:
        batch: with containers of its own: user code may take entries out of the one that was given.
    """

    def __init__(self, scan: ModuleScan, batch: Any, devices: Sequence[torch.device], written: set[str]) -> None:
        self.batch = mapped(batch, anew=object)
        self._written = written
        self._buffers = [_Buffer(*found, written) for found in scan.buffers()]
        self._weights = Versions(scan.parameters())
        self._batch_tensors = Versions(enumerate(tensor for _, tensor in tensors_in(batch)))
        self._put_back = [_metric_state(metric) for metric in scan.metrics]
        self._put_back += _generator_states(devices)

    def lost(self) -> str | None:
        """What has changed since and cannot be put back, in words; None if everything can."""
        for name in self._weights.written():
            return f"the weight {name!r}"
        if self._batch_tensors.written():
            return "a tensor of the batch"
        for buffer in self._buffers:
            if buffer.has_changed() and buffer.copy is None:
                return f"the buffer {buffer.name!r}"
        return None

    def restore(self) -> None:
        """Puts back everything that is not :meth:`lost`."""
        for buffer in self._buffers:
            if buffer.copy is not None and buffer.has_changed():
                buffer.put_back(buffer.copy)
        for put_back in self._put_back:
            put_back()

    def note_written(self) -> None:
        """The step has succeeded: what it has written, the next steps will write as well."""
        self._written.update(buffer.name for buffer in self._buffers if buffer.has_changed())


class _Buffer:
    """A buffer before a step."""

    def __init__(self, name: str, module: nn.Module, key: str, tensor: Tensor, written: set[str]) -> None:
        self.name = name
        self._module, self._key, self._tensor = module, key, tensor
        self._version = version_of(tensor)
        is_copied = name in written or num_bytes_of([tensor]) <= _MAX_COPIED_BYTES
        self.copy = _clone(tensor) if is_copied else None

    def has_changed(self) -> bool:
        """Whether it is another tensor now, or was written in place."""
        return self._module._buffers.get(self._key) is not self._tensor or version_of(self._tensor) != self._version

    def put_back(self, values: Tensor) -> None:
        """The same tensor again, with these values."""
        self._module._buffers[self._key] = self._tensor
        if version_of(self._tensor) != self._version:
            with torch.inference_mode(self._tensor.is_inference()), torch.no_grad():
                self._tensor.copy_(values)


def _clone(tensor: Tensor) -> Tensor:
    """A copy for the same modes: evaluation in inference mode must not leave its tensors to training."""
    with torch.inference_mode(tensor.is_inference()):
        return tensor.detach().clone()


def _metric_state(metric: Metric) -> Callable[[], None]:
    """Puts back what updates change: the states (tensors in place, lists by appending) and counters beside them."""

    names = list(metric._defaults)

    def states(values: dict[str, Any]) -> dict[str, Any]:
        own = ((name, values[name]) for name in names)
        return {name: _clone(value) if isinstance(value, Tensor) else list(value) for name, value in own}

    before = {**metric.__dict__, **states(metric.__dict__)}

    def put_back() -> None:
        metric.__dict__.clear()
        metric.__dict__.update({**before, **states(before)})  # the step may fail once more

    return put_back


def _generator_states(devices: Sequence[torch.device]) -> list[Callable[[], None]]:
    """Generators that user code may draw from. The engine itself restores torch's generator of the host."""
    python = random.getstate()
    states: list[Callable[[], None]] = [lambda: random.setstate(python)]
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        state = numpy.random.get_state()
        states.append(lambda: numpy.random.set_state(state))
    for device in {device for device in devices if device.type == "cuda"}:
        states.append(_restorer_of(device))
    return states


def _restorer_of(device: torch.device) -> Callable[[], None]:
    state = torch.cuda.get_rng_state(device)
    return lambda: torch.cuda.set_rng_state(state, device)
