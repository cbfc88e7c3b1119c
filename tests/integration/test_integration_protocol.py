"""Real trainings keep the consistency protocol while updates overlap with the next step, and not without its waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_roundpipe.integration import pool
from lightning_roundpipe.integration.steps import misuse
from lightning_roundpipe.optimizer import buckets
from lightning_roundpipe.weights import futures, low_precision
from tests.support.engine.lazy_link import LazyLink
from tests.support.engine.protocol_checker import Event, ProtocolError, UnitState, following
from tests.support.parity import make_loader, make_trainer
from tests.support.small import Small

JOIN_S = 60.0
MakeTrainer = Callable[..., L.Trainer]
MakeLoader = Callable[..., Any]
WAYS = {"aliases": False, "lazy": True}


@pytest.fixture(autouse=True)
def every_weight_by_itself(small_updates: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates overlap however small they are, unit by unit; devices with copies make them when something waits."""
    monkeypatch.setattr(pool, "TimedLink", LazyLink)
    monkeypatch.setattr(misuse, "_NUM_SAMPLED_STEPS", 0)  # looks at all weights before a step, and so waits for all


def leave_out_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a look at a weight nor an upload of it waits for its update."""

    def __torch_function__(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with futures.unwaited():
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(futures.PendingParameter, "__torch_function__", classmethod(__torch_function__))
    monkeypatch.setattr(low_precision, "await_update", lambda weight: None)


class Held:
    """Holds updates back until they are let go.

    Args:
        is_held: tells of the weights of a bucket whether it waits.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, is_held: Callable[[list[Tensor]], bool]) -> None:
        self.let_go = threading.Event()
        step = buckets.Bucket.step

        def held_step(bucket: Any) -> None:
            if is_held(list(bucket._shadows)):
                assert self.let_go.wait(JOIN_S)
            step(bucket)

        monkeypatch.setattr(buckets.Bucket, "step", held_step)


class LetGo(L.Callback):
    """Lets updates go in one hook of each step, and when the training ends; each new update is held again, but for the
    first one, which makes the state of the optimizer and is waited for."""

    def __init__(self, held: Held, hook: str | None) -> None:
        self._held = held
        if hook is not None:
            setattr(self, hook, self._go)

    def _go(self, *args: Any, **kwargs: Any) -> None:
        self._held.let_go.set()

    def on_before_optimizer_step(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step and not trainer.is_last_batch:  # the last update of an epoch is waited for
            self._held.let_go.clear()
        else:
            self._held.let_go.set()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self._held.let_go.set()

    def on_exception(self, *args: Any, **kwargs: Any) -> None:
        self._held.let_go.set()


def values_of(module: L.LightningModule) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def assert_equal(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize(
    ("way", "settings"),
    [
        ("aliases", {}),
        ("lazy", {"precision": "bf16-mixed"}),
        ("lazy", {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}),
    ],
    ids=["aliases", "lazy, low", "lazy, clipped and accumulated"],
)
def test_a_training_keeps_the_protocol(way: str, settings: dict[str, Any]) -> None:
    class Validated(Small):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("validated", self.loss(batch))

    trained = {}
    for mode in ("off", "exact"):
        module, loader = Validated(), make_loader()
        options = {"optimizer_overlap": mode, "virtual_copies": WAYS[way]}
        with following() as checker:
            make_trainer(options=options, max_epochs=2, **settings).fit(module, loader, loader)
        trained[mode] = values_of(module)
    assert_equal(trained["exact"], trained["off"])
    seen = {event for event in Event if checker.counts[event]}
    unseen = {Event.NOT_UPDATED} if way == "lazy" else {Event.NOT_UPDATED, Event.UPLOAD}
    assert seen == set(Event) - unseen - (set() if "precision" in settings and way == "lazy" else {Event.REFRESH})
    num_updates = 2 * (2 if "accumulate_grad_batches" in settings else 3)
    assert checker.counts[Event.UPDATE] == checker.counts[Event.UPDATED] == num_updates * len(trained["off"])
    assert checker.counts[Event.TAKE] == checker.counts[Event.DOWNLOAD]
    # Nothing is left to be done: with accumulation an update follows the last batch, too.
    left = {state for weight in module.parameters() for state in checker.states_of(weight)}
    assert left <= {UnitState.MASTER_UPDATED, UnitState.COPY_REFRESHED}


@pytest.mark.filterwarnings("ignore:optimizer_overlap='stale'")
@pytest.mark.parametrize(("way", "precision"), [("aliases", "32-true"), ("lazy", "bf16-mixed")])
def test_a_stale_training_keeps_the_protocol(way: str, precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates are held until a whole forward has run, with snapshots."""

    class Watched(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            seen.append({state for weight in self.parameters() for state in checker.states_of(weight)})
            held.let_go.set()
            return loss

    module, seen = Watched(), []
    held = Held(monkeypatch, lambda weights: True)
    options = {"optimizer_overlap": "stale", "virtual_copies": WAYS[way]}
    with following() as checker:
        callbacks = [LetGo(held, None)]
        trainer = make_trainer(options=options, num_microbatches=1, callbacks=callbacks, precision=precision)
        trainer.fit(module, make_loader())
    assert [UnitState.UPDATING in states for states in seen] == [False, False, True]
    assert checker.counts[Event.UPDATED] == 3 * len(list(module.parameters()))


def test_the_next_forward_begins_before_the_last_update_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The update of the head is held until the first block of the next forward has run."""

    class Watched(Small):
        def forward(self, x: Tensor) -> Tensor:
            x = self.body[0](x)
            seen.append(UnitState.UPDATING in checker.states_of(self.head.weight))
            held.let_go.set()
            for block in self.body[1:]:
                x = block(x)
            return self.head(x)

    seen: list[bool] = []
    module, plain = Watched(), Small()
    held = Held(monkeypatch, lambda weights: any(weight is module.head.weight for weight in weights))
    with following() as checker:
        make_trainer(callbacks=[LetGo(held, None)], num_microbatches=1).fit(module, make_loader())
    assert seen == [False, False, True]
    make_trainer(options={"optimizer_overlap": "off"}, num_microbatches=1).fit(plain, make_loader())
    assert_equal(values_of(module), values_of(plain))


@pytest.mark.parametrize("way", WAYS)
def test_without_its_wait_a_pending_weight_is_noticed_by_the_checker(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out_the_wait(monkeypatch)
    held = Held(monkeypatch, lambda weights: True)
    trainer = make_trainer(options={"virtual_copies": WAYS[way]}, callbacks=[LetGo(held, "on_before_backward")])
    what = "uploading it" if way == "lazy" else "running it on a device"
    message = f"unit '.*': {what}, during 'updating': an upload waits for the refresh"
    with pytest.raises(ProtocolError, match=message), following():
        trainer.fit(Small(), make_loader())


def test_a_failed_step_breaks_no_rule() -> None:
    class Failing(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            if batch_idx == 1 and self.fails:
                loss.register_hook(fail)
            return loss

    def fail(gradient: Tensor) -> None:
        raise RuntimeError("a failure in the backward")

    module, options = Failing(), {"virtual_copies": True}
    with following() as checker:
        module.fails = True
        with pytest.raises(RuntimeError, match="in the backward"):
            make_trainer(options=options).fit(module, make_loader())
        module.fails = False
        make_trainer(options=options).fit(module, make_loader())
    assert checker.counts[Event.UPDATED] == 4 * len(list(module.parameters()))
