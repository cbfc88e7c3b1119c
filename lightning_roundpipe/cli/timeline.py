"""``roundpipe timeline``: what a recorded or simulated trace shows, in figures and as a picture."""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from lightning_roundpipe.planning import Span, Timeline
from lightning_roundpipe.planning.quantities import format_bytes, format_ms, format_share
from lightning_roundpipe.planning.spans import MARK_CATEGORY

from .arguments import (
    Subparsers,
    add_command,
    add_json,
    add_option,
    add_png,
    check_picture_path,
    parse_count,
    read_text,
    save_picture,
)
from .output import Table, show

_EXAMPLES = """
examples:
  roundpipe timeline trace.json
  roundpipe timeline trace.json --png step.png
  roundpipe timeline trace.json --json

The trace is written by RoundPipeStrategy(trace="trace.json"), or by roundpipe plan --timeline trace.json.
Perfetto (ui.perfetto.dev) and chrome://tracing open it as well.
"""
_FIGURES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "bubble": ("bubble", format_share),
    "h2d_bytes": ("uploaded", format_bytes),
    "d2h_bytes": ("downloaded", format_bytes),
    "peak_memory_bytes": ("peak memory", format_bytes),
    "num_stages": ("stages", str),
    "num_microbatches": ("micro-batches", str),
    "replanned": ("replanned", lambda value: "yes" if value else "no"),
}


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's arguments."""
    parser = add_command(
        subparsers,
        "timeline",
        "figures and a picture of a recorded or simulated trace",
        "Bubble, busy share of each device, longest waits and their reasons, bytes moved.",
        _EXAMPLES,
    )
    parser.add_argument("trace", metavar="TRACE", help="a Chrome trace of a step (.json)")
    add_option(parser, "--waits", parse_count, "K", "how many of the longest waits to print (default: 10)", default=10)
    one_step = "only the K-th step of a trace of several, counted from 1 (default: from the first to the last)"
    add_option(parser, "--step", parse_count, "K", one_step)
    parser.add_argument("--show", action="store_true", help="print the timeline as text")
    add_png(parser, "the timeline")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Read, add up and print."""
    check_picture_path(args.png)
    timeline, steps = _load(args.trace)
    title = args.trace
    if args.step is not None:
        timeline, step = _only_step(timeline, steps, args.step, args.trace)
        title, steps = step["name"], [step]
    if args.png:
        save_picture(args.png, [(title, timeline, None)])
    waits = sorted((span for span in timeline.spans if span.kind == "wait"), key=_duration_ms, reverse=True)
    document = {
        "command": "timeline",
        "trace": args.trace,
        "step": args.step,
        "makespan_ms": timeline.makespan_ms,
        "bubble_ratio": timeline.bubble_ratio,
        "bubble_parts": timeline.bubble_parts,
        "devices": [_device(timeline, device) for device in range(timeline.num_devices)],
        "longest_waits": [_wait(span, timeline.start_ms) for span in waits[: args.waits]],
        "waits_by_reason": _by_reason(waits),
        "steps": steps,
    }
    table = [timeline.format_table().rstrip()] if args.show else []
    show(document, *_report(document), *table, as_json=args.json)
    return 0


def _load(path: str) -> tuple[Timeline, list[dict[str, Any]]]:
    """The timeline and the steps it is made of, if the trace tells of them."""
    text = read_text(path, "trace")
    try:
        trace = json.loads(text)
        return Timeline.from_chrome_trace(trace), _steps(trace)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path} is not JSON ({error}): pass a file that RoundPipeStrategy(trace=...) wrote."
        ) from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _steps(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps that a recorded trace tells of, with their figures; times on the timeline's clock."""
    events = (event for event in trace["traceEvents"] if isinstance(event, dict) and event.get("cat") == MARK_CATEGORY)
    steps = []
    for event in events:
        parts: Iterable[Any] = map(event.get, ("name", "ts", "dur", "args"))
        name, start, duration, figures = parts
        known = [figures.get(key, 0) for key in _FIGURES] if isinstance(figures, dict) else [None]
        if not isinstance(name, str) or not all(map(_is_number, (start, duration, *known))):
            raise ValueError(f"the step {name!r} is not as RoundPipeStrategy(trace=...) writes it: record it again.")
        steps.append({"name": name, "start_ms": start / 1e3, "duration_ms": duration / 1e3, "figures": figures})
    return steps


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) < 2**63  # which nan is not


def _only_step(
    timeline: Timeline, steps: list[dict[str, Any]], number: int, path: str
) -> tuple[Timeline, dict[str, Any]]:
    """What ran in a step, and what is known of it."""
    if number > len(steps):
        raise ValueError(f"--step {number}: {path} tells of {len(steps)} steps; leave --step out to see everything.")
    step = steps[number - 1]
    begin, end = step["start_ms"], step["start_ms"] + step["duration_ms"]
    spans = [span for span in timeline.spans if begin <= (span.start_ms + span.end_ms) / 2 <= end]
    return Timeline(tuple(spans), timeline.num_devices), step


def _duration_ms(span: Span) -> float:
    return span.end_ms - span.start_ms


def _device(timeline: Timeline, device: int) -> dict[str, Any]:
    makespan_ms = timeline.makespan_ms
    lanes = {
        f"{kind}_ms": sum(end - start for start, end in timeline.intervals(device, kind)) for kind in ("h2d", "d2h")
    }
    return {
        "busy_ms": timeline.busy_ms(device),
        "busy_fraction": timeline.busy_ms(device) / makespan_ms if makespan_ms else 1.0,
        "fill_ms": timeline.fill_ms(device),
        "drain_ms": timeline.drain_ms(device),
        **lanes,
    }


def _wait(span: Span, origin_ms: float) -> dict[str, Any]:
    action = span.action
    return {
        "device": span.device,
        "start_ms": span.start_ms - origin_ms,
        "duration_ms": _duration_ms(span),
        "reason": span.label or "unknown",
        "action": action.format() if action else None,
    }


def _by_reason(waits: list[Span]) -> dict[str, dict[str, float]]:
    """Number and sum of the waits for each reason, most time first."""
    durations: dict[str, list[float]] = defaultdict(list)
    for span in waits:
        durations[span.label or "unknown"].append(_duration_ms(span))
    ranked = sorted(durations.items(), key=lambda item: -sum(item[1]))
    return {reason: {"count": len(values), "total_ms": sum(values)} for reason, values in ranked}


def _report(document: dict[str, Any]) -> list[str | Table]:
    """The document for people."""
    parts = ", ".join(f"{name} {format_share(share)}" for name, share in document["bubble_parts"].items())
    steps = document["steps"]
    several = f" ({len(steps)} steps and what lies between them)" if len(steps) > 1 else ""
    report: list[str | Table] = [
        f"{format_ms(document['makespan_ms'])}{several} on {len(document['devices'])} devices, "
        f"bubble {format_share(document['bubble_ratio'])}: {parts}",
        _device_table(document["devices"]),
    ]
    if document["longest_waits"]:
        report += [_reason_table(document["waits_by_reason"]), _wait_table(document["longest_waits"])]
    if steps:
        report.append(_step_table(steps))
    return report


def _device_table(devices: list[dict[str, Any]]) -> Table:
    times = ("busy_ms", "fill_ms", "drain_ms", "h2d_ms", "d2h_ms")
    rows = [
        (f"device {index}", format_share(device["busy_fraction"]), *(format_ms(device[key]) for key in times))
        for index, device in enumerate(devices)
    ]
    return Table("Devices", ("device", "busy", "computing", "fill", "drain", "uploading", "downloading"), rows)


def _reason_table(reasons: dict[str, dict[str, float]]) -> Table:
    rows = [(reason, str(wait["count"]), format_ms(wait["total_ms"])) for reason, wait in reasons.items()]
    return Table("Waits of all micro-batches, by reason", ("waiting for", "waits", "total"), rows)


def _wait_table(waits: list[dict[str, Any]]) -> Table:
    rows = []
    for wait in waits:
        times = (format_ms(wait["start_ms"]), format_ms(wait["duration_ms"]))
        rows.append((wait["reason"], wait["action"] or "-", f"device {wait['device']}", *times))
    return Table("Longest waits", ("waiting for", "stage:micro-batch", "on", "begin", "time"), rows, num_text=3)


def _step_table(steps: list[dict[str, Any]]) -> Table:
    """What is known of the steps; bytes are those of all devices, the peak that of the fullest."""
    shown = [key for key in _FIGURES if any(key in step["figures"] for step in steps)]
    rows = []
    for step in steps:
        figures = step["figures"]
        cells = (_FIGURES[key][1](figures[key]) if key in figures else "-" for key in shown)
        rows.append((step["name"], format_ms(step["duration_ms"]), *cells))
    return Table("Steps", ("step", "time", *(_FIGURES[key][0] for key in shown)), rows)
