"""``roundpipe simulate``: the schedules of the literature beside RoundPipe's, on the same calls and machine."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from lightning_roundpipe.planning.quantities import format_bytes, format_ms, format_share

from .arguments import (
    Subparsers,
    add_command,
    add_json,
    add_option,
    add_pipeline,
    add_png,
    check_picture_path,
    load_profile,
    machine_of,
    parse_count,
    round_size_of,
    save_picture,
)
from .contenders import SCHEDULES, Case, Contender, Skipped
from .memory import BOUND_ASSUMPTION
from .output import Table, show

_DESCRIPTION = """
Simulate one training step under several schedules. GPipe, 1F1B, interleaved 1F1B and looped BFS bind stages to devices;
the calls are split into stages of about equal time, and the looped ones take the number of stages per device (2 to 12)
that is fastest. RoundPipe takes the plan that is fastest on this machine.
"""
_EXAMPLES = """
examples:
  roundpipe simulate --profile p.json --devices 8 --microbatches 16 --hop-ms 1.6
  roundpipe simulate --profile p.json --devices 8 --microbatches 16 --only gpipe roundpipe-sync --png p.png
"""
_BUBBLE = (
    "share of the devices' time in a step that they idle, a synchronous optimizer not counted; RoundPipe asynchronous: "
    "without the first fill and last drain"
)


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's arguments."""
    summary = "compare schedules: step time, bubble, memory"
    parser = add_command(subparsers, "simulate", summary, _DESCRIPTION, _EXAMPLES)
    add_pipeline(parser)
    steps = "steps to simulate for RoundPipe asynchronous (default: 8; a picture shows them all)"
    add_option(parser, "--steps", parse_count, "K", steps, default=8)
    parser.add_argument("--only", nargs="+", choices=tuple(SCHEDULES), metavar="NAME", help=", ".join(SCHEDULES))
    add_png(parser, "the timelines, one above the other")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Simulate, compare and print."""
    check_picture_path(args.png)
    case = Case(
        profile=load_profile(args.profile),
        machine=machine_of(args),
        num_microbatches=args.microbatches,
        round_size=round_size_of(args),
        num_steps=args.steps,
        dtype=args.dtype,
        may_split=args.may_split,
    )
    chosen = [SCHEDULES[name] for name in SCHEDULES if args.only is None or name in args.only]
    results = [run_schedule(case, title) for title, run_schedule in chosen]
    if args.png:
        contenders = [result for result in results if isinstance(result, Contender)]
        if not contenders:
            raise ValueError("--png has nothing to draw: none of the schedules can run.")
        save_picture(args.png, [(result.name, result.simulation.timeline) for result in contenders])
    document = {
        "command": "simulate",
        "profile": args.profile,
        "machine": asdict(case.machine),
        "num_microbatches": case.num_microbatches,
        "round_size": case.round_size,
        "schedules": _rows(results),
        "bubble_definition": _BUBBLE,
        "bound_memory_assumption": BOUND_ASSUMPTION,
    }
    show(document, *_report(document), as_json=args.json)
    return 0


def _rows(results: list[Contender | Skipped]) -> list[dict[str, Any]]:
    """What is known of each schedule; speeds are relative to the fastest that binds stages."""
    bound = [r.simulation.step_ms for r in results if isinstance(r, Contender) and r.binds_stages]
    best_ms = min(bound, default=None)
    rows: list[dict[str, Any]] = []
    for result in results:
        if isinstance(result, Skipped):
            rows.append({"name": result.name, "binds_stages": True, "skipped": result.reason})
            continue
        simulation = result.simulation
        step_ms = simulation.step_ms
        rows.append(
            {
                "name": result.name,
                "binds_stages": result.binds_stages,
                "skipped": None,
                "num_stages": result.num_stages,
                "stages": result.stages,
                "step_ms": step_ms,
                "bubble_ratio": result.bubble_ratio,
                "bubble_parts": simulation.timeline.bubble_parts,
                "speed": best_ms / step_ms if best_ms is not None and step_ms else None,
                "memory_bytes": result.memory_bytes,
                "bound_by": simulation.bound_by,
            }
        )
    return rows


def _report(document: dict[str, Any]) -> list[str | Table]:
    """The document for people."""
    limit = document["machine"]["device_memory_bytes"]
    rows, skipped = [], []
    for row in document["schedules"]:
        if row["skipped"]:
            skipped.append(f"{row['name']} was left out: it {row['skipped']}.")
            continue
        low, high = min(row["memory_bytes"]), max(row["memory_bytes"])
        speed = "-" if row["speed"] is None else f"{row['speed']:.2f}x"
        mark = " (!)" if limit is not None and high > limit else ""
        numbers = [str(row["num_stages"]), format_ms(row["step_ms"]), format_share(row["bubble_ratio"]), speed]
        rows.append((row["name"], *numbers, format_bytes(low), format_bytes(high) + mark, row["bound_by"]))
    columns = ("schedule", "stages", "step", "bubble", "speed", "memory from", "memory to", "bound by")
    title = (
        f"{document['num_microbatches']} micro-batches on {document['machine']['num_devices']} devices "
        f"(profile {document['profile']})"
    )
    notes = [
        f"Bubble: {_BUBBLE}.",
        "Speed: relative to the fastest schedule that binds stages to devices, whose optimizer's time is not counted.",
        f"Memory: least and most over the devices; schedules that bind stages: {BOUND_ASSUMPTION}.",
    ]
    if any("(!)" in cell for cells in rows for cell in cells):
        notes.append(f"(!) More than the {format_bytes(limit)} of a device: it would not run.")
    return [Table(title, columns, rows), "\n".join([*skipped, *notes])]
