"""What a micro-batch brings along to a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_roundpipe.devices.offload import TravellingActivations
from lightning_roundpipe.devices.transfer import Edge
from lightning_roundpipe.devices.virtual import VirtualDevice
from tests.support.engine.lazy_link import LazyLink


class Far(VirtualDevice):
    """Like a GPU of its own: no tensor of the host is local there."""

    def __init__(self, memory_limit: int | None = None) -> None:
        super().__init__(0, link=LazyLink(), memory_limit=memory_limit)
        self.torch_device = torch.device("meta")
        self.is_shared = False


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_user_code_has_changed_is_brought_anew(mode: Callable[[], Any]) -> None:
    """As the ids of a greedy decoder, which go to the embedding again and again."""
    device = Far()
    device.open()
    activations = TravellingActivations({}, {})
    activations.go_to(device)
    with mode():
        ids = torch.zeros(3, dtype=torch.long)
        for value in range(3):
            ids[value] = value
            activations.send([ids], "ids")
            (found,) = activations.receive([ids], Edge.INPUTS, "ids")
            torch.testing.assert_close(found, ids, rtol=0, atol=0)
            activations.settle()
    activations.clear()
    assert device.memory.used == 0
    device.close()


def test_what_has_not_changed_is_brought_once() -> None:
    device = Far()
    device.open()
    activations = TravellingActivations({}, {})
    activations.go_to(device)
    mask = torch.ones(3)
    for _ in range(3):
        activations.receive([mask], Edge.INPUTS, "mask")
        activations.settle()
    assert device.h2d.num_bytes == mask.nbytes
    device.close()


@pytest.mark.parametrize(("memory_limit", "ahead"), [(None, 12), (1000, 0)])
def test_what_is_booked_comes_ahead_only_where_there_is_no_limit(memory_limit: int | None, ahead: int) -> None:
    device = Far(memory_limit)
    device.open()
    activations = TravellingActivations({}, {})
    activations.go_to(device)
    x = torch.ones(3)
    activations.send([x], "x")
    assert device.h2d.num_bytes == device.memory.used == activations.booked_bytes == ahead
    activations.receive([x], Edge.INPUTS, "x")
    assert device.h2d.num_bytes == device.memory.used == activations.booked_bytes == 12
    activations.clear()
    assert device.memory.used == 0
    device.close()
