"""``roundpipe plan``: the plan that training would make from a profile, and what it would take."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from lightning_roundpipe.planning import (
    CostProfile,
    Simulation,
    StageCost,
    StepPlan,
    plan_training,
    simulate,
    stage_costs,
)
from lightning_roundpipe.planning.quantities import format_bytes, format_ms, format_share

from .arguments import (
    Subparsers,
    add_command,
    add_json,
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
from .output import Table, show

_EXAMPLES = """
examples:
  roundpipe plan --profile p.json --devices 8 --microbatches 16
  roundpipe plan --profile p.json --devices 8 --microbatches 16 --device-memory 24GiB \\
      --h2d 25GB/s --d2h 25GB/s --latency 10us --host-bandwidth 200GB/s --png plan.png
  roundpipe plan --profile p.json --machine p.json --devices 8 --microbatches 16

RoundPipeStrategy(save_profile="p.json") writes a profile at the end of a run; one can also be written by hand.
"""
_STAGE_SIZES = ("weight_bytes", "gradient_bytes", "input_bytes", "output_bytes", "workspace_bytes")


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's arguments."""
    parser = add_command(
        subparsers,
        "plan",
        "print the plan for a profile: stages, step time, bubble, memory, what bounds it",
        "Cut the calls of a profile into the stages that are fastest on a machine, and simulate one step.",
        _EXAMPLES,
    )
    add_pipeline(parser)
    parser.add_argument("--timeline", metavar="FILE", help="write the simulated step as a Chrome trace (.json)")
    add_png(parser, "the simulated step")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Plan, simulate and print."""
    check_picture_path(args.png)
    profile, machine, round_size = load_profile(args.profile), machine_of(args), round_size_of(args)
    counts = {"num_microbatches": args.microbatches, "round_size": round_size}
    plan = plan_training(profile, machine, may_split=args.may_split, **counts)
    partition = plan.partition
    schedule = plan.schedule(profile, machine, args.microbatches)
    costs = stage_costs(partition, profile)
    simulation = simulate(schedule, costs, machine)
    if args.timeline:
        write_text(args.timeline, json.dumps(simulation.timeline.to_chrome_trace()))
    if args.png:
        save_picture(args.png, [("RoundPipe", simulation.timeline)])
    document = {
        "command": "plan",
        "profile": args.profile,
        "machine": asdict(machine),
        **counts,
        "partition": partition.format(),
        "splits": plan.splits,
        "reason": plan.reason,
        "stages": _stages(plan, profile, costs),
        "step_ms": simulation.step_ms,
        "optimizer_ms": simulation.optimizer_ms,
        "bubble_ratio": simulation.timeline.bubble_ratio,
        "bubble_parts": simulation.timeline.bubble_parts,
        "bound_by": simulation.bound_by,
        "lower_bounds_ms": simulation.lower_bounds_ms,
        "devices": _devices(simulation),
        "host_memory_bytes": host_memory(plan, profile, args.microbatches, args.dtype),
        "host_memory_assumption": HOST_ASSUMPTION,
    }
    show(document, *_report(document), as_json=args.json)
    return 0


def _stages(plan: StepPlan, profile: CostProfile, costs: tuple[StageCost, ...]) -> list[dict[str, Any]]:
    figures = ("duration_ms", "recompute_ms", *_STAGE_SIZES)
    return [
        {
            "index": stage.index,
            "kind": stage.kind.value,
            "first_call": stage.start,
            "last_call": stage.stop - 1,
            "units": [call.name for call in profile.calls[stage.start : stage.stop]],
            "devices_at_a_time": count,
            **{figure: getattr(cost, figure) for figure in figures},
        }
        for stage, cost, count in zip(plan.partition.stages, costs, plan.splits, strict=True)
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


def _report(document: dict[str, Any]) -> list[str | Table]:
    """The document for people."""
    step_ms, round_size = document["step_ms"], document["round_size"]
    num_rounds = -(-document["num_microbatches"] // round_size)
    parts = ", ".join(f"{name} {format_share(share)}" for name, share in document["bubble_parts"].items())
    summary = (
        f"{len(document['stages'])} stages on {len(document['devices'])} devices, {document['num_microbatches']} "
        f"micro-batches in {num_rounds} round{'s' if num_rounds > 1 else ''} of {round_size}\n"
        f"Step time   {format_ms(step_ms)}, bound by {document['bound_by']}\n"
        f"Bubble      {format_share(document['bubble_ratio'])}: {parts}\n"
        f"Dispatch    {document['reason']}"
    )
    bounds = [
        (name, format_ms(ms), format_share(ms / step_ms) if step_ms else "-")
        for name, ms in sorted(document["lower_bounds_ms"].items(), key=lambda item: -item[1])
        if ms
    ]
    host = [(name, format_bytes(size)) for name, size in document["host_memory_bytes"].items()]
    return [
        summary,
        _stage_table(document["stages"]),
        _device_table(document),
        Table("What each resource alone would need for a step", ("resource", "at least", "share of step"), bounds),
        Table(f"Host memory ({document['host_memory_assumption']})", ("purpose", "size"), host),
    ]


def _stage_table(stages: list[dict[str, Any]]) -> Table:
    rows = []
    for stage in stages:
        numbers = (format_ms(stage["duration_ms"]), *(format_bytes(stage[size]) for size in _STAGE_SIZES))
        count = str(stage["devices_at_a_time"])
        names = " ... ".join(dict.fromkeys((stage["units"][0], stage["units"][-1])))
        rows.append((str(stage["index"]), stage["kind"], names, count, *numbers))
    columns = ("stage", "kind", "units", "on", "time", "weights", "gradients", "up", "down", "workspace")
    title = "Stages (on: devices at a time; time, activations up and down, and workspace: per micro-batch)"
    return Table(title, columns, rows, num_text=3)


def _device_table(document: dict[str, Any]) -> Table:
    devices, limit = document["devices"], document["machine"]["device_memory_bytes"]
    rows: list[tuple[str, ...]] = []
    for index, device in enumerate(devices):
        share = format_share(device["memory_bytes"] / limit) if limit else "no limit"
        sizes = [format_bytes(device[key]) for key in ("memory_bytes", "h2d_bytes", "d2h_bytes")]
        rows.append((f"device {index}", format_share(device["busy_fraction"]), sizes[0], share, *sizes[1:]))
    total = [format_bytes(sum(device[key] for device in devices)) for key in ("h2d_bytes", "d2h_bytes")]
    rows.append(("all", format_share(1 - document["bubble_ratio"]), "", "", *total))
    of_limit = f"of {format_bytes(limit)}" if limit else "limit"
    return Table("Devices, one step", ("device", "busy", "peak memory", of_limit, "uploaded", "downloaded"), rows)
