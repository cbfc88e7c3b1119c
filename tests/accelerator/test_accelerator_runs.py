"""Trainings on simulated GPUs: what is limited and page-locked meanwhile, and how many threads compute."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from lightning_roundpipe import RoundPipeTimeline
from lightning_roundpipe.devices.gpu import pinned
from lightning_roundpipe.devices.gpu.cuda import PageLocker
from lightning_roundpipe.devices.gpu.driver import GpuDriver
from lightning_roundpipe.devices.gpu.lanes import GpuTransfer
from lightning_roundpipe.devices.pool import DevicePool
from lightning_roundpipe.engine import plans
from lightning_roundpipe.integration import overlap
from lightning_roundpipe.optimizer import buckets
from lightning_roundpipe.weights.gradients import GradientStore
from tests.support.engine.partitions import recomputed_elsewhere
from tests.support.engine.steps import Steps
from tests.support.parity import assert_alike, fit, make_loader
from tests.support.small import Small
from tests.weights.autocast_training import LOW, Model, Training

pytestmark = [pytest.mark.accelerator, pytest.mark.usefixtures("driver")]

MIB = 2**20
TWICE: dict[str, Any] = {"accelerator": "roundpipe", "devices": [0, 0], "num_microbatches": 4}


class AtEnd(L.Callback):
    """Calls a function at the end of each step."""

    def __init__(self, then: Callable[[L.Trainer], None]) -> None:
        self.then = then

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.then(trainer)


@pytest.fixture
def all_is_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small it is."""
    monkeypatch.setattr(pinned, "_MIN_LOCKED_BYTES", 1)
    monkeypatch.setattr(pinned, "PAGE", 4)  # which no two tensors share


@pytest.mark.parametrize("limit", [None, 64 * MIB])
def test_both_devices_of_a_gpu_work_and_its_allocator_keeps_to_their_limits(limit: int | None, sim: ModuleType) -> None:
    fractions: list[float] = []
    used: list[int] = []

    def note(trainer: L.Trainer) -> None:
        fractions.append(sim.get_per_process_memory_fraction(0))
        used[:] = [device.num_unit_runs for device in trainer.strategy.pool.devices]  # type: ignore[attr-defined]

    expected = fit("plain", Small, make_loader())
    found = fit(
        "roundpipe", Small, make_loader(), callbacks=[AtEnd(note)], options={"device_memory_limit": limit}, **TWICE
    )
    assert_alike(found.results, expected.results)
    assert len(used) == 2
    assert all(used), "a device of the pool had nothing to do"
    assert set(fractions) == ({1.0} if limit is None else {2 * limit / sim.mem_get_info(0)[1]})
    assert sim.get_per_process_memory_fraction(0) == 1.0


def test_micro_batches_have_one_thread_each_and_additions_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    computing, adding = set(), set()
    add = GradientStore.add

    def noted(store: GradientStore, masters: Any, arriving: Any, source: Any) -> None:
        if isinstance(arriving, GpuTransfer) and len(source) > 1:  # with less of a source, a recording adds at once
            adding.add((threading.current_thread().name, torch.get_num_threads()))
        add(store, masters, arriving, source)

    class Noting(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            computing.add(torch.get_num_threads())
            return super().training_step(batch, batch_idx)

    monkeypatch.setattr(GradientStore, "add", noted)
    torch.set_num_threads(4)
    options = {"optimizer_overlap": "off", "threads_per_device": None}
    fit("roundpipe", Noting, make_loader(), options=options, **{**TWICE, "devices": [0]})
    assert computing == {1}
    assert adding == {("roundpipe-accumulation", 3)}
    assert torch.get_num_threads() == 4
    assert not any(thread.name == "roundpipe-accumulation" for thread in threading.enumerate())


def test_no_thread_works_on_a_gpu_that_is_not_of_the_pool(sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA would make a context there, as soon as the thread page-locks memory or waits for a copy."""
    places: dict[str, int] = {}

    def noted(function: Any) -> Any:
        def method(*args: Any, **kwargs: Any) -> Any:
            places[threading.current_thread().name] = sim.current_device()
            return function(*args, **kwargs)

        return method

    monkeypatch.setattr(PageLocker, "page_lock", noted(PageLocker.page_lock))
    monkeypatch.setattr(GpuTransfer, "settle", noted(GpuTransfer.settle))
    callbacks = [AtEnd(lambda trainer: places.update(main=sim.current_device()))]
    fit("roundpipe", Small, make_loader(), callbacks=callbacks, **{**TWICE, "devices": [2, 3]})
    assert {"main", "roundpipe-accumulation"} < set(places)
    assert set(places.values()) <= {2, 3}, places


def test_runs_are_timed_in_steps_that_are_measured_or_where_all_are_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event for each begin and end costs the host as much as a small operator."""
    monkeypatch.setattr(plans, "_ALL_MEASURED", 2)
    monkeypatch.setattr(plans, "_MEASURED_EVERY", 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    steps = Steps(model, num_devices=2, device_type="sim")
    parts = torch.ones(4, 2, 4).unbind()

    def is_timed(seed: int) -> bool:
        result = steps.train(parts, seed, function=lambda x: model(x).mean())
        steps.pool[0].check()  # waits until all stamps are reached
        return bool(result.timeline.spans)

    assert [is_timed(seed) for seed in range(5)] == [True, True, False, True, False]
    steps.engine.times_steps = True
    assert all(is_timed(seed) for seed in range(5, 7))
    steps.engine.close()
    steps.pool.dispose()


@pytest.mark.parametrize("options", [{}, {"summary": True}, {"log_metrics": True}], ids=str)
def test_a_callback_that_shows_figures_of_all_steps_has_them_timed(options: dict[str, bool], tmp_path: Path) -> None:
    wanted: list[bool] = []

    def note(trainer: L.Trainer) -> None:
        wanted.append(trainer.strategy.engine.times_steps)  # type: ignore[attr-defined]

    timeline = RoundPipeTimeline(tmp_path / "trace.json", **options)
    logger = CSVLogger(tmp_path) if options.get("log_metrics") else False
    fit("roundpipe", Small, make_loader(), callbacks=[AtEnd(note), timeline], logger=logger, **TWICE)
    assert set(wanted) == {bool(options)}


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_what_user_code_gets_on_the_host_is_not_page_locked(num_microbatches: int) -> None:
    """It may be kept for long, and be read by workers of a DataLoader: forks get no page-locked memory."""
    kept: list[torch.Tensor] = []
    locked: list[bool] = []

    class Keeping(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            kept.append(loss.detach().cpu())
            return {"loss": loss, "others": [self(batch[0]).cpu(), self(batch[0])]}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            kept.extend([outputs["loss"], *outputs["others"]])
            locked.extend(tensor.is_pinned() for tensor in kept)

    settings = {**TWICE, "num_microbatches": num_microbatches, "options": {"check_split": "off"}}
    fit("roundpipe", Keeping, make_loader(), **settings)
    assert len(kept) == 3 * (num_microbatches + 3)
    assert not any(locked)


@pytest.mark.usefixtures("all_is_locked")
def test_snapshots_of_a_stale_run_travel_from_page_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "MIN_BYTES", 0)
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1)
    locked: list[list[bool]] = []

    def note(trainer: L.Trainer) -> None:
        kept = list(trainer.strategy._overlap._stale._snapshots.values())  # type: ignore[attr-defined]
        locked.append([tensor.is_pinned() for k in kept for tensor in list(k.tensors.values())])

    options = {"optimizer_overlap": "stale"}
    expected = fit("roundpipe", Small, make_loader(40, 5), options=options, num_microbatches=4)
    found = fit("roundpipe", Small, make_loader(40, 5), callbacks=[AtEnd(note)], options=options, **TWICE)
    assert_alike(found.state, expected.state)
    assert len(locked) == 8
    assert locked[-1]
    assert all(locked[-1])


@pytest.mark.usefixtures("all_is_locked")
def test_masters_that_travel_as_low_copies_are_not_locked() -> None:
    """They travel in the steps that learn about their units: the first one after each switch to another mode."""
    pool = DevicePool([torch.device("sim", index) for index in range(2)])
    ours = Training(Model(), pool=pool)
    locked: set[str] = set()
    for step in [ours.evaluate, *[ours.train] * 4] * 2:
        step()
        locked |= {name for name, parameter in ours.model.named_parameters() if parameter.is_pinned()}
    low = {f"{unit}.{name}" for unit in ("head", *(f"blocks.{i}" for i in range(4))) for name in ours.low_names(unit)}
    travels = {name for name, _ in ours.model.named_parameters() if not name.startswith("embedding")}
    assert low
    assert not low & locked
    assert travels - low <= locked
    assert all(copy.data.is_pinned() for (_, dtype), copy in ours.weights._copies.items() if dtype is LOW)
    pool.dispose()


# --- the issue lock ----------------------------------------------------------------------------------------------

PARTS = [torch.ones(1, 2)] * 2


class Layer(nn.Module):
    """Calls a function while it is a unit that runs; ``then`` belongs to the layer and its copies on devices."""

    def __init__(self, then: dict[str, Callable[[], object]]) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.then = then

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.then["call"]()
        y: torch.Tensor = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: self.then["call"]() and None)
        return y


class Chain(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = super().forward(x).sum()
        return loss


def do_nothing() -> None:
    pass


@pytest.fixture
def first() -> dict[str, Callable[[], object]]:
    """What the first layer calls."""
    return {"call": do_nothing}


@pytest.fixture
def second() -> dict[str, Callable[[], object]]:
    """What the second layer calls."""
    return {"call": do_nothing}


@pytest.fixture
def steps(driver: GpuDriver, first: Any, second: Any) -> Iterator[Steps]:
    """Of two layers, on two GPUs."""
    made = Steps(Chain(Layer(first), Layer(second)), recomputed_elsewhere, num_devices=2, device_type="sim")
    yield made
    made.engine.close()
    made.pool.dispose()


def test_units_hold_the_issue_lock_in_forward_and_backward(
    steps: Steps, first: Any, second: Any, driver: GpuDriver
) -> None:
    held: list[bool] = []
    driver.issue_lock.patience_s = 600.0
    first["call"] = second["call"] = lambda: held.append(driver.issue_lock._holder is not None)
    steps.train(PARTS)
    steps.train(PARTS, seed=1)
    assert len(held) >= 2 * len(PARTS) * 2 * 2
    assert all(held)


def test_units_of_two_gpus_may_wait_for_each_other(steps: Steps, first: Any, second: Any) -> None:
    """The second micro-batch in the first layer, and the first one in the second layer."""
    calls = {"first": 0, "second": 0}
    barrier = threading.Barrier(2)

    def meet(name: str, call: int) -> None:
        calls[name] += 1
        if calls[name] == call:
            barrier.wait(60)

    for _ in range(2):
        steps.evaluate(PARTS)
    first["call"] = lambda: meet("first", 2)
    second["call"] = lambda: meet("second", 1)
    steps.evaluate(PARTS)
    assert calls == {"first": 2, "second": 2}
    assert not barrier.broken
