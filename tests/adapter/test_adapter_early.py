"""Updates that begin before the end of the backward, in whole trainings: nobody can tell but by the time they take.

The backward of the first block waits until the head has been updated, so that early updates are there in every run when
something happens in the first block, and behind the backward. Every training is compared bit by bit with one whose
updates do not overlap.
"""

from __future__ import annotations

import contextlib
import copy
import io
import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_roundpipe import misuse, overlap
from lightning_roundpipe.engine import early as engine_early
from lightning_roundpipe.engine import optimizer as engine_optimizer
from lightning_roundpipe.engine.early import EarlyWork
from lightning_roundpipe.engine.pending import PendingParameter
from lightning_roundpipe.planning import CallCost, CostProfile

_TIMEOUT_S = 60.0
_CALLS = (*(f"body.{i}.0" for i in range(4)), "head")
_NUM_AWAITED = 4  # weights of the fused stage: the last block and the head
Look = Callable[[L.Trainer, Any], Any]


class Arrivals:
    """Lets others wait until something has been done with the gradients of a weight.

    Attributes:
        num_offers: gradients that somebody took before the end of the backward.
        num_norms: that were asked for and had been taken early.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_offers = self.num_norms = 0
        self._seen: set[nn.Parameter] = set()
        self._changed = threading.Condition()
        take, known_norm = EarlyWork._take, EarlyWork.known_norm

        def noting(early: EarlyWork, offers: Any) -> None:
            take(early, offers)
            with self._changed:
                self.num_offers += len(offers)
                self._seen.update(parameter for masters, _ in offers for parameter in masters)
                self._changed.notify_all()

        def counting(early: EarlyWork, gradient: Tensor) -> Tensor | None:
            norm = known_norm(early, gradient)
            self.num_norms += norm is not None
            return norm

        monkeypatch.setattr(EarlyWork, "_take", noting)
        monkeypatch.setattr(EarlyWork, "known_norm", counting)

    def wait(self, weights: Sequence[nn.Parameter]) -> None:
        """Until early work on ``weights`` is done."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._seen.issuperset(weights), _TIMEOUT_S)

    def forget(self) -> None:
        """A new step begins."""
        with self._changed:
            self._seen.clear()


@pytest.fixture(autouse=True)
def arrivals(monkeypatch: pytest.MonkeyPatch) -> Arrivals:
    """Small weights are updated early as well, unit by unit, from the second step on."""
    monkeypatch.setattr(overlap, "MIN_BYTES", 0)
    monkeypatch.setattr(engine_optimizer, "SHARE_BYTES", 1)
    monkeypatch.setattr(engine_early, "SHARE_BYTES", 1)
    monkeypatch.setattr(misuse, "_NUM_SAMPLED_STEPS", 0)
    return Arrivals(monkeypatch)


@pytest.fixture(params=[False, True], ids=["aliases", "copies"])
def copies(request: pytest.FixtureRequest) -> bool:
    """Whether devices have a memory of their own."""
    return bool(request.param)


@pytest.fixture
def unknown_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows that hooks run between the last gradient and the step of the optimizer."""
    monkeypatch.setattr(overlap, "runs_in_between", lambda module: False)


def early_of(trainer: L.Trainer) -> EarlyWork:
    return trainer.strategy._updates._updates.early  # type: ignore[attr-defined, no-any-return]


class _Gate(torch.autograd.Function):
    """Calls something in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.call()
        return gradient, None


@pytest.fixture
def gated(small: Any, arrivals: Arrivals) -> type[Any]:
    """The small model. In its backward, before that of the first block, early work on the last stage is awaited."""

    class Gated(small):  # type: ignore[misc]
        calls = _CALLS
        fails = is_second = False

        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def awaited(self) -> list[nn.Module]:
            return [self.body[3], self.head]

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            arrivals.forget()

        def forward(self, x: Tensor) -> Tensor:
            x = _Gate.apply(self.body[0](x), self.gate)
            for block in self.body[1:]:
                x = block(x)
            return self.head(x)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("loss", loss)
            return loss

        def gate(self) -> None:
            early = early_of(self.trainer)
            if self.trainer.global_step >= 1 and early.is_open and not (early.is_mistaken or self.is_second):
                arrivals.wait([weight for module in self.awaited() for weight in module.parameters()])
            self.in_backward()

        def in_backward(self) -> None:
            """What a test does there."""

    return Gated


class Counts(L.Callback):
    """What has become of early updates, so far; and that no thread of theirs is there between steps."""

    def __init__(self, limit_bytes: int | None) -> None:
        self.kept = self.taken_back = 0
        self.is_mistaken = False
        self._limit_bytes = limit_bytes

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._limit_bytes is not None:
            trainer.strategy._updates.set_aside(self._limit_bytes)  # type: ignore[attr-defined]

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        early = early_of(trainer)
        self.kept = max(self.kept, early.num_kept)
        self.taken_back = max(self.taken_back, early.num_taken_back)
        self.is_mistaken |= early.is_mistaken
        assert not any(thread.name == "roundpipe-early" for thread in threading.enumerate())

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.on_train_batch_end(trainer)


Train = Callable[..., Counts]


@pytest.fixture
def train(make_trainer: Any, make_loader: Any, assert_alike: Any, arrivals: Arrivals) -> Train:
    """Trains without overlap and with it, compares every bit, and tells what has become of early updates."""

    def run(
        make_module: Callable[[], Any],
        callbacks: Callable[[], list[Any]] = list,
        *,
        raises: Any = None,
        limit_bytes: int | None = None,
        options: dict[str, Any] | None = None,
        plugins: Callable[[], list[Any]] = list,
        **kwargs: Any,
    ) -> Counts:
        found = []
        for mode in ("off", "exact"):
            torch.manual_seed(3)
            module, own, counts, ends = make_module(), callbacks(), Counts(limit_bytes), []
            costs = tuple(CallCost(name, 1.0, 2.0, weight_bytes=168, gradient_bytes=168) for name in module.calls)
            given = {
                "cost_profile": CostProfile(costs) if costs else None,
                **(options or {}),
                "optimizer_overlap": mode,
            }
            for error in (None,) if raises is None else (raises, None):  # with a second fit after one that fails
                trainer = make_trainer(options=given, callbacks=[counts, *own], plugins=plugins(), **kwargs)
                # What is left of a fit that has failed may hold the memory of weights: then those are not early.
                module.fails, module.is_second = error is not None, bool(ends)
                arrivals.forget()
                with contextlib.nullcontext() if error is None else pytest.raises(error):
                    trainer.fit(module, make_loader(40))
                assert not any(type(parameter) is PendingParameter for parameter in module.parameters())
                states = [optimizer.state_dict() for optimizer in trainer.optimizers]
                end = [dict(module.state_dict()), states, dict(trainer.callback_metrics), trainer.global_step]
                ends.append(copy.deepcopy(end))
            if mode == "off":
                assert_nothing_has_begun(counts)
            found.append([*ends, *(copy.deepcopy(x.seen) for x in (module, *own) if hasattr(x, "seen"))])
        assert_alike(found[1], found[0], rtol=0, atol=0)
        start = make_module().state_dict()
        assert any(not torch.equal(value, start[name]) for name, value in found[0][0][0].items())
        return counts

    return run


def assert_kept(counts: Counts, num_steps: int) -> None:
    assert counts.kept >= _NUM_AWAITED * num_steps
    assert (counts.taken_back, counts.is_mistaken) == (0, False)


def assert_taken_back(counts: Counts) -> None:
    assert counts.taken_back >= _NUM_AWAITED
    assert counts.is_mistaken


def assert_nothing_has_begun(counts: Counts) -> None:
    assert (counts.kept, counts.taken_back, counts.is_mistaken) == (0, 0, False)


# --- the same numbers -------------------------------------------------------------------------------------------------


def _groups(module: Any) -> list[dict[str, Any]]:
    matrices, vectors = ([p for p in module.body.parameters() if p.dim() == dim] for dim in (2, 1))
    return [
        {"params": module.head.parameters(), "lr": 0.05},
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda m: torch.optim.AdamW(_groups(m), lr=0.01),
    "AdamW fused": lambda m: torch.optim.AdamW(_groups(m), lr=0.01, fused=True),
    "SGD": lambda m: torch.optim.SGD(_groups(m), lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_with_schedulers(gated: Any, train: Train, copies: bool, name: str) -> None:
    class Scheduled(gated):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = OPTIMIZERS[name](self)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    assert_kept(train(Scheduled, options={"virtual_copies": copies}), 4)


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_precisions(gated: Any, train: Train, copies: bool, precision: str) -> None:
    assert_kept(train(gated, options={"virtual_copies": copies}, precision=precision), 4)


def test_norms_for_clipping_are_taken_early(gated: Any, train: Train, copies: bool, arrivals: Arrivals) -> None:
    counts = train(gated, options={"virtual_copies": copies}, gradient_clip_val=0.05)
    assert_nothing_has_begun(counts)
    assert arrivals.num_norms >= _NUM_AWAITED * 4


# --- what looks at weights in between ---------------------------------------------------------------------------------


def _saved(trainer: L.Trainer, module: Any) -> Any:
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    return torch.load(file)


LOOKS: dict[str, Look] = {
    "a weight": lambda t, m: m.head.weight.detach().clone(),
    "data": lambda t, m: m.head.bias.data.clone(),
    "copy": lambda t, m: copy.deepcopy(m.head).state_dict(),
    "file": _saved,
    "optimizer state": lambda t, m: copy.deepcopy(dict(t.optimizers[0].state[m.head.weight])),
    "optimizer's state_dict": lambda t, m: copy.deepcopy(t.optimizers[0].state_dict()),
}


class Does(L.Callback):
    """Does something in a hook, in all steps after the first ones."""

    def __init__(self, hook: str, look: Look, first: int = 0) -> None:
        self.seen: list[Any] = []
        self._look, self._first = look, first
        setattr(self, hook, self._take)

    def _take(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
        if trainer.global_step >= self._first:
            self.seen.append(self._look(trainer, module))


IN_BETWEEN = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")


@pytest.mark.parametrize("hook", IN_BETWEEN)
def test_nothing_is_early_where_hooks_are_known_to_run_in_between(gated: Any, train: Train, hook: str) -> None:
    assert_nothing_has_begun(train(gated, lambda: [Does(hook, LOOKS["file"])]))
    own = type("Own", (gated,), {hook: lambda module, *args: module.seen.append(_saved(module.trainer, module))})
    assert_nothing_has_begun(train(own))


@pytest.mark.parametrize("look", LOOKS)
def test_who_looks_sees_old_values(gated: Any, train: Train, unknown_code: None, look: str) -> None:
    assert_taken_back(train(gated, lambda: [Does("on_before_optimizer_step", LOOKS[look])]))


@pytest.mark.parametrize("look", LOOKS)
def test_who_looks_in_the_backward_sees_old_values(gated: Any, train: Train, look: str) -> None:
    class Looks(gated):  # type: ignore[misc]
        def in_backward(self) -> None:
            self.seen.append(LOOKS[look](self.trainer, self))

    assert_taken_back(train(Looks, options={"virtual_copies": True}))


def test_who_looks_at_gradients_alone_changes_nothing(gated: Any, train: Train, unknown_code: None) -> None:
    norms: Look = lambda t, m: [p.grad.norm() for p in m.parameters()]  # noqa: E731
    assert_kept(train(gated, lambda: [Does("on_before_optimizer_step", norms)]), 4)


# --- what changes something in between --------------------------------------------------------------------------------


def _set(trainer: L.Trainer, module: Any, change: Callable[[nn.Parameter], None]) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            change(parameter)


def _replace_gradient(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad * 0.5


def _set_rate(trainer: L.Trainer, module: Any) -> None:
    trainer.optimizers[0].param_groups[0]["lr"] = 0.01 * (trainer.global_step + 1)


def _regroup(trainer: L.Trainer, module: Any) -> None:
    (group, *others) = trainer.optimizers[0].param_groups
    if not others:
        group["params"] = [*module.body.parameters()]
        trainer.optimizers[0].add_param_group({"params": module.head.parameters(), "lr": 0.3})


CHANGES: dict[str, Look] = {
    "gradients in place": lambda t, m: _set(t, m, lambda p: p.grad.mul_(0.5)),  # type: ignore[union-attr]
    "gradients by value": lambda t, m: nn.utils.clip_grad_value_(m.parameters(), 0.01),
    "gradients replaced": lambda t, m: _set(t, m, _replace_gradient),
    "a gradient less": lambda t, m: setattr(m.head.weight, "grad", None),
    "learning rate": _set_rate,
    "weights": lambda t, m: _set(t, m, lambda p: p.mul_(0.5)),
    "data": lambda t, m: _set(t, m, lambda p: setattr(p, "data", p.data * 0.5)),
    "state": lambda t, m: t.optimizers[0].state[m.head.weight]["momentum_buffer"].mul_(0.5),
    "another group": _regroup,
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_in_between_counts(gated: Any, train: Train, unknown_code: None, change: str) -> None:
    def make() -> list[Any]:
        return [Does("on_before_optimizer_step", lambda t, m: (CHANGES[change](t, m), None)[1], first=2)]

    counts = train(gated, make, options={"virtual_copies": len(change) % 2 == 0})
    assert counts.is_mistaken
    assert counts.kept > 0
    assert counts.taken_back > 0


def test_a_rate_that_training_step_sets(gated: Any, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    class Sets(gated):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            _set_rate(self.trainer, self)
            return super().training_step(batch, batch_idx)

    messages: list[str] = []
    monkeypatch.setattr(overlap, "rank_zero_info", messages.append)
    assert_taken_back(train(Sets, max_epochs=2))
    (message,) = messages
    assert message.startswith("optimizer updates begin after the backward from now on")


def test_a_scaled_backward(gated: Any, train: Train, unknown_code: None) -> None:
    assert_taken_back(train(type("Own", (gated,), {"backward": lambda module, loss: (loss * 0.5).backward()})))


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_weights_with_hooks_on_their_gradient_wait(gated: Any, train: Train, kind: str) -> None:
    def halve(value: Tensor) -> None:  # leaves no trace in the version
        (value if value.grad is None else value.grad).data.mul_(0.5)

    class Hooked(gated):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            getattr(self.head.weight, kind)(halve)

    counts = train(Hooked)
    assert counts.kept >= (_NUM_AWAITED - 1) * 4
    assert counts.taken_back == 0


@pytest.mark.parametrize("clips", [False, True])
def test_a_closure_that_changes_gradients_without_a_trace(gated: Any, train: Train, clips: bool) -> None:
    class Wraps(gated):  # type: ignore[misc]
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
            def wrapped() -> Any:
                loss = closure()
                for weight in self.parameters():
                    weight.grad.data.mul_(0.5)
                return loss

            super().optimizer_step(epoch, batch_idx, optimizer, wrapped)

    train(Wraps, gradient_clip_val=0.05 if clips else None)


# --- steps that fail --------------------------------------------------------------------------------------------------


class Stop(RuntimeError):
    """What user code raises here."""


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt, torch.OutOfMemoryError])
def test_a_backward_that_fails_leaves_what_was_before_the_step(
    gated: Any, train: Train, copies: bool, error: type[BaseException]
) -> None:
    class Fails(gated):  # type: ignore[misc]
        def in_backward(self) -> None:
            if self.fails and self.trainer.global_step == 2:
                raise error("now")

    counts = train(Fails, raises=(error, SystemExit), options={"virtual_copies": copies})
    assert counts.taken_back >= _NUM_AWAITED
    assert counts.kept >= _NUM_AWAITED
    assert not counts.is_mistaken


def test_a_training_step_that_fails_in_its_last_micro_batch(gated: Any, train: Train) -> None:
    class Fails(gated):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.places = iter([False] * 2 + [True])

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.fails and self.trainer.global_step == 2 and next(self.places):
                raise Stop("now")
            return super().training_step(batch, batch_idx)

    assert_kept(train(Fails, raises=Stop), 1)


def test_a_hook_that_fails_after_the_backward(gated: Any, train: Train, unknown_code: None) -> None:
    def fail(trainer: L.Trainer, module: Any) -> None:
        if module.fails:
            raise Stop("now")

    counts = train(gated, lambda: [Does("on_before_optimizer_step", fail, first=2)], raises=Stop)
    assert counts.taken_back >= _NUM_AWAITED
    assert not counts.is_mistaken


@pytest.mark.filterwarnings("ignore:training_step does not fit on the devices with 3")
def test_a_step_that_does_not_fit_is_run_again(gated: Any, train: Train) -> None:
    class Full(gated):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.errors = iter([torch.OutOfMemoryError("full")])

        def in_backward(self) -> None:
            if self.trainer.global_step == 2 and (error := next(self.errors, None)) is not None:
                raise error

        def awaited(self) -> list[nn.Module]:  # with more micro-batches the plan is a single stage
            return super().awaited() if operator.length_hint(self.errors) else []

        def on_train_batch_end(self, *args: Any) -> None:
            self.seen.append(dict(self.trainer.strategy.retry.num_microbatches))

    counts = train(Full, options={"virtual_copies": True, "device_memory_limit": "1MiB"})
    assert counts.taken_back >= _NUM_AWAITED
    assert counts.kept >= _NUM_AWAITED
    assert not counts.is_mistaken


# --- where nothing is early -------------------------------------------------------------------------------------------


def _scaling() -> list[Any]:
    return [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=256.0))]


NOT_EARLY: dict[str, dict[str, Any]] = {
    "accumulation": {"accumulate_grad_batches": 2},
    "accumulation, clip": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05},
    "clip value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "loss scaler": {"plugins": _scaling},
}


@pytest.mark.parametrize("name", NOT_EARLY)
def test_what_waits_for_the_last_gradient(gated: Any, train: Train, arrivals: Arrivals, name: str) -> None:
    assert_nothing_has_begun(train(gated, **NOT_EARLY[name]))
    assert arrivals.num_offers == 0


def test_manual_optimization(gated: Any, train: Train, arrivals: Arrivals) -> None:
    class Manual(gated):  # type: ignore[misc]
        calls = ()
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    assert_nothing_has_begun(train(Manual))
    assert arrivals.num_offers == 0


@pytest.mark.filterwarnings("ignore:optimizer_overlap='stale'")
def test_stale_weights(gated: Any, make_trainer: Any, make_loader: Any, arrivals: Arrivals) -> None:
    counts = Counts(None)
    make_trainer(options={"optimizer_overlap": "stale"}, callbacks=[counts]).fit(gated(), make_loader(40))
    assert_nothing_has_begun(counts)
    assert arrivals.num_offers == 0


@pytest.mark.parametrize(("limit_bytes", "num_kept"), [(0, 0), (100, 2 * 4)])  # two biases with momentum take 72
def test_the_memory_for_what_is_overwritten_is_limited(
    gated: Any, train: Train, limit_bytes: int, num_kept: int
) -> None:
    counts = train(gated, limit_bytes=limit_bytes)
    assert (counts.kept, counts.taken_back) == (num_kept, 0)


# --- weights that are not of one unit alone ---------------------------------------------------------------------------


def _penalty(module: Any) -> Tensor:
    return sum((weight.square().sum() for weight in module.parameters()), torch.zeros(()))


@pytest.fixture
def make_model(gated: Any) -> Callable[[str], type[Any]]:
    """Makes one of the models below, by its name."""

    class Tied(gated):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.body[2][0].weight = self.body[1][0].weight

    class Twice(gated):  # type: ignore[misc]
        calls = (*_CALLS[:4], "body.3.0", "head")

        def forward(self, x: Tensor) -> Tensor:
            x = _Gate.apply(self.body[0](x), self.gate)
            return self.head(self.body[3](self.body[3](self.body[2](self.body[1](x)))))

        def awaited(self) -> list[nn.Module]:
            return [self.head]

    class InGlue(gated):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.head.weight.mean())

        def awaited(self) -> list[nn.Module]:
            return [self.body[3]]

    class LateInGlue(gated):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss + 0.1 * _penalty(self) if batch_idx >= 2 else loss

        def awaited(self) -> list[nn.Module]:
            return [self.body[3], self.head] if self.trainer.global_step < 2 else []

    class DetachedInGlue(gated):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            x = self.body[0](x)
            x = _Gate.apply(nn.functional.linear(x, self.body[3][0].weight.detach()), self.gate)
            return self.head(self.body[3](self.body[2](self.body[1](x))))

        def awaited(self) -> list[nn.Module]:
            return [self.head]

    class TiedByMemory(gated):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.body[3][0].weight.data = self.body[0][0].weight.data

        def awaited(self) -> list[nn.Module]:
            return [self.head]

    class Thaws(gated):  # type: ignore[misc]
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_start(batch, batch_idx)
            self.body[1].requires_grad_(batch_idx >= 2)

    class Norms(gated):  # type: ignore[misc]
        calls = (*(f"body.{i}.{j}" for i in range(4) for j in range(2)), "head")

        def __init__(self) -> None:
            super().__init__()
            for block in self.body:
                block[1] = nn.BatchNorm1d(6)

    class Checkpoints(gated):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            x = self.body[2](checkpoint(self.body[1], self.body[0](x), use_reentrant=False))
            return self.head(checkpoint(self.body[3], x, use_reentrant=False))

    class Skips(gated):  # type: ignore[misc]
        calls = ()

        def forward(self, x: Tensor) -> Tensor:
            x = self.body[1](self.body[0](x))
            return self.head(self.body[3](self.body[2](x) if x.sum() > 0 else x))

    return {cls.__name__: cls for cls in locals().values() if isinstance(cls, type)}.__getitem__


MODELS = {"Tied": True, "Twice": True, "InGlue": True, "LateInGlue": True, "DetachedInGlue": True, "Thaws": True,
          "TiedByMemory": True, "Norms": True, "Checkpoints": False, "Skips": False}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_models(make_model: Any, train: Train, copies: bool, name: str) -> None:
    counts = train(make_model(name), options={"virtual_copies": copies})
    assert (counts.kept > 0) or not MODELS[name]
    assert (counts.taken_back, counts.is_mistaken) == (0, False)
