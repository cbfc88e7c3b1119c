"""``roundpipe timeline``: what a recorded or simulated trace shows, in figures and as a picture."""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from typing import Any

from lightning_roundpipe.planning import Timeline
from lightning_roundpipe.planning.quantities import format_ms, format_share
from lightning_roundpipe.planning.spans import MARK_CATEGORY

from .arguments import (
    Subparsers,
    add_command,
    add_json,
    add_png,
    check_picture_path,
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


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's arguments."""
    parser = add_command(
        subparsers,
        "timeline",
        "figures and a picture of a recorded or simulated trace",
        "Bubble and its parts, what each device did, and what micro-batches waited for.",
        _EXAMPLES,
    )
    parser.add_argument("trace", metavar="TRACE", help="a Chrome trace of a step (.json)")
    add_png(parser, "the timeline")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Read, add up and print."""
    check_picture_path(args.png)
    timeline, steps = _load(args.trace)
    if args.png:
        save_picture(args.png, [(args.trace, timeline)])
    document = {
        "command": "timeline",
        "trace": args.trace,
        "makespan_ms": timeline.makespan_ms,
        "bubble_ratio": timeline.bubble_ratio,
        "bubble_parts": timeline.bubble_parts,
        "devices": [_device(timeline, device) for device in range(timeline.num_devices)],
        "waits_by_reason": _waits_by_reason(timeline),
        "steps": steps,
    }
    show(document, *_report(document), as_json=args.json)
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
    """The recorded steps, each without what lies between it and the next one."""
    marks = [event for event in trace["traceEvents"] if isinstance(event, dict) and event.get("cat") == MARK_CATEGORY]
    try:
        return [
            {
                "name": str(mark["name"]),
                "step_ms": float(mark["dur"]) / 1e3,
                "bubble_ratio": float(mark["args"]["bubble"]) if "bubble" in mark["args"] else None,
            }
            for mark in marks
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"a step is not as RoundPipeStrategy(trace=...) writes it ({error!r}): record it again."
        ) from error


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


def _waits_by_reason(timeline: Timeline) -> dict[str, dict[str, float]]:
    """Number, sum and longest of the waits for each reason, most time first."""
    durations: dict[str, list[float]] = defaultdict(list)
    for span in timeline.spans:
        if span.kind == "wait":
            durations[span.label or "unknown"].append(span.end_ms - span.start_ms)
    ranked = sorted(durations.items(), key=lambda item: -sum(item[1]))
    return {
        reason: {"count": len(values), "total_ms": sum(values), "longest_ms": max(values)} for reason, values in ranked
    }


def _report(document: dict[str, Any]) -> list[str | Table]:
    """The document for people."""
    parts = ", ".join(f"{name} {format_share(share)}" for name, share in document["bubble_parts"].items())
    report: list[str | Table] = [
        f"{format_ms(document['makespan_ms'])} on {len(document['devices'])} devices, "
        f"bubble {format_share(document['bubble_ratio'])}: {parts}",
        _device_table(document["devices"]),
    ]
    if document["waits_by_reason"]:
        report.append(_reason_table(document["waits_by_reason"]))
    if document["steps"]:
        report.append(_step_table(document["steps"]))
    return report


def _device_table(devices: list[dict[str, Any]]) -> Table:
    times = ("busy_ms", "fill_ms", "drain_ms", "h2d_ms", "d2h_ms")
    rows = [
        (f"device {index}", format_share(device["busy_fraction"]), *(format_ms(device[key]) for key in times))
        for index, device in enumerate(devices)
    ]
    return Table("Devices", ("device", "busy", "computing", "fill", "drain", "uploading", "downloading"), rows)


def _reason_table(reasons: dict[str, dict[str, float]]) -> Table:
    rows = [
        (reason, str(wait["count"]), format_ms(wait["total_ms"]), format_ms(wait["longest_ms"]))
        for reason, wait in reasons.items()
    ]
    return Table("Waits of all micro-batches, by reason", ("waiting for", "waits", "total", "longest"), rows)


def _step_table(steps: list[dict[str, Any]]) -> Table:
    rows = []
    for step in steps:
        bubble = "-" if step["bubble_ratio"] is None else format_share(step["bubble_ratio"])
        rows.append((step["name"], format_ms(step["step_ms"]), bubble))
    return Table("Steps, without what lies between them", ("step", "time", "bubble"), rows)
