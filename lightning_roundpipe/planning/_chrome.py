"""The Trace Event Format of chrome://tracing and Perfetto: a timeline as a JSON document, and back.

[Note: lanes]
Each device is a process and each kind of span a thread of it. Viewers draw slices of one thread only if they nest, so
spans that overlap (micro-batches that wait at the same time) go to further threads of the same kind. Times are rounded
to nanoseconds before they are subtracted: rounded one by one, neighbours could overlap. A thread "actions" comes on
top, with one slice for each stretch of compute spans of one action; marks are a process below the devices. Both only
help the eye and are not read back. Processes and threads are numbered from 1: viewers give 0 a meaning of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .partition import StageKind
    from .schedule import Action
    from .timeline import Mark, Span, Timeline

_KEY = "roundpipe"
_FORMAT_VERSION = 1
_LANES = ("compute", "h2d", "d2h", "wait")
_ACTION = "roundpipe.action"
_MARK_CATEGORY = "roundpipe.mark"
_HELP = "Write the file with Timeline.to_chrome_trace, or with RoundPipeStrategy(trace=...)."


def encode(timeline: Timeline, marks: Sequence[Mark]) -> dict[str, Any]:
    """Return the document; see [Note: lanes]."""
    # Viewers refuse negative times.
    origin = min([timeline.start_ms, *(mark.start_ms for mark in marks)])
    kinds = timeline.stage_kinds
    events: list[dict[str, Any]] = []
    for device in range(timeline.num_devices):
        events += _process(device, f"device {device}")
        spans = sorted((s for s in timeline.spans if s.device == device), key=lambda span: (span.start_ms, span.end_ms))
        others = sorted({span.kind for span in spans} - set(_LANES))
        lanes = [("actions", list(_action_slices(spans, origin, kinds)))]
        for kind in (*_LANES, *others):
            lanes.append((kind, [_span_slice(span, origin, kinds) for span in spans if span.kind == kind]))
        events += _threads(device, lanes)
    if marks:
        shown = [_slice(m.name, _MARK_CATEGORY, m.start_ms - origin, m.end_ms - origin, dict(m.figures)) for m in marks]
        events += _process(timeline.num_devices, "steps") + list(_threads(timeline.num_devices, [("steps", shown)]))
    header = {"version": _FORMAT_VERSION, "num_devices": timeline.num_devices}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {_KEY: header}}


def decode(document: Any) -> tuple[int, list[dict[str, Any]]]:
    """Return the number of devices, and for each span the arguments that make it.

    Raises:
        ValueError: If the document was not made by `encode`; the message names the event and the field.
    """
    events = document.get("traceEvents") if isinstance(document, dict) else None
    if not isinstance(events, list):
        raise ValueError(f'A trace is a JSON object with a list "traceEvents", got {_shorten(document)}. {_HELP}')
    other = document.get("otherData")
    header = other.get(_KEY) if isinstance(other, dict) else None
    if not isinstance(header, dict) or not isinstance(header.get("num_devices"), int):
        raise ValueError(f"The trace does not say that it shows a RoundPipe timeline (otherData.{_KEY}). {_HELP}")
    if header.get("version") != _FORMAT_VERSION:
        raise ValueError(
            f"The trace has version {header.get('version')!r}, this release reads {_FORMAT_VERSION}: record it again."
        )
    return header["num_devices"], [
        _span_arguments(position, event) for position, event in enumerate(events) if _is_span(event)
    ]


def _is_span(event: Any) -> bool:
    return isinstance(event, dict) and event.get("ph") == "X" and event.get("cat") not in (_ACTION, _MARK_CATEGORY)


def _span_arguments(position: int, event: Mapping[str, Any]) -> dict[str, Any]:
    def get(name: str, kinds: type | tuple[type, ...], source: Mapping[str, Any] = event) -> Any:
        value = source.get(name)
        is_wrong = not isinstance(value, kinds) or isinstance(value, bool)
        if is_wrong or (isinstance(value, (int, float)) and not abs(value) < 2**63):  # nan and inf, which JSON lets in
            raise ValueError(f"traceEvents[{position}] has {name!r}: {_shorten(value)}, which no span has. {_HELP}")
        return value

    number = (int, float)
    start_ns = round(get("ts", number) * 1000)
    end_ns = start_ns + round(get("dur", number) * 1000)
    args = get("args", dict)
    return {
        "device": get("pid", int) - 1,
        "kind": get("cat", str),
        "start_ms": start_ns / 1e6,
        "end_ms": end_ns / 1e6,
        "stage_index": get("stage", int, args),
        "microbatch_index": get("microbatch", int, args),
        "label": get("label", str, args),
    }


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


def _shorten(value: object, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "..."
