"""Which weights are page-locked when units travel in low precision: what travels on, and no master for nothing."""

from __future__ import annotations

import pytest
import torch

from lightning_roundpipe.devices import gpu_driver, pinned
from lightning_roundpipe.devices.pool import DevicePool
from tests.support.engine.gpu_stub import StubDriver
from tests.weights.autocast_training import LOW, Model, Training


def test_masters_that_travel_as_low_copies_are_not_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """They travel in the steps that learn about their units: the first one after each switch to another mode."""
    driver = StubDriver()
    monkeypatch.setattr(gpu_driver, "driver_of", lambda device_type: driver)
    monkeypatch.setattr(pinned, "_MIN_LOCKED_BYTES", 1)
    monkeypatch.setattr(pinned, "PAGE", 4)  # which no two tensors share
    pool = DevicePool([torch.device("cuda", 0), torch.device("cuda", 1)])
    for device in pool.devices:
        device.is_shared = True
    ours = Training(Model(), pool=pool)
    locked: set[int] = set()
    for step in [ours.evaluate, *[ours.train] * 4] * 3:
        step()
        locked |= set(driver.locked)
    low, full = set(), set()
    for name, module in [("head", ours.model.head), *((f"blocks.{i}", b) for i, b in enumerate(ours.model.blocks))]:
        names = ours.low_names(name)
        assert names
        for key, parameter in module.named_parameters():
            (low if key in names else full).add(parameter.data_ptr())
    copies = {copy.data.data_ptr() for (_, dtype), copy in ours.weights._copies.items() if dtype is LOW}
    assert not low & locked
    assert full <= locked
    assert copies <= locked
    assert driver.violations == []
    pool.dispose()
    assert driver.locked == {}
