"""Activations that go up to GPUs of the stub: from page-locked memory, in the order in which they lie there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lightning_roundpipe.devices.gpu import GpuDevice
from lightning_roundpipe.devices.gpu_lanes import GpuTransfer
from lightning_roundpipe.devices.transfer import Edge
from tests.support.engine.gpu_stub import StubDriver

MIB = 2**20


@pytest.fixture
def driver() -> StubDriver:
    return StubDriver()


@pytest.fixture
def device(driver: StubDriver) -> Iterator[GpuDevice]:
    made = GpuDevice(0, 0, driver=driver)
    made.open()
    yield made
    made.close()
    made.dispose()
    assert driver.violations == []
    assert driver.locked == {}


def test_activations_go_through_page_locked_buffers(device: GpuDevice, driver: StubDriver) -> None:
    """What they lay in may change at once, and what lies in a buffer already is not copied again."""
    copies: list[Tensor] = []
    copy = driver.copy
    driver.copy = lambda there, source: copies.append(source) or copy(there, source)  # type: ignore[method-assign, func-returns-value]
    source = torch.randn(MIB)
    values = source.clone()
    transfer = device.upload([source], "x")
    source.zero_()
    assert torch.equal(transfer.wait(Edge.INPUTS)[0], values)
    assert driver.is_page_locked(copies[0])
    kept = device.keep(values)
    device.upload(kept.tensors, "x", after=kept)
    assert copies[1].data_ptr() == kept.tensors[0].data_ptr()
    assert driver.is_page_locked(copies[1])


def test_tensors_in_another_order_of_memory_are_copied_as_they_lie(device: GpuDevice, driver: StubDriver) -> None:
    """A copy of a tensor that is not contiguous would go through ordinary memory."""
    source = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    for transfer in (device.upload([source], "x"), device.download([source], "y")):
        assert isinstance(transfer, GpuTransfer)
        assert all(tensor.dim() == 1 for pair in transfer.pairs for tensor in pair)
        (found,) = transfer.wait(Edge.INPUTS)
        assert found.stride() == source.stride()
        assert torch.equal(found, source)
