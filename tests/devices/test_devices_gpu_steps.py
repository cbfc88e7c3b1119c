"""Whole steps on GPUs of the stub come out right, whose copies happen as late as their events allow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_roundpipe.devices import gpu_driver
from lightning_roundpipe.devices.gpu import GpuDevice, _Freed
from lightning_roundpipe.devices.gpu_lanes import GpuLane, GpuTransfer
from lightning_roundpipe.devices.memory import DeviceOutOfMemoryError
from lightning_roundpipe.devices.pool import DevicePool
from tests.support.engine.gpu_stub import StubDriver
from tests.support.engine.whole_steps import difference, results, right_results


@pytest.fixture
def driver() -> StubDriver:
    return StubDriver()


def pool_on(driver: StubDriver, ordinals: list[int], monkeypatch: pytest.MonkeyPatch, limit: int | None = None) -> Any:
    """A pool of stub GPUs. Each is told that its memory is not its own: it is the host's."""
    monkeypatch.setattr(gpu_driver, "driver_of", lambda device_type: driver)
    pool = DevicePool([torch.device("cuda", ordinal) for ordinal in ordinals], memory_limit=limit)
    assert all(isinstance(device, GpuDevice) for device in pool.devices)
    for device in pool.devices:
        device.is_shared = True
    return pool


@pytest.mark.parametrize("ordinals", [[0], [0, 0], [0, 1], [0, 1, 0]], ids=str)
def test_a_step_on_gpus_is_a_step_on_the_host(
    driver: StubDriver, ordinals: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = pool_on(driver, ordinals, monkeypatch)
    assert difference(results(pool), right_results()) is None
    assert driver.violations == []
    assert [device.memory.used for device in pool.devices] == [0] * len(ordinals)
    pool.dispose()
    assert driver.locked == {}


def test_a_traced_step_shows_transfers(driver: StubDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    found = results(pool_on(driver, [0, 0], monkeypatch), trace=True)
    lanes = {span.kind for span in found.pop("spans")}
    assert {"compute", "h2d", "d2h"} <= lanes
    assert difference(found, right_results()) is None


def test_a_step_within_a_limit(driver: StubDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    unlimited = pool_on(driver, [0, 0], monkeypatch)
    results(unlimited)
    peak = max(device.memory.peak for device in unlimited.devices)
    pool = pool_on(driver, [0, 0], monkeypatch, limit=4 * (peak - 1) // 3)  # less a reserve of a quarter
    assert peak - 3 <= pool.memory_limit < peak
    assert difference(results(pool), right_results()) is None
    assert all(device.memory.peak < peak for device in pool.devices)
    with pytest.raises(DeviceOutOfMemoryError, match="device 0 on GPU 0"):
        results(pool_on(driver, [0, 0], monkeypatch, limit=8))


def test_a_failed_step_leaves_nothing_behind(driver: StubDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stop(Exception):
        pass

    calls: list[int] = []

    def stop(x: Tensor) -> None:
        calls.append(1)
        if len(calls) == 4:
            raise Stop

    pool = pool_on(driver, [0, 0], monkeypatch)
    with pytest.raises(Stop):
        results(pool, watch=stop)
    assert [device.memory.used for device in pool.devices] == [0, 0]
    assert driver.violations == []
    assert difference(results(pool), right_results()) is None


def _without_await(lane: GpuLane, transfer: GpuTransfer) -> None:
    """In the place of ``GpuLane.let_reader_wait``: waits until the copies are issued, not until they are made."""
    transfer._may_go_on.wait()


def _without_order(lane: GpuLane, job: Any, stream: Any) -> None:
    """In the place of ``GpuLane._await_sources``."""


def _holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    issued, make = GpuTransfer.issued, _Freed.__init__

    def lets_go(transfer: GpuTransfer, event: Any) -> None:
        issued(transfer, event)
        transfer.pairs = []

    monkeypatch.setattr(GpuTransfer, "issued", lets_go)
    monkeypatch.setattr(_Freed, "__init__", lambda freed, tensors, *args: make(freed, [], *args))


@pytest.mark.parametrize(
    "mutate",
    [
        lambda patch: patch.setattr(GpuLane, "let_reader_wait", _without_await),
        lambda patch: patch.setattr(GpuLane, "_await_sources", _without_order),
        _holds_nothing,
    ],
    ids=["readers do not wait", "streams do not wait", "nothing is held"],
)
def test_every_ordering_of_streams_is_needed(
    driver: StubDriver, monkeypatch: pytest.MonkeyPatch, mutate: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """Mutation testing: without it, the stub shows poison or a violation, every time."""
    pool = pool_on(driver, [0, 0], monkeypatch)
    with monkeypatch.context() as patch:
        mutate(patch)
        try:
            wrong = difference(results(pool), right_results())
        except Exception as error:
            wrong = repr(error)
    assert wrong is not None or driver.violations
