"""The devices that the options ask for, the same as the planner sees them, and the engine that runs on them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torchmetrics import Metric

from ..devices.pool import DevicePool
from ..devices.virtual import TimedLink
from ..engine.runner import Engine
from ..options import RoundPipeOptions, VirtualLink
from ..planning.costs import CostProfile, Machine
from ..planning.partition import Partition
from ..planning.plan import plan_evaluation, plan_training
from ..reporting.host_report import HostReport


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
    return DevicePool(torch_devices, link=link, memory_limit=limit)


def machine_of(pool: DevicePool, options: RoundPipeOptions) -> Machine:
    """What is known about the pool: its memory, and the links of virtual devices. Nothing measures those of GPUs."""
    if not pool.is_virtual or not isinstance(options.virtual_copies, VirtualLink):
        return Machine(len(pool), pool.memory_limit)
    link = options.virtual_copies
    return Machine(
        len(pool),
        pool.memory_limit,
        h2d_bytes_per_ms=link.bytes_per_ms,
        d2h_bytes_per_ms=link.bytes_per_ms,
        transfer_latency_ms=link.latency_ms,
    )


def make_engine(root: nn.Module, pool: DevicePool, options: RoundPipeOptions, report: HostReport | None) -> Engine:
    """The engine that trains ``root`` on ``pool``.

    Args:
        report: that is to know of plans for training.
    """
    machine, round_size = machine_of(pool, options), options.round_size_for(len(pool))

    def plan(costs: CostProfile, num_microbatches: int, training: bool) -> Partition:
        search = plan_training if training else plan_evaluation
        partition = search(costs, machine, num_microbatches=num_microbatches, round_size=round_size)
        if training and report is not None:
            report.note_plan(partition, costs, num_microbatches, round_size)
        return partition

    num_threads = options.threads_per_device
    if num_threads is None and pool.is_virtual:
        num_threads = max(1, torch.get_num_threads() // len(pool))
    engine = Engine(
        root,
        pool,
        plan,
        round_size=round_size,
        machine=machine,
        unit_classes=options.units,
        exempt=(Metric,),
        num_threads=num_threads,
        compile_units=options.compile_arguments,
    )
    if options.cost_profile is not None:
        engine.preset_costs("training_step", options.cost_profile)
    return engine


def update_threads(pool: DevicePool) -> int:
    """Intra-op threads of optimizer steps: on virtual devices the units need the cores, too; every GPU gets one for the
    thread that keeps it busy, as far as that leaves half of them."""
    num_threads = torch.get_num_threads()
    if pool.is_virtual:
        return max(1, num_threads // (len(pool) + 1))
    return max(1, num_threads // 2, num_threads - len(pool))
