"""The file of a stage, and the loop over its steps.

```
{"stage": "full", "method": ..., "options": {...}, "machine": {...}, "date": ..., "commit": ..., "steps": {
    "roundpipe": {"state": "measured",   "figures": {...}, "date": ..., "commit": ..., "seconds": 91.2},
    "fsdp2":     {"state": "incomplete", "figures": {...}, "reason": "it ran for 150 s", ...},
    "deepspeed": {"state": "not run",    "reason": "deepspeed is not installed", ...}}}
```

A step that was measured is not run again on the same machine with the same options. All others are: first those that
were never tried, so that one that always fails keeps no other from its turn.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks._report import now, progress, rounded

from . import machine

MEASURED, INCOMPLETE, FAILED, NOT_RUN = "measured", "incomplete", "failed", "not run"
OUT_OF_TIME = "out of time"
_REASON_CHARS = 500


class NotRunError(Exception):
    """A step cannot be run here; the message says why."""


class IncompleteError(Exception):
    """A step has ended before its time; what it has found until then is kept. The message says why."""


@dataclass(frozen=True)
class Options:
    """What the user chose.

    Attributes:
        scale: "gpu", or "tiny" for toys on virtual devices, whose numbers mean nothing.
        cap_gib: memory of the GPU for what trains under a limit.
        sequence, rows, microbatches: of the large models, None for the default: tokens of a row, rows of a micro-batch,
            micro-batches of an optimizer step.
        steps: that are measured, at most.
    """

    scale: str = "gpu"
    cap_gib: float = 24.0
    sequence: int | None = None
    rows: int | None = None
    microbatches: int | None = None
    steps: int = 5

    @property
    def is_tiny(self) -> bool:
        """Whether numbers mean nothing."""
        return self.scale == "tiny"


class Progress:
    """What a step is given: how much time is left, what others have found, and a place for what it finds."""

    def __init__(self, name: str, results: Results, deadline_s: float) -> None:
        self._name = name
        self._results = results
        self._deadline_s = deadline_s
        self.started_s = time.monotonic()
        self.saved: Mapping[str, Any] | None = None

    @property
    def left_s(self) -> float:
        """Seconds until the stage must have ended."""
        return self._deadline_s - time.monotonic()

    def save(self, figures: Mapping[str, Any]) -> None:
        """Writes what is known so far."""
        self.saved = figures
        self._results.record(self._name, INCOMPLETE, figures, reason="the run ended here", since=self.started_s)

    def figures_of(self, name: str) -> dict[str, Any]:
        """What another step has found.

        Raises:
            NotRunError: if it was not measured.
        """
        record = self._results.steps.get(name, {})
        if record.get("state") != MEASURED:
            raise NotRunError(f"{name!r} was not measured")
        return dict(record["figures"])


@dataclass(frozen=True)
class Step:
    """Something to measure: ``run`` gives its figures.

    It may raise :class:`NotRunError` or :class:`IncompleteError`; any other error is a failure, and is written down.
    """

    name: str
    run: Callable[[Progress], dict[str, Any]]


class Results:
    """The file of a stage."""

    def __init__(self, folder: Path, stage: str, method: str, options: Options, *, again: bool = False) -> None:
        self.path = folder / f"{stage}.json"
        note = "toys on virtual devices: the numbers mean nothing" if options.is_tiny else None
        head = {"stage": stage, "method": " ".join(method.split()), "note": note, "options": asdict(options)}
        self._head = {**head, "machine": machine.describe()}
        self._commit = machine.commit()
        self.steps: dict[str, dict[str, Any]] = {}
        before = load(self.path)
        if before is not None and not again and all(before.get(key) == value for key, value in self._head.items()):
            self.steps = before["steps"]

    def record(
        self, name: str, state: str, figures: Mapping[str, Any] | None, *, reason: str | None = None, since: float
    ) -> None:
        """Writes what a step has found, or why it has not."""
        seconds = rounded(time.monotonic() - since)
        made = {"state": state, "reason": reason, "figures": figures, "seconds": seconds}
        self.steps[name] = {**made, "date": now(), "commit": self._commit}
        self.write()

    def write(self) -> None:
        """In one go: a file is never half there."""
        whole = {**self._head, "date": now(), "commit": self._commit, "steps": self.steps}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, whole)

    def run(self, steps: Sequence[Step], limit_s: float) -> None:
        """Runs what is missing, for as long as there is time."""
        self.steps = {step.name: self.steps[step.name] for step in steps if step.name in self.steps}
        deadline_s = time.monotonic() + limit_s
        missing = [step for step in steps if self.steps.get(step.name, {}).get("state") != MEASURED]
        for step in sorted(missing, key=lambda step: step.name in self.steps):
            before = self.steps.get(step.name)
            given = Progress(step.name, self, deadline_s)
            if given.left_s <= 0:
                if before is None:
                    self.record(step.name, NOT_RUN, None, reason=OUT_OF_TIME, since=given.started_s)
                continue
            progress(f"{self._head['stage']}: {step.name}")
            self._run(step, given)
        self.write()

    def _run(self, step: Step, given: Progress) -> None:
        state, reason = MEASURED, None
        figures: Mapping[str, Any] | None = None
        try:
            figures = step.run(given)
        except NotRunError as error:
            state, reason = NOT_RUN, str(error)
        except IncompleteError as error:
            state, reason, figures = INCOMPLETE if given.saved else FAILED, str(error), given.saved
        except Exception as error:  # for the report: one step must not keep the others from being measured
            traceback.print_exc()
            state, reason, figures = FAILED, f"{type(error).__name__}: {error}", given.saved
        shown = None if reason is None else reason[-_REASON_CHARS:]
        self.record(step.name, state, figures, reason=shown, since=given.started_s)


def load(path: Path) -> dict[str, Any] | None:
    """What a file holds; None if there is none, or if it cannot be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def write_json(path: Path, content: object) -> None:
    """Replaces a file in one go."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    part.replace(path)
