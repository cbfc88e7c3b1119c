"""The devices that the options ask for, the same as the planner sees them, and the engine that runs on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from torchmetrics import Metric

from ..devices.pool import DevicePool
from ..devices.virtual import TimedLink
from ..engine.runner import Engine
from ..lightning_packages import rank_zero_warn
from ..options import RoundPipeOptions, VirtualLink
from ..planning.costs import CostProfile, Machine
from ..planning.plan import StepPlan, plan_evaluation, plan_training, round_sizes
from ..reporting.host_report import HostReport

# Memory limits of devices that differ by less are taken for the smallest of them: devices that are alike take turns.
_ALIKE = 1.1


def make_pool(torch_devices: Sequence[torch.device], options: RoundPipeOptions) -> DevicePool:
    """The devices on ``torch_devices``, as ``options`` want them.

    Raises:
        ValueError: for devices that cannot be used.
    """
    limit = options.device_memory_bytes
    if limit is not None and not options.virtual_copies and any(device.type == "cpu" for device in torch_devices):
        rank_zero_warn(
            f"device_memory_limit={options.device_memory_limit!r} has no effect on virtual devices that share the "
            "host's memory: set virtual_copies=True to let them have a memory of their own"
        )
        limit = None
    link = None
    if isinstance(options.virtual_copies, VirtualLink):
        link = TimedLink(options.virtual_copies.bytes_per_ms, options.virtual_copies.latency_ms)
    elif options.virtual_copies:
        link = TimedLink()
    return DevicePool(torch_devices, link=link, memory_limit=limit, speeds=options.virtual_speeds)


def machine_of(pool: DevicePool, options: RoundPipeOptions, links: Machine | None = None) -> Machine:
    """What is known about the pool: its memory, and its links: those of virtual devices are given, those of GPUs are
    ``links``, if they were measured."""
    machine = replace(links or Machine(len(pool)), device_memory_bytes=pool.memory_limit)
    limits = [device.memory.limit or 0 for device in pool.devices]
    shares_gpu = not pool.is_virtual and len(pool.gpus) < len(pool)  # its devices divide what is left of it
    differs = max(limits) > _ALIKE * min(limits) and not shares_gpu
    if differs or machine.devices:
        memories = limits if differs else [pool.memory_limit] * len(pool)
        own = [replace(known, memory_bytes=limit) for known, limit in zip(machine.traits, memories, strict=True)]
        machine = replace(machine, devices=tuple(own))
    if not pool.is_virtual or not isinstance(options.virtual_copies, VirtualLink):
        return machine
    link = options.virtual_copies
    return replace(
        machine,
        h2d_bytes_per_ms=link.bytes_per_ms,
        d2h_bytes_per_ms=link.bytes_per_ms,
        transfer_latency_ms=link.latency_ms,
    )


def make_engine(
    root: nn.Module, pool: DevicePool, options: RoundPipeOptions, report: HostReport | None, links: Machine | None
) -> Engine:
    """The engine that trains ``root`` on ``pool``.

    Args:
        report: that is to know of plans for training.
        links: of the devices; None if they are not measured.
    """

    def plan(costs: CostProfile, machine: Machine, num_microbatches: int, training: bool) -> StepPlan:
        search = plan_training if training else plan_evaluation
        sizes: int | list[int] | None = options.round_size
        if sizes is None:
            room = None if report is None else report.room_for_activations
            if torch.are_deterministic_algorithms_enabled() or pool.is_short:
                room = None
            sizes = round_sizes(costs, machine, num_microbatches, waiting_on_host=room, is_training=training)
        made = search(costs, machine, num_microbatches=num_microbatches, round_size=sizes)
        if training and report is not None:
            report.note_plan(made, costs, num_microbatches)
        return made

    engine = Engine(
        root,
        pool,
        plan,
        machine=machine_of(pool, options, links),
        unit_classes=options.units,
        exempt=(Metric,),
        num_threads=microbatch_threads(pool, options.threads_per_device),
        adding_threads=host_threads(pool),
        compile_units=options.compile_arguments,
    )
    if options.cost_profile is not None:
        engine.preset_costs("training_step", options.cost_profile)
    return engine


def host_threads(pool: DevicePool) -> int:
    """Intra-op threads of what runs beside the devices: of optimizer steps behind the pipeline, and of the thread that
    adds up gradients. Updates and casts come in the forward, additions of gradients in the backward: they share them.

    Virtual devices compute with the threads that torch has now: each gets an equal share, and what runs beside them
    gets one, too. Every GPU gets a core for the thread that keeps it busy, as far as that leaves half of the cores; the
    others are for what the host does with all weights and gradients.
    """
    num_threads, num_devices = torch.get_num_threads(), len(pool)
    if pool.is_virtual:
        return max(1, num_threads // (num_devices + 1))
    return max(1, num_threads // 2, num_threads - num_devices)


def microbatch_threads(pool: DevicePool, wanted: int | None) -> int:
    """Intra-op threads of a micro-batch, if the user wants no other number. On GPUs its thread does next to nothing on
    the host, and there are many."""
    return wanted or (max(1, torch.get_num_threads() // len(pool)) if pool.is_virtual else 1)
