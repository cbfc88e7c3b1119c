"""What user code moves between the host and GPUs, on simulated ones: nothing of it holds up the threads of others."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_roundpipe.usercode.lock import UserCodeLock, UserCodeState
from tests.support.huggingface import Task, causal
from tests.support.huggingface import batches as token_batches
from tests.support.identical import assert_identical
from tests.support.parity import KINDS, Run, assert_alike, fit

pytestmark = pytest.mark.accelerator

WIDTH, CLASSES, LENGTH, ROWS = 8, 5, 6, 12
# The first step records, the second one is the first by plan.
NUM_STEPS, FIRST_STEADY = 5, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return torch.tanh(self.inner(x) + sum(others))


class Classifier(L.LightningModule):
    """Labels on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def between(self, x: Tensor, block: nn.Module) -> Tensor:
        return block(x)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = self.between(x, block)
        return self.head(x)  # type: ignore[no-any-return]

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return self.loss(self(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Residual(Classifier):
    """Between units that may be on two devices."""

    def between(self, x: Tensor, block: nn.Module) -> Tensor:
        return x + block(x)


class RotaryTable(Classifier):
    """On the host; angles that are the same for all units, and labels that are moved by hand."""

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(LENGTH), 0.5 ** torch.arange(WIDTH))
        x = self.stem(x) * angles.cos()
        for block in self.blocks:
            x = block(x, angles.sin().to(x.device))
        return self.head(x)  # type: ignore[no-any-return]

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        labels = labels.to(logits.device)
        labels[labels == 0] = 1
        return super().loss(logits, labels)


class LooseParameters(Classifier):
    """A small one for all units, a part of one, one that is changed on the host first, a scalar, and a large one."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(WIDTH))
        self.position = nn.Parameter(torch.randn(3 * LENGTH, WIDTH))
        self.scale = nn.Parameter(torch.tensor(0.1))
        self.mix = nn.Parameter(torch.randn(WIDTH))
        self.table = nn.Parameter(torch.randn(2**15, WIDTH))

    def between(self, x: Tensor, block: nn.Module) -> Tensor:
        return block(x * self.gate) * self.mix.softmax(-1) * self.scale.exp()  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.embedding(x, self.table[:CLASSES]).mean() + self.position[:LENGTH].to(x).sum()


class OwnFunction(torch.autograd.Function):
    """Of the user; its backward gives a gradient where it has computed it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).flatten(0, -2).sum(0)


class FunctionOfTheUser(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(WIDTH))

    def between(self, x: Tensor, block: nn.Module) -> Tensor:
        return OwnFunction.apply(block(x), self.gate)  # type: ignore[no-any-return, no-untyped-call]


class ReadsOnTheHost(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))
        self.seen: list[float] = []

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        loss = super().loss(logits, labels)
        self.total.add_(loss.detach() * len(labels))
        value = loss.detach()
        if value > 0 and float(value) == loss.item():
            self.seen.append(value.tolist())
        rows = logits.detach().cpu().argmax(-1).numpy()
        assert rows.shape == labels.shape
        return loss * torch.tensor([1.0, 3.0], device=logits.device).mean()


class SecondHead(Classifier):
    """What goes through the host, with its graph."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return (
            super().loss(logits, labels)
            + logits.cpu().square().mean().to(logits)
            + logits.to("cpu", torch.float64).mean()
        )


class RecordedByHooks(Classifier):
    """Hooks on units change what goes in and out, and record for the loss what was on other devices."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[Tensor] = []
        self.blocks[0].register_forward_hook(lambda module, args, output: output * 2)
        self.blocks[1].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        self.blocks[2].register_forward_hook(self.record)

    def record(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        self.recorded = [args[0], output]

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().loss(logits, labels) + sum(x.square().mean() for x in self.recorded)


class MadeWeights(Classifier):
    """One unit makes the weights of others."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.randn(WIDTH))
        self.maker = nn.Linear(WIDTH, WIDTH * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made = self.maker(self.code).view(WIDTH, WIDTH)
        x = self.stem(x)
        for block in self.blocks:
            x = functional_call(block, {"inner.weight": made + block.inner.weight}, x)
        return self.head(x)  # type: ignore[no-any-return]


MODELS: list[Callable[[], Classifier]] = [
    Classifier, Residual, RotaryTable, LooseParameters, FunctionOfTheUser, ReadsOnTheHost, SecondHead, RecordedByHooks,
    MadeWeights,
]  # fmt: skip


class Watch(L.Callback):
    """Notes what holds up a thread in steady steps: what, the name of the thread, its stack."""

    def __init__(self) -> None:
        self.is_steady = False
        self.held_up: list[str] = []

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        # In the steps 4, 8, ... units are compared with their recomputation.
        self.is_steady = batch_idx >= FIRST_STEADY and bool((batch_idx + 1) & batch_idx)

    def note(self, kind: str, text: str) -> None:
        name = threading.current_thread().name
        if self.is_steady and kind in ("blocking_copies", "item_syncs") and "h2d" not in name:
            stack = "".join(traceback.format_stack(limit=14)[:-1])
            self.held_up.append(f"{kind}: {text}, on {name}\n{stack}")


@pytest.fixture
def watch() -> Iterator[Watch]:
    made = Watch()
    torch.sim.reset_stats()  # type: ignore[attr-defined]
    torch.sim.on_report(made.note)  # type: ignore[attr-defined]
    yield made
    torch.sim.on_report(None)  # type: ignore[attr-defined]


def batches() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randint(CLASSES, (NUM_STEPS * ROWS, LENGTH), generator=generator) for _ in range(2))
    return DataLoader(TensorDataset(x, y), batch_size=ROWS)


def train(make: Callable[[], Classifier], kind: str, *callbacks: L.Callback, devices: Any = 2) -> Run:
    return fit(kind, make, batches(), callbacks=callbacks, **_options(kind, devices))


@functools.cache
def trained(make: Callable[[], Classifier], kind: str) -> Run:
    """Once for all tests."""
    return train(make, kind)


def _options(kind: str, devices: Any) -> dict[str, Any]:
    if kind != "roundpipe":
        return {}
    options = {"check_split": "off"}  # steps that are only tried would count
    return {"accelerator": "roundpipe", "devices": devices, "num_microbatches": 3, "options": options}


# Two devices on one GPU and a third one on another, for all; the others for what goes between most devices.
CASES = [
    *((make, [0, 1, 0]) for make in MODELS),
    *((make, devices) for make in (Residual, LooseParameters) for devices in ([0, 0], [0, 1, 0, 1])),
]


@pytest.mark.parametrize(("make", "devices"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_no_thread_of_user_code_is_held_up_in_a_steady_step(
    make: Callable[[], Classifier], devices: list[int], watch: Watch
) -> None:
    expected = trained(make, "plain")
    found = train(make, "roundpipe", watch, devices=devices)
    assert_alike(found.watch.losses, expected.watch.losses)
    assert_alike(found.state, expected.state)
    assert watch.held_up == []
    assert torch.sim.stats()["races"] == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("make", [Residual, LooseParameters], ids=lambda make: make.__name__)
def test_results_are_the_same_in_every_run_bit_for_bit(make: Callable[[], Classifier]) -> None:
    assert_identical(train(make, "roundpipe").results, trained(make, "roundpipe").results)


def test_gradients_of_small_parameters_do_not_depend_on_the_devices() -> None:
    """Which use was where is a matter of the plan, and that of measured costs."""
    first, second = trained(LooseParameters, "roundpipe"), train(LooseParameters, "roundpipe", devices=[0, 1, 2, 3])
    for one, other in zip(first.watch.gradients, second.watch.gradients, strict=True):
        for name in ("gate", "mix", "scale"):
            assert_identical(one[name], other[name])


class ReadsAValue(Classifier):
    """Reads a value of a device, and says when."""

    reading = threading.local()

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        self.reading.now = True
        self.read(logits.detach().sum())
        self.reading.now = False
        return super().loss(logits, labels)

    def read(self, value: Tensor) -> None:
        value.item()


class ReadsInAMessage(ReadsAValue):
    """A handler of ``logging`` has a lock of its own while it formats."""

    logger = logging.Logger("messages")

    def read(self, value: Tensor) -> None:
        self.logger.warning("%.3f", value)


class SelectsByAMask(ReadsAValue):
    """The host has to know how many there are."""

    def read(self, value: Tensor) -> None:
        values = value.expand(3)
        assert len(values[values == value]) == 3


@pytest.mark.parametrize("make", [ReadsAValue, ReadsInAMessage, SelectsByAMask], ids=lambda make: make.__name__)
def test_user_code_of_others_may_run_while_a_value_is_read(
    make: type[ReadsAValue], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for a thread that has a lock which they may want in their user code."""
    num_released = [0]
    released = UserCodeLock.released

    def noting(lock: UserCodeLock, state: UserCodeState) -> contextlib.AbstractContextManager[None]:
        num_released[0] += getattr(ReadsAValue.reading, "now", False)
        return released(lock, state)

    monkeypatch.setattr(UserCodeLock, "released", noting)
    monkeypatch.setattr(ReadsInAMessage.logger, "handlers", [logging.StreamHandler(io.StringIO())])
    train(make, "roundpipe")
    assert num_released[0] == (0 if make is ReadsInAMessage else 3 * NUM_STEPS)


def test_a_prefix_reaches_units_on_several_devices(watch: Watch) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)

    def make() -> Task:
        config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        torch.manual_seed(3)
        return Task(peft.get_peft_model(causal(), config))

    plain, found = (fit(kind, make, token_batches(), **_options(kind, [0, 1])) for kind in KINDS)
    assert_alike(found.watch.losses, plain.watch.losses)
    assert_alike(found.state, plain.state)
