"""A micro-batch in user code, whose thread is that of the test, and what the engine has of its step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lightning_roundpipe.devices.device import Device
from lightning_roundpipe.devices.offload import TravellingActivations
from lightning_roundpipe.usercode.implicit_transfers import ImplicitTransfers
from lightning_roundpipe.usercode.lock import UserCodeLock, UserCodeState
from lightning_roundpipe.usercode.loose_gradients import LooseGradients
from lightning_roundpipe.usercode.loose_parameters import LooseParameters
from lightning_roundpipe.weights.gradients import LOOSE, GradientStore


class UserCode:
    """User code, which is on the first of the devices."""

    def __init__(self, *devices: Device) -> None:
        self.devices = devices
        self.gradients = GradientStore()
        self.weights: list[nn.Parameter] = []
        self.parameters = LooseParameters(self.gradients, lambda: self.weights)
        self.lock = UserCodeLock((), lambda: False)
        self.state = UserCodeState(0, 0)
        self.state.lock = self.lock
        self.state.call_unit = lambda *args: None
        self.loose = LooseGradients()
        self.num_backwards = 0
        activations = TravellingActivations({}, {d.torch_device: d for d in devices})
        activations.go_to(devices[0])
        self.mode = ImplicitTransfers(lambda: devices[0], self.parameters, self.loose, activations)

    @contextlib.contextmanager
    def running(self) -> Iterator[UserCode]:
        """Inside a step, with the user-code lock."""
        for device in self.devices:
            device.open()
        self.lock.acquire(self.state)
        try:
            yield self
        finally:
            self.lock.release(self.state)
            self.parameters.drop()
            for device in self.devices:
                device.close()

    def use(self, master: nn.Parameter, device: int = 0, *, tracks: bool = True) -> Tensor:
        """A parameter on a device."""
        used = self.parameters.use(master, self.devices[device], self.state, self.loose, tracks=tracks)
        assert used is not None
        return used

    def backward(self, loss: Tensor) -> None:
        """As the engine does it."""
        self.loose.look_up([loss.grad_fn])
        self.loose.run_backward([loss], [torch.ones_like(loss)])
        if found := self.loose.take():
            self.gradients.add_later(*found, LOOSE, self.num_backwards)
            self.num_backwards += 1

    @property
    def uploaded(self) -> list[int]:
        """Bytes, by device."""
        return [device.h2d.num_bytes for device in self.devices]

    @property
    def downloaded(self) -> list[int]:
        """Bytes, by device."""
        return [device.d2h.num_bytes for device in self.devices]

    @property
    def booked(self) -> list[int]:
        """Bytes on the books, by device."""
        for device in self.devices:
            device.memory.try_reserve("weights", 0)  # finds what has left
        return [device.memory.used for device in self.devices]
