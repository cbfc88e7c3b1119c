"""Trainers with GPUs, on a machine that has none: which devices are taken, and a run on a stub of the driver."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_roundpipe import RoundPipeAccelerator
from lightning_roundpipe.devices import gpu_driver
from lightning_roundpipe.devices.gpu import GpuDevice
from tests.support.engine.gpu_stub import StubDriver


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_driver, "gpu_type", lambda: "xpu")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)


@pytest.mark.usefixtures("three_gpus")
@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (2, [0, 1]),
        (-1, [0, 1, 2]),
        ("-1", [0, 1, 2]),
        ("2", [0, 1]),
        ("1,2", [1, 2]),
        ([2, 0], [2, 0]),
        ([0, 0], [0, 0]),
        ("0,0", [0, 0]),
        (" 1, 0 ,1,", [1, 0, 1]),
        ("0,", [0]),
    ],
)
def test_devices(devices: Any, expected: list[int]) -> None:
    found = RoundPipeAccelerator.parse_devices(devices)
    assert found == expected
    assert RoundPipeAccelerator.get_parallel_devices(found) == [torch.device("xpu", i) for i in expected]


@pytest.mark.usefixtures("three_gpus")
@pytest.mark.parametrize("devices", [[3], [3, 3], [-1], [], 0, 4, -2, "4", "x", "0,5,5", "0,0,x", [0, "0"], True])
def test_devices_that_are_not_there(devices: Any) -> None:
    with pytest.raises(MisconfigurationException, match="this machine has 3 GPU"):
        RoundPipeAccelerator.parse_devices(devices)


@pytest.mark.parametrize(("gpu_type", "is_said"), [("xpu", True), ("cuda", False), (None, False)])
def test_gpus_that_lightning_does_not_look_for_are_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, small: Any, make_trainer: Any, make_loader: Any,
    gpu_type: str | None, is_said: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr("lightning_roundpipe.integration.checks.gpu_type", lambda: gpu_type)
    with caplog.at_level("INFO"):
        make_trainer(max_steps=1).fit(small(), make_loader())
    assert ("accelerators of type 'xpu'" in caplog.text) is is_said


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubDriver]:
    made = StubDriver()
    monkeypatch.setattr(gpu_driver, "driver_of", lambda device_type: made)
    yield made
    assert made.violations == []


@pytest.mark.parametrize("limit", [None, "1MiB"])
def test_a_fit_on_a_gpu_that_is_in_the_pool_twice(
    driver: StubDriver, small: Any, make_trainer: Any, make_loader: Any, assert_alike: Any, limit: str | None
) -> None:
    """Everything but the kernels is what runs on a GPU: lanes, streams, events, page-locked memory, books."""
    trainer = make_trainer(num_microbatches=4, options={"device_memory_limit": limit})
    strategy = trainer.strategy
    strategy.parallel_devices = [torch.device("cuda", 0)] * 2
    module = small()
    fractions = []
    used: list[int] = []

    def on_train_batch_end(*args: Any) -> None:
        fractions.append(driver.user_fraction)
        assert all(isinstance(device, GpuDevice) for device in strategy.pool.devices)
        used[:] = [device.num_unit_runs for device in strategy.pool.devices]

    module.on_train_batch_end = on_train_batch_end
    trainer.fit(module, make_loader())
    assert len(used) == 2
    assert all(used), "a device of the pool had nothing to do"
    assert driver.locked == {}, "page-locked memory was left behind"
    assert driver.user_fraction == 1.0
    assert set(fractions) == ({1.0} if limit is None else {2 * 2**20 / driver.state.total})
    reference = small()
    make_trainer("plain").fit(reference, make_loader())
    assert_alike(dict(module.state_dict()), dict(reference.state_dict()))
