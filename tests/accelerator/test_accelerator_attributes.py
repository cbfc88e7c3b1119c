"""What units keep in plain attributes on simulated GPUs; that they train as in plain Lightning: tests/parity."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe.devices.gpu.device import GpuDevice
from lightning_roundpipe.weights.attributes import KeptAttributes, note_left, note_set
from tests.support.models import AllSteps
from tests.support.parity import make_loader, make_trainer
from tests.support.small import WIDTH

pytestmark = pytest.mark.accelerator

GPUS: dict[str, Any] = {"accelerator": "roundpipe", "devices": 2}


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = torch.linspace(0.5, 1.0, WIDTH, device=x.device)
        return torch.tanh(self.inner(x * self.kept))


class Changes(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        if self.kept is not None:
            self.kept.mul_(0.9)
        return super().forward(x)


class Refers(Keeps):
    """To a module that it does not own."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.other = [other]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.other[0].bias


def model_of(*blocks: nn.Module) -> AllSteps:
    model = AllSteps()
    model.body = nn.Sequential(*blocks)
    return model


def test_what_a_unit_keeps_serves_later_trainers() -> None:
    model = model_of(*[Keeps() for _ in range(4)])
    make_trainer(max_epochs=1, **GPUS).fit(model, make_loader())
    kept = model.body[0].kept

    make_trainer(**GPUS).test(model, make_loader())
    make_trainer(**GPUS).predict(model, make_loader())
    make_trainer(max_epochs=1, **GPUS).fit(model, make_loader())

    assert kept is not None
    assert kept.device.type == "cpu"
    assert model.body[0].kept is kept  # nothing has made it anew


def test_a_kept_tensor_that_is_changed_in_place_is_refused() -> None:
    model = model_of(*[Changes() for _ in range(4)])

    with pytest.raises(RuntimeError, match=r"unit 'body\.\d' changes a tensor in place .* \(one of 'kept'\)"):
        make_trainer(max_epochs=2, **GPUS).fit(model, make_loader())


@pytest.mark.skipif(not hasattr(BaseException, "add_note"), reason="notes on errors need Python 3.11")
def test_an_error_of_mixed_devices_in_a_unit_says_what_is_where() -> None:
    model = model_of(*[Keeps() for _ in range(4)])
    model.body.append(Refers(nn.Linear(1, WIDTH)))

    with pytest.raises(RuntimeError, match="same device") as caught:
        make_trainer(max_epochs=1, **GPUS).fit(model, make_loader())

    assert any("of unit 'body.4' are on one device" in note for note in caught.value.__notes__)


def test_only_what_was_noted_is_brought(device: GpuDevice) -> None:
    master, copy = nn.Module(), nn.Module()
    for module in (master, copy):
        module.__dict__.update(made=torch.ones(2), place=torch.device("cpu"), own=torch.ones(2), text="cpu")
    note_left(master, "made", torch.ones(2, device=device.torch_device))
    note_left(master, "own", torch.ones(2))
    note_set(master, "place", torch.device("cpu"))
    note_set(master, "text", "cpu")
    kept = KeptAttributes(device)

    kept.look([(master, copy)])
    kept.bring("attributes")
    there = dict(vars(copy))
    kept.drop()

    assert there["made"].device == there["place"] == device.torch_device
    assert there["own"].device.type == "cpu"
    assert there["text"] == "cpu"
    assert copy.made.device == copy.place == torch.device("cpu")
