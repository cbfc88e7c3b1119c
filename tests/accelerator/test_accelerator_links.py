"""Links of simulated GPUs: that they are measured without a trace, within their memory, and once in a run.

How fast they are is the host's business: nothing here depends on it.
"""

from __future__ import annotations

import gc
import math
from types import ModuleType
from typing import Any

import lightning as L
import pytest
import torch

from lightning_roundpipe.devices import links
from lightning_roundpipe.devices.gpu.driver import GpuDriver
from lightning_roundpipe.devices.pool import DevicePool
from lightning_roundpipe.integration.links import Links
from lightning_roundpipe.planning.costs import Machine
from tests.support.parity import assert_alike, fit, make_loader, make_trainer
from tests.support.small import Small

pytestmark = pytest.mark.accelerator

MIB = 2**20
measure = Links.measure


@pytest.fixture(autouse=True)
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_MOST_BYTES", 2 * MIB)
    monkeypatch.setattr(links, "_BUDGET_MS", 1e9)


@pytest.fixture
def is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Links, "measure", measure)


def pool_on(devices: list[int], memory_limit: int | None = None) -> DevicePool:
    return DevicePool([torch.device("sim", index) for index in devices], memory_limit=memory_limit)


# --- what is left ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [[0], [0, 0, 1]])
def test_measuring_leaves_nothing_and_lets_nothing_wait(sim: ModuleType, driver: GpuDriver, devices: list[int]) -> None:
    gc.collect()
    sim.empty_cache()
    before = [(sim.memory_allocated(index), sim.memory_reserved(index)) for index in range(2)], sim.pinned_bytes()
    pool = pool_on(devices)
    machine = links.measured(pool)
    after = [(sim.memory_allocated(index), sim.memory_reserved(index)) for index in range(2)], sim.pinned_bytes()
    assert after == before
    assert (driver.host.buffers.own_bytes, driver.host.in_place_bytes) == (0, 0)
    counts = sim.stats()
    assert (counts["blocking_copies"], counts["races"], counts["synchronous_operators"]) == (0, 0, 0)
    assert counts["copies_to_device"] > 0
    assert all(device.moved is None and device.memory.used == 0 for device in pool.devices)
    for index in range(len(pool)):
        traits = machine.traits[index]
        assert 0 < traits.h2d_bytes_per_ms < math.inf  # type: ignore[operator]
        assert 0 < traits.d2h_bytes_per_ms < math.inf  # type: ignore[operator]
    assert 0 < machine.host_bytes_per_ms < math.inf
    pool.dispose()


def test_a_gpu_that_still_computes_is_waited_for(sim: ModuleType, driver: GpuDriver) -> None:
    pool = pool_on([0, 1])
    sim._sleep(200_000)
    assert links.measured(pool).h2d_bytes_per_ms < math.inf
    pool.dispose()


def test_page_locked_memory_that_is_in_use_stays(sim: ModuleType, driver: GpuDriver) -> None:
    pool = pool_on([0])
    kept = pool[0].keep(torch.arange(MIB)).tensors[0]
    in_use = driver.host.buffers.own_bytes
    links.measured(pool)
    assert driver.host.buffers.own_bytes == in_use > 0
    assert torch.equal(kept, torch.arange(MIB))
    pool.dispose()


@pytest.mark.parametrize(("limit", "is_enough"), [(32 * MIB, True), (4 * MIB, False)])
def test_copies_keep_to_the_limit(sim: ModuleType, driver: GpuDriver, limit: int, is_enough: bool) -> None:
    sim.reset_peak_memory_stats(0)
    before = sim.memory_allocated(0)
    pool = pool_on([0], limit)
    machine = links.measured(pool)
    assert sim.max_memory_allocated(0) - before <= limit / 2
    assert (machine != Machine(1)) is is_enough
    pool.dispose()


def test_without_room_in_the_allocator_nothing_is_known(
    sim: ModuleType, driver: GpuDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("full")

    pool = pool_on([0])
    monkeypatch.setattr(pool[0].h2d, "submit", full)
    assert links.measured(pool) == Machine(1)
    assert driver.host.buffers.own_bytes == 0
    pool.dispose()


def test_an_error_of_the_driver_ends_the_measurement_and_leaves_nothing(
    sim: ModuleType, driver: GpuDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = pool_on([0])

    def broken(*args: Any) -> None:
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(driver, "copy", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        links.measured(pool)
    assert pool[0].moved is None
    pool.dispose()


# --- runs --------------------------------------------------------------------------------------------------------


class Validated(Small):
    """Has a validation."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))


class Machines(L.Callback):
    """Keeps what plans are made for when a training begins, and what it has copied by then."""

    def __init__(self) -> None:
        self.found: list[Machine] = []
        self.limits: list[int | None] = []

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        self.found.append(strategy.engine.machine)
        self.limits.append(strategy.pool.memory_limit)


def trainer_with(machines: Machines, **settings: Any) -> L.Trainer:
    return make_trainer(callbacks=[machines], accelerator="roundpipe", devices=2, **settings)


@pytest.mark.usefixtures("is_measured", "driver")
def test_a_strategy_measures_in_its_first_training_and_says_so_once(
    sim: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    machines = Machines()
    trainer, module = trainer_with(machines), Validated()
    with caplog.at_level("INFO"):
        trainer.validate(module, make_loader(), verbose=False)
        assert "links:" not in caplog.text, "an evaluation has measured"
        for _ in range(2):
            trainer.fit(module, make_loader())
            trainer.fit_loop.epoch_progress.reset()
        trainer.validate(module, make_loader(), verbose=False)
    assert caplog.text.count("links:") == 1
    assert all(machine.h2d_bytes_per_ms < math.inf for machine in machines.found)
    assert [machine.device_memory_bytes for machine in machines.found] == machines.limits
    assert len(machines.found) == 2


@pytest.mark.usefixtures("is_measured", "driver")
def test_a_deterministic_training_measures_nothing(sim: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    machines = Machines()
    with caplog.at_level("INFO"):
        trainer_with(machines, deterministic=True).fit(Small(), make_loader())
    assert "links:" not in caplog.text
    assert machines.found == [Machine(2, *machines.limits)]


@pytest.mark.usefixtures("is_measured", "driver")
def test_results_are_those_of_any_plan(sim: ModuleType) -> None:
    expected = fit("plain", Small, make_loader())
    found = fit("roundpipe", Small, make_loader(), accelerator="roundpipe", devices=2)
    assert_alike(found.results, expected.results)
