"""Recording some training steps, for ``RoundPipeStrategy(trace=...)`` and the :class:`RoundPipeTimeline` callback.

[Note: recording]
A :class:`TraceWriter` belongs to the strategy while ``fit`` runs. Before a training step each writer says whether it
wants that step, and only then the engine traces; afterwards it gets the result. The files are written as soon as the
last wanted step is there, so that they can be looked at while training goes on, or with fewer steps when ``fit`` ends,
on whichever way. Without a writer nothing of this runs.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol, runtime_checkable

from ..devices.pool import DevicePool
from ..engine.requests import StepRequest, StepResult
from ..engine.runner import Engine
from ..lightning_packages import rank_zero_warn
from ..options import check_count, check_writable
from ..planning.files import write_text
from ..planning.spans import Mark
from ..planning.timeline import Timeline
from .host_memory import HostMemory
from .pictures import check_picture, draw_timelines


@runtime_checkable
class Traced(Protocol):
    """A strategy whose steps can be recorded.

    Attributes:
        last_step: what the last step was, without outputs and gradients; None before the first one.
        pool: its devices.
        host_memory: what the training needs on the host; None where there is none, or nothing is known.
    """

    last_step: StepResult | None

    @property
    def pool(self) -> DevicePool: ...

    @property
    def host_memory(self) -> HostMemory | None: ...

    def trace_with(self, writer: TraceWriter | None, *, times_steps: bool) -> None:
        """Records what ``writer`` wants of the fit that begins, and times its steps if all are to have a timeline."""


_MAX_PANELS = 4  # of a picture


class TraceWriter:
    """Keeps the timelines of some training steps and writes them, see [Note: recording].

    Args:
        path, picture, first_step, num_steps: see :class:`RoundPipeTimeline`.

    Raises:
        ValueError, TypeError, ModuleNotFoundError: as there.
    """

    def __init__(
        self,
        path: str | Path | None,
        picture: str | Path | None = None,
        *,
        first_step: int = 2,
        num_steps: int = 3,
    ) -> None:
        for option, value in (("path", path), ("picture", picture)):
            if value is not None:
                check_writable(option, value)
        if picture is not None:
            check_picture(picture)
        check_count("first_step", first_step, at_least=0)
        check_count("num_steps", num_steps)
        # Absolute: written is what was checked, whatever the current folder is by then.
        self._path, self._picture = (None if file is None else Path(file).resolve() for file in (path, picture))
        if self._path is not None and self._path == self._picture:
            raise ValueError(f"path and picture are both {os.fspath(self._path)!r}: give each a file of its own")
        self._wanted = range(first_step, first_step + num_steps)
        self.start()

    @property
    def files(self) -> set[Path]:
        """What it writes."""
        return {file for file in (self._path, self._picture) if file is not None}

    def start(self) -> None:
        """Begins anew: a fit starts."""
        self._num_seen = 0
        self._steps: list[_Recorded] = []

    @property
    def is_due(self) -> bool:
        """Whether the next training step is to be recorded."""
        return self._num_seen in self._wanted

    def note(self, result: StepResult, started_at: float) -> None:
        """Takes a training step, which began at ``started_at`` (seconds, :func:`time.perf_counter`)."""
        if self.is_due:
            start_ms = started_at * 1e3
            # A step that only recorded calls carries the partition of the next one.
            partition = None if result.schedule is None else result.partition
            figures = {"partition": partition.format() if partition else "none yet", "replanned": result.replanned}
            mark = Mark(
                f"training step {self._num_seen}",
                start_ms,
                start_ms + result.step_ms,
                {**figures, **step_figures(result)},
            )
            self._steps.append(_Recorded(mark, result.timeline, result.num_microbatches))
        self._num_seen += 1
        if len(self._steps) == len(self._wanted):
            self._write()

    def finish(self) -> None:
        """Writes what there is, if that has not happened: fit has ended."""
        if self._steps:
            self._write()
        elif 0 < self._num_seen <= self._wanted.start:
            rank_zero_warn(
                f"no training step was recorded: fit has run {self._num_seen}, and recording begins with step "
                f"{self._wanted.start} (counted from 0). Train for longer, or let first_step be smaller."
            )

    def _write(self) -> None:
        """A file that cannot be written must not end the training, nor hide the error that has ended it."""
        steps, self._steps = self._steps, []
        try:
            if self._path is not None:
                trace = _joined(steps).to_chrome_trace([step.mark for step in steps])
                write_text(self._path, json.dumps(trace))
            if self._picture is not None:
                draw_timelines([(step.mark.name, step.timeline) for step in steps[:_MAX_PANELS]], self._picture)
        except OSError as error:
            rank_zero_warn(f"the recorded training steps could not be written: {error}")


class Recordings:
    """What is written about the training steps of a ``fit``: recorded steps, and their costs.

    Args:
        trace, save_profile: files, see :class:`RoundPipeStrategy`.

    Attributes:
        times_steps: whether every step of the fit is to have a timeline, see :attr:`Engine.times_steps`.
    """

    def __init__(self, trace: str | Path | None, save_profile: str | Path | None) -> None:
        # Absolute: written is what was checked, whatever the current folder is by then.
        self._profile_path = None if save_profile is None else Path(save_profile).resolve()
        self._own = [] if trace is None else [TraceWriter(trace)]
        self.writers: list[TraceWriter] = []
        self.times_steps = False

    def start(self) -> None:
        """A fit starts; callbacks have added their writers."""
        self.writers += self._own
        for writer in self.writers:
            writer.start()

    def finish(self, engine: Engine | None) -> None:
        """A fit has ended, with or without an error: an error here must not hide the one that has ended it.

        Args:
            engine: that has run the training steps; None if it was not made.
        """
        writers, self.writers = self.writers, []
        self.times_steps = False
        for writer in writers:
            writer.finish()
        if self._profile_path is None or engine is None or (profile := engine.costs("training_step")) is None:
            return
        known = asdict(engine.machine, dict_factory=_without_infinite)
        try:
            # What reads profiles looks at the calls alone.
            write_text(
                self._profile_path, json.dumps({**json.loads(profile.to_json()), "machine": known}, indent=2) + "\n"
            )
        except OSError as error:
            rank_zero_warn(f"the cost profile could not be written: {error}")

    def run(self, engine: Engine, request: StepRequest) -> StepResult:
        """Runs a training step, and records it for the writers that want it."""
        engine.times_steps = self.times_steps
        if not self.writers:
            return engine.run(request)
        before, engine.trace = engine.trace, engine.trace or any(writer.is_due for writer in self.writers)
        started_at = perf_counter()
        try:
            result = engine.run(request)
        finally:
            engine.trace = before
        for writer in self.writers:
            writer.note(result, started_at)
        return result


def _without_infinite(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """What is known of a machine, or of a part of it: JSON has no number for what is unlimited."""
    return {name: value for name, value in fields if value != math.inf}


@dataclass(frozen=True)
class _Recorded:
    """What is kept of a step: its mark is on the clock of the process, the spans count from its begin."""

    mark: Mark
    timeline: Timeline
    num_microbatches: int


def step_figures(result: StepResult) -> dict[str, float]:
    """Figures of a training step: bubble and busy time as fractions, ms, bytes, stages."""
    figures: dict[str, float] = {
        "step_ms": result.step_ms,
        "h2d_bytes": sum(result.bytes_up),
        "d2h_bytes": sum(result.bytes_down),
        "host_activation_bytes": result.saved_bytes,
        "num_microbatches": result.num_microbatches,
    }
    if result.schedule is not None:  # otherwise the step has only recorded the model's calls
        figures |= {"bubble": result.timeline.bubble_ratio, "busy": result.timeline.busy_fraction}
    if result.partition is not None:
        figures["num_stages"] = result.partition.num_stages
    peaks = [peak for peak in result.peak_memory_bytes if peak is not None]
    if peaks:
        figures["peak_memory_bytes"] = max(peaks)
    return figures


def _joined(steps: Sequence[_Recorded]) -> Timeline:
    """One timeline of all steps, on the clock of their marks; micro-batches are numbered on."""
    spans = []
    num_before = 0
    for step in steps:
        shift = step.mark.start_ms
        for span in step.timeline.spans:
            index = span.microbatch_index + num_before if span.microbatch_index >= 0 else -1
            start, end = span.start_ms + shift, span.end_ms + shift
            spans.append(replace(span, start_ms=start, end_ms=end, microbatch_index=index))
        num_before += step.num_microbatches
    return Timeline(tuple(spans), steps[0].timeline.num_devices)
