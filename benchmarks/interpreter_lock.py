"""How much of a step the interpreter lock is held for: 8 devices that only wait, 16 micro-batches.

One interpreter feeds all devices. Virtual devices wait on the threads of micro-batches; simulated GPUs (those of the
tests) wait on streams of their own, while the host's threads issue work ahead, as they do for real ones.
"""

from __future__ import annotations

import contextlib
import os
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from benchmarks import bubble
from benchmarks._report import Report, parser, progress
from benchmarks._waiting import Wait, sharpen_timers
from benchmarks.gpu.probes import LockSampler
from lightning_roundpipe.common.attributes import attribute_set
from lightning_roundpipe.devices.gpu.driver import driver_of
from lightning_roundpipe.devices.issue_lock import IssueLock, Pace
from tests.support import accelerator

METHOD = """
The small model of the benchmark bubble (28 layers and a head that wait), by its planner, in one round. virtual: units
sleep on the thread of their micro-batch. simulated_gpus: units let the stream of their device do nothing for the same
time, and the host goes on; devices have memory of their own, so weights, gradients and activations travel.
without_issue_lock: the same, but all threads issue at the same time, see [Note: issue lock]. taken: a thread of its
own asks for the interpreter lock about every millisecond, and share_taken is how often it did not get it at once; with
all cores busy that is more than the lock is held. cpu_share is the CPU time of the process over the wall-clock time,
all threads: what the simulation itself computes (shapes, memory, streams, its detector of races) is in it, so for
simulated GPUs it is no bound for real ones. The first steps (recording, planning) do not count.
"""
NUM_WARM_UP = 3


class Late(Wait):
    """A unit whose device is busy for a modelled duration; the host is not."""

    @staticmethod
    def wait(x: Tensor, ms: float) -> None:
        api = torch.get_device_module(x.device)
        with api.device(x.device):
            api._sleep(int(ms * 1e3))


class NoLock(IssueLock):
    """Lets all threads issue at the same time."""

    def issuing(self, pace: Pace) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()


def measured(speed: str, num_steps: int, device: str, unit: type[Wait]) -> dict[str, Any]:
    """Figures of one kind of device."""
    case = bubble.Case(bubble.small_profile(speed), 16, 16, device=device, unit=unit)
    for _ in range(NUM_WARM_UP):
        case.run(store=False)
    sampler = LockSampler()
    sampler.start()
    for _ in range(num_steps):
        case.run(store=True)
    taken = sampler.stop()
    figures = case.summary()
    return {"taken": taken, **{name: figures[name] for name in ("step_ms", "ideal_ms", "over_ideal", "cpu_share")}}


def measured_without_issue_lock(speed: str, num_steps: int) -> dict[str, Any]:
    """Figures of simulated GPUs to which all threads issue at the same time."""
    with attribute_set(driver_of("sim"), "issue_lock", NoLock()):
        return measured(speed, num_steps, "sim", Late)


def main() -> None:
    """Measures and prints."""
    args = parser(__doc__, repeats=10).parse_args()
    num_steps = 2 if args.quick else args.repeats
    reason = accelerator.why_not()
    if reason is None:
        os.environ["SIM_DEVICES"] = str(bubble.NUM_DEVICES)
        accelerator.install()
    parameters = {
        "devices": bubble.NUM_DEVICES,
        "microbatches": 16,
        "repeats": num_steps,
        "minimal_timer_slack": sharpen_timers(),
    }
    report = Report("interpreter_lock", METHOD, parameters)
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for speed in ["fast"] if args.quick else list(bubble.SPEEDS):
        results[speed] = {"virtual": measured(speed, num_steps, "cpu", Wait)}
        progress(f"virtual, {speed}")
        results[speed]["simulated_gpus"] = reason or measured(speed, num_steps, "sim", Late)
        progress(f"simulated GPUs, {speed}")
        results[speed]["without_issue_lock"] = reason or measured_without_issue_lock(speed, num_steps)
        progress(f"simulated GPUs without the issue lock, {speed}")
    report.emit(results)


if __name__ == "__main__":
    main()
