"""A step that the devices could not finish is put back, and where that helps run again with smaller micro-batches.

[Note: steps that are run again]

    note the state --> run --> no room --------> put back --> the same, where room was made --> run ...
                          |--> does not fit ---> put back --> twice as many micro-batches ----> run ...
                          |--> device lost ----> put back --> the end
                          |--> unprepared -----> put back --> the same, with what is known now -> run ...
                          '--> any other error: the user's

*Steps that do not fit.*
Whether a step fits is only known when it runs: the planner, the books of a device or the allocator of a GPU say that it
does not. Nothing is lost then. The engine leaves weights, gradients and attributes as they were, and what else a step
changes before it succeeds (buffers, metrics that user code updates, generators) is noted before it and put back
(:mod:`step_state`). Then the same batch is split into twice as many micro-batches, and planned for anew. An allocator
may have no room because of what is there without being in use, or in pieces: so the first time in a step, and for as
long as weights and gradients can leave more room, all of that goes (:meth:`Device.make_room`), more is kept free from
then on, and the same micro-batches are run again. Smaller ones need less of it.

- ``num_microbatches="auto"``: again and again, as long as there are rows.
- A given number: once in a step. Not if modules couple the rows of a micro-batch (batch norm), and not if the number
  is 1, which is how users say that something else does.

Lightning's batch size finder wants to see the limit, not a way around it. While it tries a size, nothing is split
further, and the error is in the words that it looks for: those of CUDA, whatever the device. So it finds the largest
batch that fits with the number of micro-batches that training starts with. Every trial starts without plan and costs,
and so does what follows the last one. What no batch size would make fit ends the search.

The number that fits stays. User code has run in the attempt that failed, and what it has done outside torch (prints,
files) stays as well. If it has changed weights, the batch or a large buffer, the step is not run again; nor if other
ranks have some of its gradients.

*Devices that are lost.* Whatever a step has failed with, the devices are asked whether they still work ([Note: lost
devices] in :mod:`devices.device`). If one does not, the state is put back: what is saved then is that of the last step
that was finished. Nothing is run again: what has broken may have broken the process, too.

*Buffers that are written late.* The first step has seen which buffers units write, and later ones prepare for those:
the micro-batches take turns, and the values from before are kept for the backward. A unit may begin later, by a flag in
a buffer or an argument. Then the step is run again, prepared for these as well. So is one that calls ``whole_batch``
when the steps before it did not.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ...common.errors import UnpreparedError
from ...devices.device import DeviceLostError
from ...devices.memory import DeviceOutOfMemoryError
from ...devices.pool import DevicePool
from ...lightning_packages import rank_zero_info, rank_zero_warn
from ...planning.costs import CostProfile
from ...planning.plan import StageMemoryError, describe_need, needed_bytes
from ..batches.splitting import Batches
from .modules import ModuleScan
from .step_state import StepState

T = TypeVar("T")
# What libraries raise that allocate beside torch's allocator, such as a handle for each thread that multiplies.
_NO_ROOM = (
    "CUDA error: out of memory",
    "HIP error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


@dataclass
class _Step:
    """A step that is under way.

    Attributes:
        wanted: how many micro-batches are asked for now.
        batches: of the attempt that is made now.
    """

    kind: str
    split: Callable[[Any, int], Batches]
    state: StepState
    wanted: int
    batches: Batches
    has_made_room: bool = False
    has_been_split: bool = False


class Retry:
    """Runs steps, and runs them again where it is the devices that fail; see [Note: steps that are run again].

    Args:
        num_microbatches: how many a batch is split into at first.
        is_auto: whether the number may be raised again and again.
        pool: the devices.
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
        pool: DevicePool,
        forget: Callable[[str], None],
        costs: Callable[[str], CostProfile | None],
        is_trial: Callable[[], bool] = lambda: False,
    ) -> None:
        self._scan = scan
        self._start = num_microbatches
        self._is_auto = is_auto
        self._pool = pool
        self._forget = forget
        self._costs = costs
        self._is_trial = is_trial
        self._tried_rows: int | None = None
        self._final: str | None = None
        self._rounds_are_small = False  # because the pool is short
        self.num_microbatches: dict[str, int] = {}
        self._whole: set[str] = set()

    def wanted(self, kind: str) -> int:
        """How many micro-batches steps of a kind are split into now, as far as there are rows."""
        return self.num_microbatches.setdefault(kind, self._start)

    def run_whole(self, kind: str) -> None:
        """From now on batches of a kind of step are not split, as long as they fit on the devices."""
        self.num_microbatches[kind] = 1
        self._whole.add(kind)

    def forbid(self, why: str) -> None:
        """The step that is under way cannot be run again, because of what has been done in it."""
        self._final = why

    def run(
        self, kind: str, batch: Any, split: Callable[[Any, int], Batches], attempt: Callable[[Batches], T]
    ) -> tuple[Batches, T]:
        """Runs a step; returns the micro-batches it was run with, and what ``attempt`` gave.

        Args:
            kind: of the step; each has its own number of micro-batches.
            split: (batch, number of micro-batches) -> micro-batches, at most as many.

        Raises:
            DeviceOutOfMemoryError, StageMemoryError: if it does not fit and is not run again. The message says what
                takes the memory, why it was not run again, and what to change.
            DeviceLostError: if a device is lost.
            UnpreparedError: if it has done something for which it would have to be run again, and cannot be.
        """
        self._final = None
        wanted = self.wanted(kind)
        batches = split(batch, wanted)
        tried_rows = batches.batch_size if self._is_trial() else None
        if tried_rows != self._tried_rows:
            self._tried_rows = tried_rows
            self._begin_anew()
        state = StepState(self._scan, batch, [device.torch_device for device in self._pool.devices])
        step = _Step(kind, split, state, wanted, batches)
        while True:
            try:
                result = attempt(step.batches)
            except Exception as error:
                remedy = self._remedy(error, step)
                if remedy is None:
                    raise
            else:
                self.num_microbatches[kind] = step.wanted
                return step.batches, result
            # Outside of the handler, where the traceback no longer holds tensors of the attempt.
            gc.collect()
            step.batches = remedy() or split(state.batch, step.wanted)

    def _remedy(self, error: Exception, step: _Step) -> Callable[[], Batches | None] | None:
        """What to do before the step, whose state was put back, is run again; None for an error of the user.

        It returns smaller micro-batches, or None for the same ones.

        Raises:
            DeviceLostError, UnpreparedError, DeviceOutOfMemoryError, StageMemoryError: if only that would help, and
                cannot be.
        """
        state, has_no_room = step.state, _has_no_room(error)
        if lost := self._pool.find_lost():
            why_not = self._obstacle(state)
            state.restore()
            causes = ", ".join(f"{device.name} ({device.lost})" for device in lost)
            limit = "" if why_not is None else f" It may not have been taken back in full, because {why_not}."
            raise DeviceLostError(
                f"{step.kind} has lost {causes}.{limit} What helps: begin again in a new process, from the last "
                "checkpoint, without the device if it does not come back."
            ) from error
        if isinstance(error, UnpreparedError):
            why_not = self._obstacle(state)
            state.restore()
            if why_not is not None:
                text = f"{error}. {step.kind} would have to be run again for that, and cannot be, because {why_not}."
                raise type(error)(f"{text} What helps: {error.remedy}.") from error
            return self._plan_anew
        if has_no_room and self._can_make_room(step) and self._obstacle(state) is None:
            state.restore()
            step.has_made_room = True
            return self._make_room
        if not has_no_room and not isinstance(error, (DeviceOutOfMemoryError, StageMemoryError)):
            return None
        more = self._split_further(error, step)
        state.restore()
        text = f"{step.kind} does not fit on the devices with {_microbatches(len(step.batches.microbatches))}"
        if self._is_trial() and _fits_if_split(error) and step.batches.batch_size != 1:
            # Lightning's batch size finder goes by type and words.
            raise DeviceOutOfMemoryError(f"CUDA out of memory: {text}. {error}") from error
        text += " per batch, and "
        if isinstance(more, str):
            raise self._explained(error, step.kind, f"{text}{more}. {error}") from error
        text += f"is run again with {len(more.microbatches)}, as will be the next ones: {error}"
        return functools.partial(self._make_smaller, step, more, text)

    def _make_smaller(self, step: _Step, more: Batches, text: str) -> Batches:
        is_exact = step.kind not in self._whole
        step.wanted = self._more_than(step)
        self._whole.discard(step.kind)
        step.has_been_split = True
        self._forget(step.kind)
        for device in self._pool.devices:
            device.empty_cache()  # smaller pieces are wanted now
            device.memory.spare //= 2
        self._note_shortage()
        announce = rank_zero_info if self._is_auto and is_exact else rank_zero_warn
        announce(text if is_exact else f"{text}. To split the batch changes what is trained, as was said before")
        return more

    def _more_than(self, step: _Step) -> int:
        """How many micro-batches are asked for after an attempt that has not fit."""
        return self._start if step.kind in self._whole else 2 * len(step.batches.microbatches)

    def _make_room(self) -> None:
        for device in self._pool.devices:
            device.make_room()
        self._note_shortage()

    def _note_shortage(self) -> None:
        """Once activations have to take less plans are made anew, with small rounds."""
        is_short = self._pool.is_short
        if is_short and not self._rounds_are_small:
            self._plan_anew()
        self._rounds_are_small = is_short

    def _begin_anew(self) -> None:
        """Every trial, and what follows the last one, starts without plan and costs, and with all memory."""
        self._plan_anew()
        self._rounds_are_small = False
        for device in self._pool.devices:
            device.memory.spare = 0

    def _plan_anew(self) -> None:
        """What is known of a unit matters to all kinds of steps that it takes part in."""
        for kind in self.num_microbatches:
            self._forget(kind)

    def _can_make_room(self, step: _Step) -> bool:
        """Whether an allocator may have room for the same micro-batches where something else goes."""
        pool = self._pool
        if not step.has_made_room or (pool.is_short and not self._rounds_are_small):
            return True
        return any(device.memory.has_room_to_make for device in pool.devices)

    def _obstacle(self, state: StepState) -> str | None:
        """What is in the way of running a step again with the same micro-batches; None if nothing is."""
        if self._final is not None:
            return self._final
        if isinstance(state.batch, Iterator):
            return "the iterator that it takes its batches from has gone on"
        changed = state.lost()
        return None if changed is None else f"{changed} has changed meanwhile"

    def _split_further(self, error: Exception, step: _Step) -> Batches | str:
        """More micro-batches of the same batch, or why not."""
        if self._final is not None:
            return self._final
        if not self._is_auto and step.has_been_split:
            return "it was run again once with twice the micro-batches already"
        if not _fits_if_split(error):
            return "smaller micro-batches would not help, because weights and gradients alone take too much"
        if not self._is_auto and self._start == 1:
            return "num_microbatches=1 is kept, because the loss may depend on all rows of the batch together"
        if not self._is_auto and any(module.training for module in self._scan.norms):
            return "num_microbatches is kept, because the statistics of batch norm depend on it"
        if (lost := step.state.lost()) is not None:
            return f"it cannot be run again, because {lost} has changed meanwhile"
        num_before = len(step.batches.microbatches)
        batches = step.split(step.state.batch, self._more_than(step))
        return "the batch cannot be split further" if len(batches.microbatches) <= num_before else batches

    def _explained(self, error: Exception, kind: str, text: str) -> Exception:
        """The error to raise: what happened and why it was final, what takes the memory, what to change."""
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


def _fits_if_split(error: Exception) -> bool:
    """What a driver raises does not say."""
    return getattr(error, "fits_if_split", True)


def _has_no_room(error: Exception) -> bool:
    """Whether a GPU had no room for something that is not on the books."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_ROOM)


def _microbatches(count: int) -> str:
    return "1 micro-batch" if count == 1 else f"{count} micro-batches"
