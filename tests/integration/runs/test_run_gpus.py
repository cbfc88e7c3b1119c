"""Trainers with GPUs, on a machine that has none: which devices are taken."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_roundpipe import RoundPipeAccelerator, RoundPipeStrategy
from lightning_roundpipe.devices.gpu import driver as gpu_driver
from tests.support.parity import make_loader, make_trainer
from tests.support.small import Small


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
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, gpu_type: str | None, is_said: bool
) -> None:
    monkeypatch.setattr("lightning_roundpipe.integration.checks.gpu_type", lambda: gpu_type)
    with caplog.at_level("INFO"):
        make_trainer(max_steps=1).fit(Small(), make_loader())
    assert ("accelerators of type 'xpu'" in caplog.text) is is_said


@pytest.mark.parametrize(("gpu_type", "num_warnings"), [("cuda", 0), (None, 1)])
def test_lightning_does_not_call_gpus_unused_that_are_used(
    monkeypatch: pytest.MonkeyPatch, gpu_type: str | None, num_warnings: int
) -> None:
    monkeypatch.setattr(gpu_driver, "gpu_type", lambda: gpu_type)
    monkeypatch.setattr(CUDAAccelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = L.Trainer(accelerator=RoundPipeAccelerator(), devices=2, strategy=RoundPipeStrategy(), logger=False)
    assert sum("not used" in str(warning.message) for warning in caught) == num_warnings
    assert trainer.num_devices == 2
