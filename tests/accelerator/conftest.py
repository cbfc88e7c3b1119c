"""What tests of the simulated accelerator share: ``torch.sim`` with fresh counts, and a device on it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from lightning_roundpipe.devices.gpu import driver as gpu_driver
from lightning_roundpipe.devices.gpu.device import GpuDevice
from lightning_roundpipe.devices.gpu.driver import GpuDriver, driver_of


@pytest.fixture(scope="module", autouse=True)
def no_garbage() -> None:
    """What earlier tests have left in cycles still has its memory, and some tests expect that nothing has."""
    gc.collect()


@pytest.fixture
def sim() -> Iterator[ModuleType]:
    """``torch.sim``, with nothing in its queues and all counts at zero."""
    module: ModuleType = torch.get_device_module("sim")
    for index in range(module.device_count()):
        module.synchronize(index)
    module.empty_cache()
    module.reset_stats()
    with module.device(0):
        yield module
        for index in range(module.device_count()):
            module.synchronize(index)


@pytest.fixture
def device(sim: ModuleType) -> Iterator[GpuDevice]:
    """A device on the first GPU, in a step; the thread of the test works on it."""
    made = GpuDevice(0, 0, driver=driver_of("sim"))
    made.open()
    made.enter()
    yield made
    made.close()
    made.dispose()
    assert sim.stats()["races"] == 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuDriver]:
    """Of the test alone: its page-locked memory goes with the last device of the test."""
    made = GpuDriver("sim")
    monkeypatch.setattr(gpu_driver, "driver_of", lambda device_type: made)
    yield made
    assert (made.host.in_place_bytes, made.host.buffers.own_bytes) == (0, 0), "page-locked memory was left behind"
