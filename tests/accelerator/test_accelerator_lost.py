"""Simulated GPUs that are lost in the middle of a training, wherever the driver says so first."""

from __future__ import annotations

import contextlib
import gc
import threading
from types import ModuleType
from typing import Any

import lightning as L
import pytest
import torch

from lightning_roundpipe.devices.device import DeviceLostError
from lightning_roundpipe.devices.gpu.device import GpuDevice
from tests.support.parity import fit, make_loader
from tests.support.small import Small

pytestmark = pytest.mark.accelerator


class Losing(L.Callback):
    """A GPU is lost some operations after the beginning of a training batch.

    Args:
        after: how many operations.
    """

    def __init__(self, sim: ModuleType, gpu: int, after: int, **options: str) -> None:
        self.sim, self.gpu, self.after, self.options = sim, gpu, after, options
        self.opened = contextlib.ExitStack()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.opened.enter_context(self.sim.losing(self.gpu, self.after, **self.options))


def train(losing: Losing, devices: list[int]) -> None:
    with losing.opened:
        fit(
            "roundpipe",
            Small,
            make_loader(40),
            callbacks=[losing],
            accelerator="roundpipe",
            devices=devices,
            num_microbatches=4,
        )


@pytest.mark.parametrize(
    ("gpu", "after"),
    [(0, 0), (1, 1), (0, 5), (1, 23), (0, 60), (1, 111), (0, 171), (1, 260), (0, 390), (1, 510)],
)
def test_a_training_that_loses_a_gpu_ends_and_leaves_nothing(sim: ModuleType, gpu: int, after: int) -> None:
    threads = threading.active_count()
    with pytest.raises(
        DeviceLostError, match=rf"training_step has lost GPU {gpu} \(CUDA error: uncorrectable ECC error"
    ):
        train(Losing(sim, gpu, after), [0, 1])
    assert threading.active_count() == threads
    gc.collect()
    assert sim.memory_allocated(1 - gpu) == 0


def test_both_devices_of_a_gpu_are_lost_with_it(sim: ModuleType) -> None:
    with pytest.raises(DeviceLostError, match=r"has lost device 1 on GPU 1 .*, device 2 on GPU 1 "):
        train(Losing(sim, 1, 40), [0, 1, 1])


@pytest.mark.parametrize("after", [3, 50, 140, 260])
def test_a_gpu_that_a_kernel_of_the_user_has_stopped_is_not_lost(sim: ModuleType, after: int) -> None:
    """It would happen again on the next one: the error of the driver ends the training."""
    error = "an illegal memory access was encountered"
    losing = Losing(sim, 0, after, error=error)
    with pytest.raises(RuntimeError, match=f"^CUDA error: {error}") as caught:
        train(losing, [0, 1])
    assert type(caught.value) is not DeviceLostError


def test_an_error_of_an_operator_is_the_users(sim: ModuleType) -> None:
    class Wrong(Small):
        def loss(self, batch: Any) -> Any:
            x, y = batch
            return torch.nn.functional.nll_loss(self(x), y + 100)

    with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
        fit("roundpipe", Wrong, make_loader(), accelerator="roundpipe", devices=[0, 1], num_microbatches=4)


def test_a_lost_device_is_closed_without_an_error(sim: ModuleType, device: GpuDevice) -> None:
    kept = [torch.ones(4, device="sim:0")]
    with sim.losing(0, 0):
        with pytest.raises(RuntimeError, match="uncorrectable ECC"):
            device.upload([torch.ones(4)], "x")
        assert device.free(kept) is None
        upload = device.upload([torch.ones(4)], "weights", is_bulk=True)
        device.check()
        assert device.lost == "CUDA error: uncorrectable ECC error encountered"
        device.close()
        with pytest.raises(RuntimeError, match="uncorrectable ECC"):
            upload.await_done()
        device.open()
    device.lost = None
