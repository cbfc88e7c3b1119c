"""Exceptions and interrupts: they arrive as they were raised, everything ends, and the next run is a fresh one."""

from __future__ import annotations

import _thread
import functools
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_roundpipe.engine.gate import Gate
from tests.support.parity import assert_alike, both, make_trainer
from tests.support.rows import compat

ROWS, BATCH, MICROBATCHES = 15, 5, 5
MARK = 100.0


class Injected(Exception):
    """What the tests raise."""


class Trap:
    """Where to raise, and what. Armed by a mark in the first column of one row of the data."""

    def __init__(self, place: str = "nowhere", action: Callable[[], Any] | None = None) -> None:
        self.place = place
        self.action = action

    def spring(self, place: str, x: Tensor) -> None:
        if place == self.place and bool((x.detach()[:, 0] == MARK).any()):
            if self.action is not None:
                self.action()
            else:
                raise Injected(f"in {place}")


class Tripped(torch.autograd.Function):
    """Identity whose backward may raise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, trap: Trap) -> Tensor:
        ctx.trap = trap
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.trap.spring("unit backward", ctx.saved_tensors[0])
        return gradient, None


class Layer(nn.Module):
    """A block that hands the first column on, so that the mark is seen everywhere."""

    def __init__(self, trap: Trap) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.trap = [trap]

    def forward(self, x: Tensor) -> Tensor:
        self.trap[0].spring("unit forward", x)
        x = Tripped.apply(x, self.trap[0])
        return torch.cat([x[:, :1], torch.tanh(self.linear(x[:, 1:]))], 1)


class Trapped(L.LightningModule):
    """Three layers that may raise, and user code that may."""

    def __init__(self, trap: Trap) -> None:
        super().__init__()
        self.trap = trap
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.layers = nn.Sequential(*(Layer(trap) for _ in range(3)))
            self.head = nn.Linear(4, 2)

    def user_code(self, x: Tensor) -> Tensor:
        self.trap.spring("user code", x)
        return self.head(self.layers(x)[:, 1:])

    def user_loss(self, batch: Any) -> Tensor:
        x, y = batch
        logits = self.user_code(x)
        self.trap.spring("loss", x)
        return F.cross_entropy(logits, y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.user_loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.trap.spring("validation", batch[0])
        self.log("val", self.user_loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def loader(*marked: int) -> DataLoader[Any]:
    """15 rows in batches of 5, which make micro-batches of one row; ``marked`` rows spring the trap."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 5, generator=generator)
    x[list(marked), 0] = MARK
    return DataLoader(TensorDataset(x, torch.randint(2, (ROWS,), generator=generator)), batch_size=BATCH)


def assert_clean(module: Any) -> None:
    """Nothing of a step is left on the module or in the process."""
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("roundpipe")]
    assert all("forward" not in child.__dict__ for child in module.modules())
    assert "log" not in module.__dict__
    assert type(module).__setattr__.__module__ == "torch.nn.modules.module"
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()


@functools.cache
def fresh_weights() -> dict[str, Tensor]:
    """Of a plain run that nothing has disturbed."""
    reference = Trapped(Trap())
    make_trainer("plain").fit(reference, loader())
    return dict(reference.state_dict())


def assert_next_fit_is_fresh(failed: Any) -> None:
    """A later fit of the module that failed, with the weights that a new one has, equals plain Lightning's."""
    assert_clean(failed)
    failed.trap.place = "nowhere"
    failed.load_state_dict(Trapped(Trap()).state_dict())
    make_trainer(num_microbatches=MICROBATCHES).fit(failed, loader())
    assert_alike(dict(failed.state_dict()), fresh_weights())
    assert_clean(failed)


@functools.cache
def weights_after_one_step() -> dict[str, Tensor]:
    """Of a plain run whose second step fails."""
    reference = Trapped(Trap("loss"))
    with pytest.raises(Injected):
        make_trainer("plain").fit(reference, loader(BATCH + 2))
    return dict(reference.state_dict())


PLACES = {"unit forward": "forward", "loss": "user_loss", "unit backward": "backward"}


@pytest.mark.parametrize("place", PLACES)
def test_exceptions_in_training(place: str) -> None:
    """In the second step: the first one, and all other places, are in tests/engine/test_engine_invariants.py."""
    ours, trainer = Trapped(Trap(place)), make_trainer(num_microbatches=MICROBATCHES)
    with pytest.raises(Injected) as caught:
        trainer.fit(ours, loader(BATCH + 2))
    assert type(caught.value) is Injected
    assert str(caught.value) == f"in {place}"
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert PLACES[place] in frames
    assert frames[-1] == "spring"
    assert trainer.interrupted
    assert trainer.global_step == 1
    assert_alike(dict(ours.state_dict()), weights_after_one_step())
    assert_next_fit_is_fresh(ours)


def test_exceptions_in_every_microbatch() -> None:
    module = Trapped(Trap("unit forward"))
    with pytest.raises(Injected, match="in unit forward"):
        make_trainer(num_microbatches=MICROBATCHES).fit(module, loader(*range(BATCH, 2 * BATCH)))
    assert_next_fit_is_fresh(module)


@pytest.mark.parametrize(("place", "entry", "microbatch"), [("unit forward", "fit", 4), ("validation", "validate", 0)])
def test_exceptions_in_validation(place: str, entry: str, microbatch: int) -> None:
    module = Trapped(Trap(place))
    trainer = make_trainer(num_microbatches=MICROBATCHES)
    marked = loader(BATCH + microbatch)
    with pytest.raises(Injected, match=f"in {place}") as caught:
        trainer.fit(module, loader(), marked) if entry == "fit" else trainer.validate(module, marked)
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert "validation_step" in names
    assert_next_fit_is_fresh(module)


@pytest.mark.parametrize("hook", ["configure_model", "configure_optimizers", "on_before_backward"])
def test_exceptions_in_hooks(hook: str) -> None:
    def fail(*args: Any) -> Any:
        if module.trap.place == "hook":
            raise Injected(hook)
        return original(*args)

    module = Trapped(Trap("hook"))
    original = getattr(module, hook)
    setattr(module, hook, fail)
    with pytest.raises(Injected, match=hook):
        make_trainer().fit(module, loader())
    assert_next_fit_is_fresh(module)


@compat("Callback hook", "on_exception")
def test_cause_and_callback() -> None:
    """The exception object itself arrives, its cause with it, and ``on_exception`` sees it once."""

    def action() -> None:
        try:
            raise ZeroDivisionError("below")
        except ZeroDivisionError as error:
            raise Injected("above") from error

    class Listens(L.Callback):
        def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
            heard.append(exception)

    heard: list[BaseException] = []
    with pytest.raises(Injected, match="above") as caught:
        make_trainer(num_microbatches=MICROBATCHES, callbacks=[Listens()]).fit(
            Trapped(Trap("unit forward", action)), loader(7)
        )
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert heard == [caught.value]


def test_same_trainer_after_an_exception() -> None:
    def act(kind: str) -> Any:
        trainer, module = make_trainer(kind, num_microbatches=MICROBATCHES), Trapped(Trap())
        with pytest.raises(Injected):
            trainer.fit(Trapped(Trap("unit forward")), loader(2))
        trainer.fit(module, loader())
        return trainer.global_step, dict(module.state_dict())

    both(act)


def test_stop_iteration_ends_the_epoch_as_in_plain() -> None:
    def action() -> None:
        raise StopIteration

    modules = []

    def act(kind: str) -> Any:
        modules.append(Trapped(Trap("user code", action)))
        trainer = make_trainer(kind, max_epochs=2, num_microbatches=MICROBATCHES)
        trainer.fit(modules[-1], loader(7))
        return trainer.global_step, trainer.current_epoch, dict(modules[-1].state_dict())

    assert both(act)[:2] == (2, 2)
    assert_next_fit_is_fresh(modules[-1])


@pytest.fixture
def restored_signals() -> Iterator[None]:
    """Lightning ignores further SIGINTs after the first."""
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    yield
    signal.signal(signal.SIGINT, before)


INTERRUPTS: dict[str, Callable[[], None]] = {
    "interrupt_main": _thread.interrupt_main,
    "pthread_kill": lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT),
    "raise_signal": lambda: signal.raise_signal(signal.SIGINT),
}


@pytest.mark.usefixtures("restored_signals")
@pytest.mark.parametrize(
    ("how", "place", "row"),
    [
        *((how, "unit forward", 7) for how in INTERRUPTS),
        ("pthread_kill", "unit backward", 0),
        ("pthread_kill", "loss", 7),
    ],
)
def test_ctrl_c_while_a_step_runs(monkeypatch: pytest.MonkeyPatch, how: str, place: str, row: int) -> None:
    noticed = threading.Event()
    abort = Gate.abort

    def noticing(self: Gate) -> None:
        abort(self)
        noticed.set()

    monkeypatch.setattr(Gate, "abort", noticing)

    def action() -> None:
        if noticed.is_set():  # a thread that should have ended must not interrupt the tests after this one
            return
        INTERRUPTS[how]()
        # The step goes on until the main thread has seen the interrupt: it cannot end before.
        assert noticed.wait(30), "the main thread did not notice the interrupt"

    heard: list[BaseException] = []

    class Listens(L.Callback):
        def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
            heard.append(exception)

    module = Trapped(Trap(place, action))
    trainer = make_trainer(num_microbatches=MICROBATCHES, callbacks=[Listens()])
    # Lightning turns Ctrl-C into an orderly exit of the process.
    with pytest.raises(SystemExit) as caught:
        trainer.fit(module, loader(row))
    assert caught.value.code == 1
    assert [type(exception) for exception in heard] == [KeyboardInterrupt]
    assert trainer.interrupted
    assert_next_fit_is_fresh(module)


@pytest.mark.usefixtures("restored_signals")
@pytest.mark.parametrize(
    ("place", "error", "code"),
    [
        ("unit backward", SystemExit, 7),
        ("validation", SystemExit, 7),
        ("unit forward", KeyboardInterrupt, 1),
    ],
)
def test_exits_and_interrupts_raised_by_user_code(place: str, error: type[BaseException], code: int) -> None:
    def action() -> None:
        raise error(7)

    for kind in ("plain", "roundpipe"):
        module = Trapped(Trap(place, action))
        with pytest.raises(SystemExit) as caught:
            make_trainer(kind, num_microbatches=MICROBATCHES).fit(module, loader(7), loader(7))
        assert caught.value.code == code
    assert_next_fit_is_fresh(module)
