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
from tests.support.parity import assert_alike, fit, make_loader
from tests.support.small import Small

pytestmark = pytest.mark.accelerator


class Losing(L.Callback):
    """A GPU is lost some operations after the beginning of a training batch.

    Attributes:
        losses: number of the batch -> GPU, and after how many operations.
    """

    def __init__(self, sim: ModuleType, gpu: int, after: int, batch: int = 1, **options: str) -> None:
        self.losses = {batch: (gpu, after)}
        self.sim, self.options = sim, options
        self.opened = contextlib.ExitStack()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in self.losses:
            self.opened.enter_context(self.sim.losing(*self.losses[batch_idx], **self.options))


@pytest.fixture(scope="module")
def expected() -> Any:
    return fit("plain", Small, make_loader(40)).results


def train(losing: Losing, devices: list[int]) -> Any:
    with losing.opened:
        return fit(
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
def test_training_on_the_other_gpu_is_the_same(sim: ModuleType, expected: Any, gpu: int, after: int) -> None:
    losing = Losing(sim, gpu, after)
    with pytest.warns(UserWarning, match=f"training_step has lost GPU {gpu} .*uncorrectable ECC error.*on 1 device"):
        run = train(losing, [0, 1])
    assert_alike(run.results, expected)
    assert [device.torch_device.index for device in run.trainer.strategy.pool.devices] == [1 - gpu]
    del run
    gc.collect()
    assert sim.memory_allocated(1 - gpu) == 0


def test_both_devices_of_a_gpu_are_lost_with_it(sim: ModuleType, expected: Any) -> None:
    with pytest.warns(UserWarning, match="has lost device 1 on GPU 1 .*, device 2 on GPU 1 .* on 1 device"):
        run = train(Losing(sim, 1, 40), [0, 1, 1])
    assert_alike(run.results, expected)


def test_with_the_last_gpu_the_training_ends(sim: ModuleType) -> None:
    threads = threading.active_count()
    with pytest.raises(DeviceLostError, match=r"lost GPU 0 \(CUDA error: uncorrectable ECC.*No other device is left"):
        train(Losing(sim, 0, 40), [0])
    assert threading.active_count() == threads


def test_training_goes_on_until_no_gpu_is_left(sim: ModuleType) -> None:
    losing = Losing(sim, 2, 30)
    losing.losses.update({2: (0, 80), 4: (1, 0)})
    with (
        pytest.warns(UserWarning, match="has lost GPU 2 .* on 2 devices"),
        pytest.warns(UserWarning, match="has lost GPU 0 .* on 1 device"),
        pytest.raises(DeviceLostError, match=r"lost GPU 1 .*\. No other device is left"),
    ):
        train(losing, [0, 1, 2])


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
