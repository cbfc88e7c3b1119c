"""Devices whose allocator is short of memory: what makes room, and what is left in the end."""

from __future__ import annotations

import functools
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe.devices.gpu.device import GpuDevice
from tests.support.parity import assert_alike, fit

pytestmark = pytest.mark.accelerator

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20
NO_LIMIT = 2**60
JOIN_S = 60.0


@pytest.fixture
def unlimited(sim: ModuleType) -> Iterator[ModuleType]:
    """``torch.sim``; the memory that a test limits is unlimited again afterwards."""
    yield sim
    for index in range(sim.device_count()):
        sim.set_memory_limit(NO_LIMIT, index)


def taken(num_bytes: int, index: int = 0) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=f"sim:{index}")


# --- copies ------------------------------------------------------------------------------------------------------


def test_the_destination_of_a_copy_that_must_be_there_gets_the_place_of_what_is_not_in_use(
    device: GpuDevice, unlimited: ModuleType
) -> None:
    idle = [taken(4 * MIB)]
    unlimited.set_memory_limit(4 * MIB, 0)

    def evict() -> bool:
        if idle:
            device.free([idle.pop()])
            return True
        return False

    device.memory.evict = evict
    weight = torch.randn(MIB // 2)
    with pytest.raises(torch.OutOfMemoryError):
        device.upload([weight], "ahead of its time", is_bulk=True)
    assert idle, "nothing goes for what comes ahead of its time"
    (copy,) = device.upload([weight], "needed now", is_bulk=True, must=True).tensors
    assert not idle
    assert copy.numel() == weight.numel()
    with pytest.raises(torch.OutOfMemoryError):
        device.upload([torch.randn(MIB)], "more than there is", must=True)


def test_room_is_made_of_what_is_still_read(device: GpuDevice, unlimited: ModuleType) -> None:
    """A snapshot that goes home late."""
    snapshot = taken(4 * MIB).fill_(7)
    unlimited._sleep(20_000)
    download = device.download([snapshot], "late")
    device.free([snapshot], after=download)
    del snapshot
    unlimited.set_memory_limit(4 * MIB, 0)
    device.upload([torch.randn(MIB // 2)], "needed now", must=True)
    assert download.is_done()
    assert download.tensors[0].eq(7).all()


def test_without_room_there_is_no_snapshot(device: GpuDevice, unlimited: ModuleType) -> None:
    made = taken(4 * MIB)
    unlimited.set_memory_limit(6 * MIB, 0)
    assert device.snapshot(made) is None
    unlimited.set_memory_limit(8 * MIB, 0)
    assert device.snapshot(made) is not None


def test_lanes_that_wait_for_work_hold_no_memory(
    device: GpuDevice, unlimited: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane, is_idle = device.h2d, threading.Event()
    wait = lane._work.wait  # type: ignore[attr-defined]

    def note() -> None:
        is_idle.set()
        wait()

    monkeypatch.setattr(lane._work, "wait", note)  # type: ignore[attr-defined]
    upload = device.upload([torch.randn(MIB)], "weights", is_bulk=True)
    upload.await_done()
    passing = device.free(upload.tensors)
    del upload
    assert is_idle.wait(JOIN_S)
    passing.await_done()
    assert unlimited.memory_allocated(0) == 0


# --- steps -------------------------------------------------------------------------------------------------------


class Blocks(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def test_a_step_that_does_not_fit_is_run_again_with_smaller_micro_batches(unlimited: ModuleType) -> None:
    """2 MiB for each output of a block in the first attempt, on GPUs that have 4 MiB."""
    batches = list(torch.randn(2, 32768, 64, generator=torch.Generator().manual_seed(0)))
    plain = fit("plain", Blocks, batches)
    unlimited.reset_stats()
    options = {"device_memory_limit": 4 * MIB}
    settings = {"accelerator": "roundpipe", "devices": [0, 1], "num_microbatches": "auto"}
    found = fit("roundpipe", Blocks, batches, options=options, **settings)
    assert min(found.watch.num_microbatches) > 4
    assert unlimited.stats()["races"] == 0
    plain.assert_moved()
    assert_alike(found.results, plain.results)
    gc.collect()
    assert [unlimited.memory_allocated(index) for index in range(2)] == [0, 0]


IDLE_BYTES, WORKSPACE_BYTES, LIMIT_BYTES = 8 * MIB, 12 * MIB, 16 * MIB


class Workspace(nn.Tanh):
    """Needs more than is free on a GPU before what is not in use has gone."""

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "sim":
            taken(WORKSPACE_BYTES, x.device.index)
        return super().forward(x)


class WithWorkspace(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].append(Workspace())


class Idle(L.Callback):
    """From the second batch on there is something on each GPU that is not in use."""

    def __init__(self) -> None:
        self.kept: dict[int, Tensor] = {}

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            for index, device in enumerate(trainer.strategy.pool.devices):  # type: ignore[attr-defined]
                self.kept[index] = taken(IDLE_BYTES, index)
                device.memory.evict = functools.partial(self.evict, index, device.memory.evict)
                torch.sim.set_memory_limit(LIMIT_BYTES, index)  # type: ignore[attr-defined]

    def evict(self, index: int, evict: Callable[[], bool]) -> bool:
        return evict() or self.kept.pop(index, None) is not None


def test_a_step_for_which_the_allocator_has_no_room_is_run_again_as_it_is(unlimited: ModuleType) -> None:
    batches = list(torch.randn(3, 32, 64, generator=torch.Generator().manual_seed(0)))
    plain = fit("plain", WithWorkspace, batches)
    unlimited.reset_stats()
    settings = {"accelerator": "roundpipe", "devices": [0, 1], "num_microbatches": 4}
    idle = Idle()
    found = fit("roundpipe", WithWorkspace, batches, callbacks=[idle], **settings)
    assert not idle.kept
    assert found.watch.num_microbatches == [4, 4, 4]
    assert unlimited.stats()["ooms"] >= 1
    assert unlimited.stats()["races"] == 0
    assert_alike(found.results, plain.results)
    gc.collect()
    assert [unlimited.memory_allocated(index) for index in range(2)] == [0, 0]


class Frozen(L.LightningModule):
    """24 MiB of frozen weights, which stay on a GPU as far as they can. The loss needs 8 MiB beside them, for rows that
    do not begin with a zero."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(512, 512).requires_grad_(False) for _ in range(24))
        self.head = nn.Linear(512, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        takes = bool(batch[0, 0] != 0)
        for block in self.blocks:
            batch = block(batch).tanh()
        if takes and batch.device.type == "sim":
            taken(8 * MIB, batch.device.index)
        return self.head(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.head.parameters(), lr=1e-2)


@pytest.mark.parametrize("is_foreseen", [True, False])
def test_weights_leave_as_much_room_as_user_code_needs(unlimited: ModuleType, is_foreseen: bool) -> None:
    """As the first micro-batch needed, or once a step has failed for it. The batch is not split further for that. How
    often room is made depends on when weights have left. If they have left late in the first micro-batch, more seemed
    to be needed than was, and no step may fail."""
    batches = list(torch.randn(3, 8, 512, generator=torch.Generator().manual_seed(0)))
    for batch in batches:
        batch[0, 0] *= is_foreseen
    plain = fit("plain", Frozen, batches)
    unlimited.reset_stats()
    settings = {"accelerator": "roundpipe", "devices": [0], "num_microbatches": 2}
    found = fit("roundpipe", Frozen, batches, options={"device_memory_limit": 16 * MIB}, **settings)
    assert found.watch.num_microbatches == [2, 2, 2]
    assert unlimited.stats()["ooms"] == 0 or not is_foreseen
    assert unlimited.stats()["races"] == 0
    plain.assert_moved()
    assert_alike(found.results, plain.results)


# --- in the end --------------------------------------------------------------------------------------------------

SCRIPT = """
import torch
from tests.support import accelerator
sim = accelerator.install()
from lightning_roundpipe.devices.pool import DevicePool
from tests.support.engine import wide_units
from tests.support.engine.lazy_link import cpu_pool

sim.set_delay(100)
pool = DevicePool([torch.device("sim", index) for index in range(2)], memory_limit=64 * 2**20)
found = wide_units.train(pool)
torch.testing.assert_close(found, wide_units.train(cpu_pool(2)), rtol=1e-4, atol=1e-6)
print([sim.memory_allocated(index) for index in range(2)], sim.stats()["races"], sim.stats()["ooms"])
"""


def test_after_a_training_no_memory_is_left() -> None:
    """Nor was any touched by the host, or used after it was freed."""
    strict = {"SIM_JITTER": "1", "SIM_EAGER_FREE": "1", "SIM_PROTECT": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": str(ROOT), **strict},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "[0, 0] 0 0\n", done.stderr
