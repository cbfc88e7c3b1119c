"""``roundpipe plan``: the plan that training would make from a profile, and what it would take."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict
from typing import Any

from lightning_roundpipe.planning import (
    CostProfile,
    Machine,
    Partition,
    Simulation,
    StageCost,
    plan_training,
    round_robin,
    simulate,
    stage_costs,
)
from lightning_roundpipe.planning.quantities import format_bytes, format_ms, format_share

from .arguments import (
    Subparsers,
    add_dtype,
    add_json,
    add_machine,
    add_pipeline,
    add_png,
    check_picture_path,
    load_profile,
    machine_of,
    round_size_of,
    save_picture,
    write_text,
)
from .memory import HOST_ASSUMPTION, host_memory
from .output import Table, compress_names, print_json, print_report
from .schedule_file import format_schedule

_EXAMPLES = """
examples:
  roundpipe plan --profile p.json --devices 8 --microbatches 16
  roundpipe plan --profile p.json --devices 8 --microbatches 16 --device-memory 24GiB \\
      --h2d 25GB/s --d2h 25GB/s --latency 10us --host-bandwidth 200GB/s --png plan.png

RoundPipeStrategy(save_profile="p.json") writes a profile at the end of a run; one can also be written by hand.
"""


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's arguments."""
    parser = subparsers.add_parser(
        "plan",
        help="print the plan for a profile: stages, step time, bubble, memory, what bounds it",
        description="Cut the calls of a profile into the stages that are fastest on a machine, and simulate one step.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_pipeline(parser)
    add_machine(parser)
    add_dtype(parser)
    parser.add_argument("--timeline", metavar="FILE", help="write the simulated step as a Chrome trace (.json)")
    parser.add_argument("--save-schedule", metavar="FILE", help="write the schedule as text, for roundpipe simulate")
    add_png(parser, "the simulated step")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Plan, simulate and print.

    Raises:
        ValueError: If the profile cannot be read, does not fit on a device, or a file cannot be written.
    """
    check_picture_path(args.png)
    profile, machine, round_size = load_profile(args.profile), machine_of(args), round_size_of(args)
    counts = {"num_microbatches": args.microbatches, "round_size": round_size}
    partition = plan_training(profile, machine, hop_ms=args.hop_ms, **counts)
    schedule = round_robin(partition.num_stages, num_devices=args.devices, **counts)
    costs = stage_costs(partition, profile)
    simulation = simulate(schedule, costs, machine, hop_ms=args.hop_ms)
    if args.timeline:
        write_text(args.timeline, json.dumps(simulation.timeline.to_chrome_trace()))
    if args.save_schedule:
        write_text(args.save_schedule, format_schedule(schedule, partition))
    if args.png:
        save_picture(args.png, [("RoundPipe", simulation.timeline, partition)])
    document = {
        "command": "plan",
        "profile": args.profile,
        "machine": {**asdict(machine), "hop_ms": args.hop_ms},
        **counts,
        "partition": partition.format(),
        "stages": _stages(partition, profile, costs),
        "step_ms": simulation.step_ms,
        "optimizer_ms": simulation.optimizer_ms,
        "bubble_ratio": simulation.timeline.bubble_ratio,
        "bubble_parts": simulation.timeline.bubble_parts,
        "bound_by": simulation.bound_by,
        "lower_bounds_ms": simulation.lower_bounds_ms,
        "devices": _devices(simulation),
        "host_memory_bytes": host_memory(partition, profile, simulation.timeline, args.dtype),
        "host_memory_assumption": HOST_ASSUMPTION,
    }
    if args.json:
        print_json(document)
    else:
        print_report(*_report(document, machine))
    return 0


def _stages(partition: Partition, profile: CostProfile, costs: tuple[StageCost, ...]) -> list[dict[str, Any]]:
    return [
        {
            "index": stage.index,
            "kind": stage.kind.value,
            "first_call": stage.start,
            "last_call": stage.stop - 1,
            "units": [call.name for call in profile.calls[stage.start : stage.stop]],
            "duration_ms": cost.duration_ms,
            "recompute_ms": cost.recompute_ms,
            "weight_bytes": cost.weight_bytes,
            "gradient_bytes": cost.gradient_bytes,
            "input_bytes": cost.input_bytes,
            "output_bytes": cost.output_bytes,
            "workspace_bytes": cost.workspace_bytes,
        }
        for stage, cost in zip(partition.stages, costs, strict=True)
    ]


def _devices(simulation: Simulation) -> list[dict[str, Any]]:
    timeline = simulation.timeline
    makespan_ms = timeline.makespan_ms
    return [
        {
            "busy_fraction": timeline.busy_ms(device) / makespan_ms if makespan_ms else 1.0,
            "memory_bytes": simulation.memory_bytes[device],
            "h2d_bytes": simulation.h2d_bytes[device],
            "d2h_bytes": simulation.d2h_bytes[device],
        }
        for device in range(timeline.num_devices)
    ]


def _report(document: dict[str, Any], machine: Machine) -> list[str | Table]:
    """The document for people."""
    parts, bounds = document["bubble_parts"], document["lower_bounds_ms"]
    step_ms, round_size = document["step_ms"], document["round_size"]
    num_rounds = -(-document["num_microbatches"] // round_size)
    summary = [
        f"{len(document['stages'])} stages on {machine.num_devices} devices, {document['num_microbatches']} "
        f"micro-batches in {num_rounds} round{'s' if num_rounds > 1 else ''} of {round_size}",
        f"Step time   {format_ms(step_ms)}, bound by {document['bound_by']}",
        f"Bubble      {format_share(document['bubble_ratio'])}: "
        + ", ".join(f"{name} {format_share(share)}" for name, share in parts.items()),
    ]
    report: list[str | Table] = ["\n".join(summary), _stage_table(document["stages"]), _device_table(document, machine)]
    report += [
        Table(
            "What each resource alone would need for a step",
            ("resource", "at least", "share of step"),
            [
                (name, format_ms(ms), format_share(ms / step_ms) if step_ms else "-")
                for name, ms in sorted(bounds.items(), key=lambda item: -item[1])
                if ms
            ],
        ),
        Table(
            f"Host memory ({document['host_memory_assumption']})",
            ("purpose", "size"),
            [(name, format_bytes(size)) for name, size in document["host_memory_bytes"].items()],
        ),
    ]
    return report


def _stage_table(stages: list[dict[str, Any]]) -> Table:
    sizes = ("weight_bytes", "gradient_bytes", "input_bytes", "output_bytes", "workspace_bytes")
    rows = []
    for stage in stages:
        numbers = [format_ms(stage["duration_ms"]), *(format_bytes(stage[size]) for size in sizes)]
        rows.append((str(stage["index"]), stage["kind"], compress_names(stage["units"]), *numbers))
    columns = ("stage", "kind", "units", "time", "weights", "gradients", "up", "down", "workspace")
    title = "Stages (time, activations up and down, and workspace: per micro-batch)"
    return Table(title, columns, rows, num_text=3)


def _device_table(document: dict[str, Any], machine: Machine) -> Table:
    limit = machine.device_memory_bytes
    devices = document["devices"]
    rows: list[tuple[str, ...]] = []
    for index, device in enumerate(devices):
        share = format_share(device["memory_bytes"] / limit) if limit else "no limit"
        moved = (format_bytes(device["h2d_bytes"]), format_bytes(device["d2h_bytes"]))
        peak = format_bytes(device["memory_bytes"])
        rows.append((f"device {index}", format_share(device["busy_fraction"]), peak, share, *moved))
    total = [math.fsum(device[key] for device in devices) for key in ("h2d_bytes", "d2h_bytes")]
    rows.append(("all", format_share(1 - document["bubble_ratio"]), "", "", *map(format_bytes, total)))
    of_limit = f"of {format_bytes(limit)}" if limit else "limit"
    return Table("Devices, one step", ("device", "busy", "peak memory", of_limit, "uploaded", "downloaded"), rows)
