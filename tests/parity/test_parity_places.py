"""What models mean by *the device*: tensors that units make once and keep, devices that are passed on or remembered,
``self.device``, lengths on the host. On one GPU of plain Lightning all of these agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.parity.driver import assert_parity, train
from tests.support.models import WIDTH, Block, Chain, Regression, padded_sequences, vectors


class Scaled(Block):
    """Scales its input by something that a subclass makes where the input is."""

    def made(self, x: Tensor) -> Tensor:
        return torch.linspace(0.5, 1.0, x.shape[1], device=x.device)

    def scale(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale(x))


class KeepsATensor(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.kept: Tensor | None = None

    def scale(self, x: Tensor) -> Tensor:
        if self.kept is None or len(self.kept) < x.shape[1]:
            self.kept = self.made(x)
        return self.kept


class KeepsSeveral(Scaled):
    def scale(self, x: Tensor) -> Tensor:
        if not hasattr(self, "kept"):
            self.kept = (self.made(x), {"more": [self.made(x) / 2]})
        return self.kept[0] + self.kept[1]["more"][0]


class KeepsByAFlag(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def scale(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.length:
            self.length = x.shape[1]
            self.kept = self.made(x)
        return self.kept


class ReplacesWhatItKeeps(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.on_device: Tensor | None = None

    def scale(self, x: Tensor) -> Tensor:
        if self.on_device is None or self.on_device.device != x.device:
            self.on_device = self.made(x)
        return self.on_device


class RegistersABuffer(Scaled):
    def scale(self, x: Tensor) -> Tensor:
        if not hasattr(self, "kept"):
            self.register_buffer("kept", self.made(x))
        return self.kept


class RegistersByAFlag(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.has_made = False

    def scale(self, x: Tensor) -> Tensor:
        if not self.has_made:
            self.register_buffer("kept", self.made(x), persistent=False)
            self.has_made = True
        return self.kept


class FillsABufferThatIsThere(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", None)

    def scale(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = self.made(x)
        return self.kept


class RegistersAnew(Scaled):
    def scale(self, x: Tensor) -> Tensor:
        self.register_buffer("kept", self.made(x))
        return self.kept


class RemembersTheDevice(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.place: torch.device | None = None

    def scale(self, x: Tensor) -> Tensor:
        if self.place is None:
            self.place = x.device
        return torch.linspace(0.5, 1.0, x.shape[1], device=self.place)


class KnowsItsDevice(L.LightningModule):
    """A block that is a LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: Tensor) -> Any:
        return self.inner(x * torch.linspace(0.5, 1.0, x.shape[1], device=self.device))


class Moved(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.anchors = torch.linspace(0.5, 1.0, WIDTH)
        self.place = torch.device("cpu")

    def scale(self, x: Tensor) -> Tensor:
        return self.anchors + torch.zeros(WIDTH, device=self.place)


class MovedInAHook(Chain):
    """Whose hook brings to the device what Lightning does not."""

    def __init__(self) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList(Moved() for _ in range(4))

    def on_train_start(self) -> None:
        for block in self.blocks:
            block.anchors = block.anchors.to(self.device)
            block.place = self.device


class Told(Block):
    def forward(self, x: Tensor, device: torch.device | None = None) -> Tensor:
        return super().forward(x * torch.linspace(0.5, 1.0, x.shape[1], device=device))


class PassesTheDeviceOn(Regression):
    """That of the batch, which is the host, and that of what units have given."""

    def __init__(self) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList(Told() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        of_batch = x.device
        x = self.stem(x)
        for i, block in enumerate(self.blocks):
            x = block(x, x.device) if i % 2 else block(x, device=of_batch)
        return self.head(x)


class SetsTheDevice(Chain):
    """An attribute of blocks, from outside."""

    def __init__(self) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList(RemembersTheDevice() for _ in range(4))

    def run_block(self, block: nn.Module, x: Tensor) -> Tensor:
        if block.place is None:
            block.place = x.device
        return super().run_block(block, x)


class Packs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        outputs, _ = pad_packed_sequence(self.recurrent(packed)[0], batch_first=True, total_length=x.shape[1])
        return outputs


class LengthsOnTheHost(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, WIDTH)
        self.first, self.second = Packs(), Packs()
        self.head = nn.Linear(WIDTH, 2)

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Any:
        x, y, lengths = batch
        for packs in (self.first, self.second):
            x = packs(self.stem(x) if x.shape[-1] == 4 else x, lengths.cpu())
        return F.mse_loss(self.head(x.sum(1)), y)


def chain_of(block: Callable[[], nn.Module]) -> Callable[[], L.LightningModule]:
    def make() -> L.LightningModule:
        module = Chain(0)
        module.blocks = nn.ModuleList(block() for _ in range(4))
        return module

    return make


BLOCKS: list[Callable[[], nn.Module]] = [
    KeepsATensor,
    KeepsSeveral,
    KeepsByAFlag,
    ReplacesWhatItKeeps,
    RemembersTheDevice,
    KnowsItsDevice,
]
WITH_BUFFERS = [RegistersABuffer, RegistersByAFlag, FillsABufferThatIsThere, RegistersAnew]
MODELS: list[tuple[type[L.LightningModule], Callable[[], list[Any]]]] = [
    (MovedInAHook, vectors),
    (PassesTheDeviceOn, vectors),
    (SetsTheDevice, vectors),
    (LengthsOnTheHost, padded_sequences),
]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.__name__)
@pytest.mark.ways("lazy")
def test_blocks_that_keep_what_they_made(pipeline: dict[str, Any], block: Callable[[], nn.Module]) -> None:
    assert_parity(chain_of(block), vectors, **pipeline, min_calls=3)


@pytest.mark.parametrize("block", WITH_BUFFERS, ids=lambda block: block.__name__)
def test_blocks_that_make_a_buffer(pipeline: dict[str, Any], block: Callable[[], nn.Module]) -> None:
    """Weights that are shared with the host have buffers that are shared with it."""
    run = assert_parity(chain_of(block), vectors, **pipeline, min_calls=3)
    assert all(each.kept is not None for each in run.module.blocks)


@pytest.mark.parametrize(("model", "make_data"), [pytest.param(*entry, id=entry[0].__name__) for entry in MODELS])
@pytest.mark.ways("lazy")
def test_devices_that_models_name(
    pipeline: dict[str, Any], model: type[L.LightningModule], make_data: Callable[[], list[Any]]
) -> None:
    assert_parity(model, make_data, **pipeline, min_calls=3)


class FullPrecisionLoss(Chain):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        x, y = batch
        low = self(x)
        assert low.dtype == torch.bfloat16
        with torch.autocast(self.device.type, enabled=False):
            outputs = low.float() @ torch.eye(2, device=self.device)
            assert outputs.dtype == torch.float32
        return F.mse_loss(outputs, y)


@pytest.mark.ways("lazy")
def test_autocast_of_the_module_s_device_is_switched_off(pipeline: dict[str, Any]) -> None:
    run = train(FullPrecisionLoss, vectors, **pipeline, trainer_options={"precision": "bf16-mixed"})

    assert min(run.watch.num_calls) >= 3
