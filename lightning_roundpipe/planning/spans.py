"""What ran when, span by span, and how spans travel: the Trace Event Format of chrome://tracing and Perfetto.

```
process "device 0"   thread "actions"   [ F 0, micro-batch 0 ][ F 0, micro-batch 1 ]
                     thread "compute"   [ F a    ][ F b      ][ F a    ][ F b      ]
                     thread "h2d"       [ weights F 0 ]
                     thread "wait"      [ its turn        ]
                     thread "wait 2"       [ its turn          ]
process "steps"      thread "steps"     [ training step 7                          ]
```

[Note: lanes]
Each device is a process and each kind of span a thread of it. Viewers draw slices of one thread only if they nest, so
spans that overlap (micro-batches that wait at the same time) go to further threads of the same kind. Times are rounded
to nanoseconds before they are subtracted: rounded one by one, neighbours could overlap. A thread "actions" comes on
top, with one slice for each stretch of compute spans of one action; marks are a process below the devices. Both only
help the eye and are not read back. Processes and threads are numbered from 1: viewers give 0 a meaning of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from .partition import StageKind
from .quantities import format_value
from .schedule import Action

_KEY = "roundpipe"
_FORMAT_VERSION = 1
_LANES = ("compute", "h2d", "d2h", "wait")
_ACTION = "roundpipe.action"
MARK_CATEGORY = "roundpipe.mark"
_HELP = "Write the file with Timeline.to_chrome_trace, or with RoundPipeStrategy(trace=...)."


@dataclass(frozen=True)
class Span:
    """Something that happened on a device between two points in time.

    Args:
        device: Index of the device.
        kind: "compute", "h2d" (upload), "d2h" (download), "wait", or any other lane name. Only "compute" is work.
        start_ms: Begin, in ms.
        end_ms: End, in ms.
        stage_index: The stage it belongs to; -1 for none.
        microbatch_index: The micro-batch it belongs to; -1 for none.
        label: Text for pictures. That of a compute span begins with what it does, "F", "fused" or "B", and goes on with
            the name of a unit or a range of calls; that of a transfer says what moves; that of a wait, for what.

    Raises:
        ValueError: If the device is negative, the kind empty, a time not finite, or the end before the start.
    """

    device: int
    kind: str
    start_ms: float
    end_ms: float
    stage_index: int = -1
    microbatch_index: int = -1
    label: str = ""

    def __post_init__(self) -> None:
        if self.device < 0:
            raise ValueError(f"Span.device must be >= 0, got {self.device}: pass the index of the device.")
        if not self.kind:
            raise ValueError("Span.kind must not be empty: pass 'compute', 'h2d', 'd2h' or 'wait'.")
        if not (math.isfinite(self.start_ms) and math.isfinite(self.end_ms) and self.start_ms <= self.end_ms):
            raise ValueError(
                f"A span must run from start_ms to a later end_ms, both finite, got {self.start_ms} to {self.end_ms}: "
                "read both from the same clock."
            )

    @property
    def action(self) -> Action | None:
        """The schedule's action the span belongs to, or None if it lacks a stage or a micro-batch."""
        if self.stage_index < 0 or self.microbatch_index < 0:
            return None
        return Action(self.stage_index, self.microbatch_index)


@dataclass(frozen=True)
class Mark:
    """A stretch of time worth a name in a trace, such as one of several training steps.

    Args:
        name: Its name.
        start_ms: Begin, in ms, on the clock of the spans.
        end_ms: End, in ms.
        figures: What a viewer shows beside it; anything that JSON can hold.
    """

    name: str
    start_ms: float
    end_ms: float
    figures: Mapping[str, Any] = field(default_factory=dict)


def stage_kinds(spans: Iterable[Span]) -> dict[Action, StageKind]:
    """Return what the stage of each computed action does, as far as the labels of its spans tell."""
    seen: dict[Action, set[str]] = {}
    for span in spans:
        if span.kind == "compute" and span.action is not None:
            seen.setdefault(span.action, set()).add(span.label.split(" ", 1)[0])
    return {action: kind for action, words in seen.items() if (kind := _kind_from(words)) is not None}


def _kind_from(words: set[str]) -> StageKind | None:
    """The kind of a stage from the first words of its labels: a stage that runs both directions is fused."""
    if "fused" in words or {"F", "B"} <= words:
        return StageKind.FUSED
    return next((kind for kind in StageKind if kind.value in words), None)


def encode(spans: Sequence[Span], num_devices: int, marks: Sequence[Mark]) -> dict[str, Any]:
    """Return the document; see [Note: lanes]."""
    # Viewers refuse negative times.
    origin = min([*(span.start_ms for span in spans), *(mark.start_ms for mark in marks)], default=0.0)
    kinds = stage_kinds(spans)
    events: list[dict[str, Any]] = []
    for device in range(num_devices):
        events += _process(device, f"device {device}")
        here = sorted((span for span in spans if span.device == device), key=lambda span: (span.start_ms, span.end_ms))
        others = sorted({span.kind for span in here} - set(_LANES))
        lanes = [("actions", list(_action_slices(here, origin, kinds)))]
        for kind in (*_LANES, *others):
            lanes.append((kind, [_span_slice(span, origin, kinds) for span in here if span.kind == kind]))
        events += _threads(device, lanes)
    if marks:
        shown = [_slice(m.name, MARK_CATEGORY, m.start_ms - origin, m.end_ms - origin, dict(m.figures)) for m in marks]
        events += [*_process(num_devices, "steps"), *_threads(num_devices, [("steps", shown)])]
    header = {"version": _FORMAT_VERSION, "num_devices": num_devices}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {_KEY: header}}


def decode(document: Any) -> tuple[tuple[Span, ...], int]:
    """Return the spans and the number of devices.

    Raises:
        ValueError: If the document was not made by `encode`; the message names the event and the field.
    """
    events = document.get("traceEvents") if isinstance(document, dict) else None
    if not isinstance(events, list):
        raise ValueError(f'A trace is a JSON object with a list "traceEvents", got {format_value(document)}. {_HELP}')
    other = document.get("otherData")
    header = other.get(_KEY) if isinstance(other, dict) else None
    if not isinstance(header, dict) or not isinstance(header.get("num_devices"), int):
        raise ValueError(f"The trace does not say that it shows a RoundPipe timeline (otherData.{_KEY}). {_HELP}")
    if header.get("version") != _FORMAT_VERSION:
        raise ValueError(
            f"The trace has version {header.get('version')!r}, this release reads {_FORMAT_VERSION}: record it again."
        )
    spans = (_span(position, event) for position, event in enumerate(events) if _is_span(event))
    return tuple(spans), header["num_devices"]


def _is_span(event: Any) -> bool:
    return isinstance(event, dict) and event.get("ph") == "X" and event.get("cat") not in (_ACTION, MARK_CATEGORY)


def _span(position: int, event: Mapping[str, Any]) -> Span:
    def get(name: str, kinds: type | tuple[type, ...], source: Mapping[str, Any] = event) -> Any:
        value = source.get(name)
        is_wrong = not isinstance(value, kinds) or isinstance(value, bool)
        if is_wrong or (isinstance(value, (int, float)) and not abs(value) < 2**63):  # nan and inf, which JSON lets in
            raise ValueError(f"traceEvents[{position}] has {name!r}: {format_value(value)}, which no span has. {_HELP}")
        return value

    number = (int, float)
    start_ns = round(get("ts", number) * 1000)
    end_ns = start_ns + round(get("dur", number) * 1000)
    args = get("args", dict)
    return Span(
        device=get("pid", int) - 1,
        kind=get("cat", str),
        start_ms=start_ns / 1e6,
        end_ms=end_ns / 1e6,
        stage_index=get("stage", int, args),
        microbatch_index=get("microbatch", int, args),
        label=get("label", str, args),
    )


def _process(index: int, name: str) -> list[dict[str, Any]]:
    """Return the events that name process `index`, counted from 0, and put it in its place."""
    order = {"name": "process_sort_index", "ph": "M", "pid": index + 1, "tid": 1, "args": {"sort_index": index}}
    return [_metadata("process_name", index, 1, name), order]


def _threads(index: int, lanes: Sequence[tuple[str, list[dict[str, Any]]]]) -> Iterator[dict[str, Any]]:
    """Yield the named slices of a process, in as many threads as they need."""
    thread = 0
    for name, slices in lanes:
        for number, row in enumerate(_without_overlap(slices), start=1):
            thread += 1
            yield _metadata("thread_name", index, thread, name if number == 1 else f"{name} {number}")
            yield from ({**entry, "pid": index + 1, "tid": thread} for entry in row)


def _metadata(name: str, index: int, thread: int, value: str) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": index + 1, "tid": thread, "args": {"name": value}}


def _slice(name: str, category: str, start_ms: float, end_ms: float, args: dict[str, Any]) -> dict[str, Any]:
    start_ns, end_ns = round(start_ms * 1e6), round(end_ms * 1e6)
    times = {"ts": start_ns / 1000, "dur": (end_ns - start_ns) / 1000}  # microseconds
    return {"name": name, "cat": category, "ph": "X", **times, "args": args}


def _span_slice(span: Span, origin: float, kinds: Mapping[Action, StageKind]) -> dict[str, Any]:
    action = span.action
    name = span.label or (action.format() if action else span.kind)
    if span.kind == "wait" and span.label:
        name = f"wait: {span.label}"
    args: dict[str, Any] = {"stage": span.stage_index, "microbatch": span.microbatch_index, "label": span.label}
    if action is not None and action in kinds:
        args["stage_kind"] = kinds[action].value
    return _slice(name, span.kind, span.start_ms - origin, span.end_ms - origin, args)


def _action_slices(spans: Sequence[Span], origin: float, kinds: Mapping[Action, StageKind]) -> Iterator[dict[str, Any]]:
    """Yield a slice for each stretch of compute spans of one action; `spans` are those of a device, sorted."""
    computing = [span for span in spans if span.kind == "compute"]
    for action, stretch in groupby(computing, key=lambda span: span.action):
        if action is None:
            continue
        first, *rest = stretch
        end = max(span.end_ms for span in (first, *rest))
        name = f"{kinds[action].value if action in kinds else 'stage'} {action.stage_index}"
        yield _slice(
            f"{name}, micro-batch {action.microbatch_index}", _ACTION, first.start_ms - origin, end - origin, {}
        )


def _without_overlap(slices: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Spread slices, sorted by their start, over the fewest rows in which none overlaps another."""
    rows: list[list[dict[str, Any]]] = []
    ends: list[int] = []
    for entry in slices:
        start = round(entry["ts"] * 1000)
        row = next((i for i, end in enumerate(ends) if end <= start), len(rows))
        if row == len(rows):
            rows.append([])
            ends.append(0)
        rows[row].append(entry)
        ends[row] = start + round(entry["dur"] * 1000)
    return rows
