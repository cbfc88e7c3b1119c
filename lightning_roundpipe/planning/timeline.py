"""A timeline: all spans of a step and what they add up to, simulated or recorded.

```
                 makespan
          <------------------------------->
device 0  [compute ][compute ]....[compute ]          . bubble: the device does not compute
device 1  ....[compute ][compute ][compute ]
          fill                    inside    drain
```

All times are in milliseconds, from any origin.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .partition import StageKind
from .schedule import Action
from .spans import Mark, Span, decode, encode, stage_kinds

_COMPUTE = "compute"
_SYMBOLS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Timeline:
    """All spans of a step, in any order.

    Args:
        spans: The spans.
        num_devices: Number of devices, those without spans included.

    Raises:
        ValueError: If there is no device, or a span lies on a device that does not exist.
    """

    spans: tuple[Span, ...]
    num_devices: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "spans", tuple(self.spans))
        if self.num_devices < 1:
            raise ValueError(f"Timeline.num_devices must be >= 1, got {self.num_devices}: count the idle devices too.")
        for span in self.spans:
            if span.device >= self.num_devices:
                raise ValueError(f"{span} lies outside the timeline's {self.num_devices} devices: raise num_devices.")

    @property
    def start_ms(self) -> float:
        """Begin of the first span, in ms; 0 for an empty timeline."""
        return min((span.start_ms for span in self.spans), default=0.0)

    @property
    def end_ms(self) -> float:
        """End of the last span, in ms; 0 for an empty timeline."""
        return max((span.end_ms for span in self.spans), default=0.0)

    @property
    def makespan_ms(self) -> float:
        """Time in ms from the begin of the first span to the end of the last one, of any kind; 0 if there is none."""
        return self.end_ms - self.start_ms

    def intervals(self, device: int, kind: str = _COMPUTE) -> list[tuple[float, float]]:
        """Return when the device has spans of this kind, as disjoint intervals (start, end) in ms, ascending."""
        merged: list[tuple[float, float]] = []
        for start, end in sorted((span.start_ms, span.end_ms) for span in self._spans_of(device, kind)):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((start, end))
        return merged

    def busy_ms(self, device: int) -> float:
        """Return how long the device computed, in ms; overlapping compute spans are not counted twice."""
        return math.fsum(end - start for start, end in self.intervals(device))

    def fill_ms(self, device: int) -> float:
        """Return how long the device idled before it first computed, in ms; 0 if it never did."""
        busy = self.intervals(device)
        return busy[0][0] - self.start_ms if busy else 0.0

    def drain_ms(self, device: int) -> float:
        """Return how long the device idled after it last computed, in ms; 0 if it never did."""
        busy = self.intervals(device)
        return self.end_ms - busy[-1][1] if busy else 0.0

    @property
    def busy_fraction(self) -> float:
        """Share of the devices' time spent computing, 0 to 1, over the makespan on all devices.

        1 if the makespan is 0: no time was lost.
        """
        available = self.makespan_ms * self.num_devices
        if available == 0:
            return 1.0
        return sum(self.busy_ms(device) for device in range(self.num_devices)) / available

    @property
    def bubble_ratio(self) -> float:
        """Share of the devices' time spent idle, 0 to 1: ``1 - busy_fraction``."""
        return 1.0 - self.busy_fraction

    @property
    def bubble_parts(self) -> dict[str, float]:
        """Shares of the bubble: "fill" before a device first computes, "drain" after it last does, "inside" between.

        Together they are `bubble_ratio`. A device that never computes idles "inside".
        """
        devices = range(self.num_devices)
        available = self.makespan_ms * self.num_devices or 1.0
        fill = math.fsum(map(self.fill_ms, devices)) / available
        drain = math.fsum(map(self.drain_ms, devices)) / available
        return {"fill": fill, "drain": drain, "inside": max(0.0, self.bubble_ratio - fill - drain)}

    def actions(self, device: int) -> list[Action]:
        """Return the actions the device computed, each once, in the order in which they started."""
        spans = sorted(self._spans_of(device), key=lambda span: span.start_ms)
        return list(dict.fromkeys(span.action for span in spans if span.action is not None))

    @property
    def stage_kinds(self) -> dict[Action, StageKind]:
        """What the stage of each computed action does, as far as the labels of its spans tell."""
        return stage_kinds(self.spans)

    def to_chrome_trace(self, marks: Sequence[Mark] = ()) -> dict[str, Any]:
        """Return the timeline in the Trace Event Format of chrome://tracing and Perfetto (times in microseconds).

        Dump it with `json.dump` and open the file there. Each device has a thread for the actions, one for each kind of
        span, and more where spans overlap. Times count from the first span or mark, to the nanosecond.

        Args:
            marks: Shown in a row of their own; they are not part of the timeline.
        """
        return encode(self.spans, self.num_devices, marks)

    @classmethod
    def from_chrome_trace(cls, document: Any) -> Timeline:
        """Return the timeline that `to_chrome_trace` wrote, with the times of the document, to the nanosecond.

        Args:
            document: What `json.load` makes of the file.

        Raises:
            ValueError: If it is no trace, or not one of a timeline; the message says what is wrong.
        """
        return cls(*decode(document))

    def format_table(self, width: int = 100) -> str:
        """Return a picture in text: one row per device, time from left to right, `width` characters wide.

        Each character shows the stage that computes in the middle of its slice of time, 0-9, a-z, A-Z, then ``#`` for
        stages from 62 on and for spans without a stage; ``.`` is bubble. Spans shorter than a slice may not show.

        Raises:
            ValueError: If the width leaves no room for the rows.
        """
        label_width = len(f"device {self.num_devices - 1} ")
        num_slices = width - label_width - 2
        if num_slices < 1:
            raise ValueError(f"width must be at least {label_width + 3} characters, got {width}: pass a larger one.")
        slice_ms = self.makespan_ms / num_slices
        lines = [f"{self.makespan_ms:.6g} ms, bubble {self.bubble_ratio:.1%}, one character is {slice_ms:.3g} ms"]
        for device in range(self.num_devices):
            row = self._format_row(device, num_slices, slice_ms)
            lines.append(f"{f'device {device}'.ljust(label_width)}|{row}|")
        return "\n".join(lines) + "\n"

    def _format_row(self, device: int, num_slices: int, slice_ms: float) -> str:
        spans = sorted(self._spans_of(device), key=lambda span: span.start_ms)
        starts = [span.start_ms for span in spans]
        origin_ms = self.start_ms
        row = []
        for number in range(num_slices):
            middle = origin_ms + (number + 0.5) * slice_ms
            running = [span for span in spans[: bisect_right(starts, middle)] if middle < span.end_ms]
            row.append(_symbol(running[-1].stage_index) if running else ".")
        return "".join(row)

    def _spans_of(self, device: int, kind: str = _COMPUTE) -> Iterable[Span]:
        return (span for span in self.spans if span.device == device and span.kind == kind)


def _symbol(stage_index: int) -> str:
    return _SYMBOLS[stage_index] if 0 <= stage_index < len(_SYMBOLS) else "#"


@dataclass(frozen=True)
class Simulation:
    """What came out.

    Attributes:
        timeline: One "compute" span per action, device by device in list order, and "h2d" and "d2h" spans for weights
            and gradients; times in ms from the begin.
        step_ms: Time of a step in ms. Synchronous optimizer: with the optimizer. Asynchronous: the mean distance from
            the end of one step to the end of the next; the makespan if only one step was simulated. Never less than one
            of `lower_bounds_ms`.
        optimizer_ms: Time of the optimizer for one step, in ms.
        memory_bytes: Peak per device: weights and gradients of the stage runs that are there, and the activations.
        h2d_bytes, d2h_bytes: Bytes that travelled per device, all steps together.
        late_upload_ms: How long devices waited for weights and for nothing else, all together, after their first stage
            run.
        lower_bounds_ms: What each resource alone would need for a step, in ms: "compute", "h2d", "d2h",
            "host memory", "optimizer", and "network" if there are several ranks.
    """

    timeline: Timeline
    step_ms: float
    optimizer_ms: float
    memory_bytes: tuple[int, ...]
    h2d_bytes: tuple[int, ...]
    d2h_bytes: tuple[int, ...]
    late_upload_ms: float
    lower_bounds_ms: dict[str, float]

    @property
    def bound_by(self) -> str:
        """What to improve first, in words: a resource that is busy nearly all the time, or where most time is lost."""
        bounds = self.lower_bounds_ms
        name = max(bounds, key=bounds.__getitem__)
        if bounds[name] >= 0.9 * self.step_ms or bounds[name] > bounds["compute"]:
            return name
        parts = self.timeline.bubble_parts
        if self.step_ms - self.timeline.makespan_ms > self.timeline.bubble_ratio * self.timeline.makespan_ms:
            return max("optimizer", "network", key=lambda late: bounds.get(late, 0.0))
        if parts["fill"] + parts["drain"] >= parts["inside"]:
            return "fill and drain of the pipeline"
        inside_ms = parts["inside"] * self.timeline.makespan_ms * self.timeline.num_devices
        return "uploads that come late" if self.late_upload_ms > 0.5 * inside_ms else "waiting inside the step"
