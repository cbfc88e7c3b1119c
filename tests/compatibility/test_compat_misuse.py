"""Mistakes: a clear error before anything is trained, or the right result all the same."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_roundpipe import BatchSplitError, GradientCutError, RoundPipeStrategy, UnitEscapeError
from tests.adapter.conftest import WIDTH, Small

from .rows import compat

Step = Callable[[Any, Any, int], Any]


class Batches:
    """An iterable of ready-made batches."""

    def __init__(self, batches: Any) -> None:
        self.batches = list(batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def with_step(step: Step, base: type[Small] = Small) -> Any:
    """The small model with another ``training_step``."""
    return type("Mistaken", (base,), {"training_step": step})()


@pytest.fixture(params=[False, True], ids=["aliases", "copies"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Units compute with the masters, or with copies of them."""
    return {"virtual_copies": request.param}


@pytest.fixture
def assert_refused(make_trainer: Any, make_loader: Any) -> Callable[..., str]:
    """The run ends in its step number ``after`` with this error; the message."""

    def check(
        module: Any, match: str, error: type[Exception] = MisconfigurationException, loader: Any = None,
        after: int = 0, **settings: Any,
    ) -> str:  # fmt: skip
        before = {name: weight.clone() for name, weight in module.state_dict().items()}
        trainer = make_trainer(**settings)
        with pytest.raises(error, match=match) as caught:
            trainer.fit(module, make_loader() if loader is None else loader)
        assert trainer.global_step == after
        now = {name: weight for name, weight in module.state_dict().items() if not weight.is_meta}
        moved = [name for name, weight in now.items() if not torch.equal(weight, before[name])]
        assert after or len(moved) <= 1, f"nothing but the change itself may have happened: {moved}"
        return str(caught.value)

    return check


# --- weights and gradients -------------------------------------------------------------------------------------------


def _in_place(self: Any, batch: Any, batch_idx: int) -> Any:
    with torch.no_grad():
        self.head.weight.mul_(0.9)
    return self.loss(batch)


def _through_data(self: Any, batch: Any, batch_idx: int) -> Any:
    loss = self.loss(batch)
    self.body[1][0].bias.data.add_(0.1)
    return loss


def _replaced_data(self: Any, batch: Any, batch_idx: int) -> Any:
    self.head.weight.data = self.head.weight.data * 0.9
    return self.loss(batch)


class Teacher(Small):
    """A moving average that ``training_step`` updates, as many recipes do."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = copy.deepcopy(self.head).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step > 0:
            self.slow.weight.lerp_(self.head.weight.detach(), 0.1)
        x, y = batch
        return F.cross_entropy(self(x), y) + F.mse_loss(self(x), self.slow(self.body(x)))


@compat(
    "Misuse",
    "a weight changed in place in `training_step`",
    status="refused",
    note="It would be changed once per micro-batch: change it in `on_train_batch_start` or `on_train_batch_end`.",
)
@pytest.mark.parametrize("step", [_in_place, _through_data, _replaced_data], ids=lambda step: step.__name__[1:])
def test_weights_changed_in_a_step(assert_refused: Any, options: dict[str, Any], step: Step) -> None:
    message = assert_refused(
        with_step(step), r"training_step, or code that it calls, changes the weight", options=options
    )
    assert "'head.weight'" in message or "'body.1.0.bias'" in message
    assert "3 times per batch" in message
    assert "on_train_batch_start" in message


def test_weights_changed_in_a_later_step(assert_refused: Any, make_loader: Any) -> None:
    assert_refused(Teacher(), r"weight 'slow.weight' in place", after=1)

    def later(self: Any, batch: Any, batch_idx: int) -> Any:
        return _in_place(self, batch, batch_idx) if batch_idx == 5 else self.loss(batch)

    assert_refused(with_step(later), r"weight 'head.weight' in place", after=5, loader=make_loader(48))


def test_weights_changed_in_validation(make_trainer: Any, make_loader: Any) -> None:
    module = Small()
    module.validation_step = lambda batch, batch_idx: _in_place(module, batch, batch_idx)
    with pytest.raises(MisconfigurationException, match=r"validation_step, or code that it calls, changes the weight"):
        make_trainer().validate(module, make_loader(), verbose=False)


@compat("Misuse", "a weight changed in place in `training_step`, with `num_microbatches=1`")
def test_weights_changed_with_one_microbatch(
    fit_both: Any, assert_same_training: Any, assert_refused: Any, options: dict[str, Any]
) -> None:
    plain, ours = fit_both(lambda: with_step(_in_place), ours={"num_microbatches": 1, "options": options})
    assert_same_training(plain, ours)
    if options["virtual_copies"]:
        assert_refused(with_step(_through_data), "through .data", num_microbatches=1, options=options)


@compat("Misuse", "weights changed in hooks that run once per batch")
def test_weights_changed_in_hooks(fit_both: Any, assert_same_training: Any, options: dict[str, Any]) -> None:
    class Clamps(Small):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.head.weight.data.clamp_(-0.2, 0.2)

        def on_train_batch_end(self, *args: Any) -> None:
            with torch.no_grad():
                self.body[0][0].weight.mul_(0.9)

    plain, ours = fit_both(Clamps, ours={"options": options})
    assert_same_training(plain, ours)


class Shrinks(nn.Linear):
    through_data = False

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            (self.weight.data if self.through_data else self.weight).mul_(0.9)
        return super().forward(x)


@compat(
    "Misuse",
    "a unit that changes its own weights in its forward",
    status="refused",
    note="A unit runs again in the backward, and on copies: change the weights in a hook.",
)
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_weights_changed_by_a_unit(assert_refused: Any, options: dict[str, Any], num_microbatches: int) -> None:
    module = Small()
    module.head = Shrinks(WIDTH, 3)
    match = r"forward of unit 'head' \(Shrinks\) changes its weight 'head.weight'"
    assert_refused(module, match, num_microbatches=num_microbatches, options=options)
    if not options["virtual_copies"]:
        module.head.through_data = True
        assert_refused(module, match, num_microbatches=num_microbatches)


class Looks(Small):
    """With a table whose rows are scaled in place when they are looked up."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.table = nn.Embedding(10, WIDTH, max_norm=0.5)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return super().loss((x + self.table((x.abs() * 3).long().sum(1) % 10), y))


class Reparametrized(Small):
    """Modules that write buffers, or attributes, in their forward."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.head = nn.utils.spectral_norm(self.head)
            nn.utils.parametrizations.weight_norm(self.body[0][0])
            nn.utils.parametrizations.orthogonal(self.body[1][0])
            self.extra = nn.ParameterList([torch.ones(2, dtype=torch.complex64), torch.ones(()), torch.ones(0, 3)])

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + self.extra[0].abs().sum() * self.extra[1]


@compat("Misuse", "`max_norm` of embeddings on devices without memory of their own")
@compat(
    "Misuse",
    "`max_norm` of embeddings on devices with memory of their own",
    status="refused",
    note="What is looked up is scaled on the copy: scale the rows in a hook, with `torch.embedding_renorm_`.",
)
def test_max_norm(fit_both: Any, assert_same_training: Any, assert_refused: Any) -> None:
    plain, ours = fit_both(Looks)
    assert_same_training(plain, ours)
    assert_refused(Looks(), r"unit 'table' \(Embedding\) changes its weight", options={"virtual_copies": True})


def test_what_is_no_mistake(make_trainer: Any, make_loader: Any, options: dict[str, Any]) -> None:
    module = Reparametrized()
    trainer = make_trainer(options=options)
    trainer.fit(module, make_loader())
    assert trainer.global_step == 3


def _writes_gradient(self: Any, batch: Any, batch_idx: int) -> Any:
    self.head.weight.grad = torch.ones_like(self.head.weight)
    return self.loss(batch)


def _own_penalty(self: Any, batch: Any, batch_idx: int) -> Any:
    self.head.weight.square().sum().backward()
    return self.loss(batch)


@compat(
    "Misuse",
    "`.grad` written in `training_step`",
    status="refused",
    note="Write it in `on_after_backward` or `on_before_optimizer_step`.",
)
@pytest.mark.parametrize("step", [_writes_gradient, _own_penalty], ids=lambda step: step.__name__[1:])
def test_gradients_written_in_a_step(assert_refused: Any, step: Step) -> None:
    assert_refused(with_step(step), r"writes the gradient \(.grad\) of 'head.weight'.*on_after_backward")


def _own_backward(self: Any, batch: Any, batch_idx: int) -> Any:
    loss = self.loss(batch)
    loss.backward()
    return loss


def _input_gradient(self: Any, batch: Any, batch_idx: int) -> Any:
    x = batch[0].requires_grad_()
    (gradient,) = torch.autograd.grad(self(x).sum(), x, create_graph=True)
    return self.loss(batch) + gradient.square().sum()


@compat(
    "Misuse",
    "`torch.autograd.grad` or `backward` through a unit in `training_step`",
    status="refused",
    note="Name units that keep the differentiated part outside, or use another strategy.",
)
@pytest.mark.parametrize("step", [_own_backward, _input_gradient], ids=lambda step: step.__name__[1:])
def test_gradients_through_a_unit(assert_refused: Any, step: Step) -> None:
    assert_refused(with_step(step), r"went through unit 'head'.*units=\[", GradientCutError)


class Leaks(Small):
    """Hands a tensor with a graph to the loss through a global object."""

    def __init__(self) -> None:
        super().__init__()
        self.body[1].register_module("2", _Leak())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) + _Leak.seen[-1].square().mean()


class _Leak(nn.Linear):
    seen: list[Tensor] = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        _Leak.seen.append(super().forward(x))
        return x


@compat(
    "Misuse",
    "a tensor that leaves a unit by a side channel",
    status="refused",
    note="Return it, assign it to an attribute, or make a coarser module the unit.",
)
def test_side_channel(assert_refused: Any) -> None:
    try:
        assert_refused(Leaks(), r"a tensor leaves unit 'body.1.2'.*Return it", UnitEscapeError)
    finally:
        _Leak.seen.clear()


def _manual(edit: str) -> Any:
    class Manual(Small):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            for place in ("before", "between"):
                if edit == place:
                    self.head.weight.data.mul_(0.9)
                self.manual_backward(self.loss(batch))
                optimizer.step()
                optimizer.zero_grad()
            if edit == "after":
                self.head.bias.data.add_(1)

    return Manual()


@pytest.mark.parametrize("edit", ["before", "between", "after"])
def test_weights_changed_beside_optimizers(assert_refused: Any, options: dict[str, Any], edit: str) -> None:
    """Optimizers that are stepped by hand change weights in the middle of a step; nothing else may."""
    after = {"before": 0, "between": 1, "after": 2}[edit]
    assert_refused(_manual(edit), r"changes the weight 'head\.\w+' in place", after=after, options=options)


def test_optimizers_change_weights(fit_both: Any, assert_same_training: Any, options: dict[str, Any]) -> None:
    class Manual(type(_manual("nowhere"))):  # type: ignore[misc]
        pass

    plain, ours = fit_both(Manual, ours={"options": options})
    assert_same_training(plain, ours)
    assert ours.trainer.global_step == 6


# --- places ----------------------------------------------------------------------------------------------------------


@compat(
    "Misuse",
    "modules moved to a device by hand",
    status="refused",
    note="Weights stay on the host. What `__init__` and `setup` move to a GPU is brought back without an error.",
)
@pytest.mark.parametrize("place", ["__init__", "setup", "on_train_start", "on_train_batch_start", "training_step"])
def test_moved_by_hand(assert_refused: Any, options: dict[str, Any], place: str) -> None:
    """``meta`` stands in for a GPU: there is no other device here. It has no data, which is noticed first: by the copies
    too, to which glue brings what is on another device."""
    module = Small()

    def move(*arguments: Any, stage: str = "") -> Any:
        module.head.to("meta")
        return module.loss(arguments[0]) if place == "training_step" else None

    if place == "__init__":
        move()
    else:
        setattr(module, place, move)
    match = r"'head.weight' was moved to the device 'meta' by hand"
    error: type[Exception] = MisconfigurationException
    if place in ("__init__", "setup"):
        match = r"'head.weight' has no data"
    elif place == "training_step" and options["virtual_copies"]:
        match, error = "Cannot copy out of meta tensor", NotImplementedError
    assert_refused(module, match, error, options=options)


def test_moves_to_where_it_is(fit_both: Any, assert_same_training: Any) -> None:
    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        self.to(self.device)
        return self.loss([entry.to(self.device) for entry in batch])

    class Moves(Small):
        training_step = step

    assert_same_training(*fit_both(Moves))


# --- batches ---------------------------------------------------------------------------------------------------------


@compat("Misuse", "the batch changed in place in `training_step`")
def test_batch_changed_in_place(fit_both: Any, assert_same_training: Any, options: dict[str, Any]) -> None:
    class Scales(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            batch[0].mul_(2).add_(1)
            return self.loss(batch)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.seen = batch[0]

    plain, ours = fit_both(Scales, ours={"options": options})
    assert_same_training(plain, ours)
    assert torch.equal(ours.module.seen, plain.module.seen)


@compat(
    "Misuse",
    "a tensor changed in place that all micro-batches share",
    status="refused",
    note="Change a copy of it.",
)
def test_shared_tensor_changed_in_place(assert_refused: Any, fit_both: Any, make_loader: Any) -> None:
    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        batch["more"][0].mul_(0.5)
        return self.loss((batch["x"] * batch["more"][0], batch["y"]))

    def batches() -> Batches:
        return Batches({"x": x, "y": y, "more": [torch.ones(1, WIDTH)]} for x, y in make_loader())

    message = assert_refused(
        with_step(step), r"changes the tensor batch\['more'\]\[0\] in place.*clone", loader=batches(), after=0
    )
    assert "3 times" in message


class Sample:
    """One row, in an object that cannot be pickled."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.lock = x, y, threading.Lock()


@compat("Misuse", "batches that cannot be pickled")
def test_batches_that_cannot_be_pickled(fit_both: Any, make_loader: Any, assert_same_training: Any) -> None:
    class Stacks(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss((torch.stack([sample.x for sample in batch]), torch.stack([sample.y for sample in batch])))

    samples = Batches([Sample(a, b) for a, b in zip(x, y, strict=True)] for x, y in make_loader())
    with pytest.raises(TypeError, match="pickle"):
        pickle.dumps(samples.batches[0])
    assert_same_training(*fit_both(Stacks, samples))


@compat(
    "Misuse",
    "a batch of an unknown kind",
    status="refused",
    note="Split it yourself (`split_batch`, `roundpipe_split_batch`), or use `num_microbatches=1`.",
)
def test_batch_of_unknown_kind(assert_refused: Any, fit_both: Any, make_loader: Any, assert_same_training: Any) -> None:
    class Unpacks(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss((batch.x, batch.y))

    objects = Batches(Sample(x, y) for x, y in make_loader())
    match = r"batch of type Sample cannot be split \(its rows are unknown\).*roundpipe_split_batch.*num_microbatches=1"
    assert_refused(Unpacks(), match, BatchSplitError, objects)
    assert_same_training(*fit_both(Unpacks, objects, ours={"num_microbatches": 1}))


@compat("Misuse", "batches without rows (text, a number)")
@pytest.mark.parametrize("batch", ["text", 7], ids=str)
def test_batches_without_rows(fit_both: Any, make_loader: Any, assert_same_training: Any, batch: Any) -> None:
    rows = list(make_loader())

    class Fetches(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(rows[batch_idx])

    assert_same_training(*fit_both(Fetches, Batches([batch] * 3)))


@compat("Misuse", "batch norm and a batch of one row")
@compat("Misuse", "batch norm and fewer rows than twice the micro-batches")
def test_batch_norm_and_few_rows(make_trainer: Any, make_loader: Any) -> None:
    class Normalizes(Small):
        def __init__(self) -> None:
            super().__init__()
            self.body[0].append(nn.BatchNorm1d(WIDTH))

    for rows, steps in ((11, 2), (9, 1)):  # the last batch has 3 rows, or 1
        found = []
        for kind in ("plain", "roundpipe"):
            trainer = make_trainer(kind)
            if rows == 11:
                trainer.fit(Normalizes(), make_loader(rows))
                found.append("")
            else:
                with pytest.raises(ValueError, match="more than 1 value per channel") as caught:
                    trainer.fit(Normalizes(), make_loader(rows))
                found.append(str(caught.value))
            assert trainer.global_step == steps
        assert found[0] == found[1]


@compat(
    "Misuse",
    "code that needs several rows, in micro-batches of one",
    status="differs",
    note="The error is that of the code, with a note that names `num_microbatches` (from Python 3.11 on).",
)
def test_too_few_rows_for_the_code(assert_refused: Any, make_trainer: Any, make_loader: Any) -> None:
    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return self.loss((F.batch_norm(x, None, None, training=True), y))

    with pytest.raises(ValueError, match="more than 1 value per channel") as caught:
        make_trainer(num_microbatches=8).fit(with_step(step), make_loader())
    notes = getattr(caught.value, "__notes__", None)
    if hasattr(caught.value, "add_note"):
        assert notes is not None
        assert "8 rows was split into 8 micro-batches, some of a single row" in notes[0]
        assert "num_microbatches of 4 or less" in notes[0]
    make_trainer(num_microbatches=4, limit_train_batches=2).fit(with_step(step), make_loader())


@compat(
    "Misuse",
    "`batch_size=1`",
    status="differs",
    note="Trains as in plain Lightning, with a warning that there is nothing to pipeline.",
)
def test_nothing_to_pipeline(fit_both: Any, make_loader: Any, assert_same_training: Any) -> None:
    with pytest.warns(UserWarning, match=r"has 1 row, so.*batch_size of 3 or more") as caught:
        plain, ours = fit_both(Small, make_loader(4, 1))
    assert sum("nothing" in str(w.message) or "single micro-batch" in str(w.message) for w in caught) == 1
    assert_same_training(plain, ours)


def test_no_hint_where_it_would_be_wrong(make_trainer: Any, make_loader: Any, recwarn: pytest.WarningsRecorder) -> None:
    make_trainer().fit(Small(), make_loader(9))  # the last batch has one row
    make_trainer(num_microbatches=1).fit(Small(), make_loader(4, 1))
    make_trainer(devices=1).fit(Small(), make_loader(4, 1))
    assert not [w for w in recwarn if "single micro-batch" in str(w.message)]


# --- set-up ----------------------------------------------------------------------------------------------------------


@compat(
    "Misuse",
    "a wrong result of `training_step`",
    status="refused",
    note="Return a scalar tensor, a dict with `loss`, or None.",
)
@pytest.mark.parametrize(
    ("wrong", "error", "match"),
    [
        (lambda loss: float(loss), MisconfigurationException, "returned float: return a loss tensor, a dict with"),
        (lambda loss: {"los": loss}, MisconfigurationException, "dict without a loss under the key 'loss'"),
        (lambda loss: (loss, 1), MisconfigurationException, "returned tuple"),
        (lambda loss: loss.repeat(2), ValueError, r"loss of shape \(2,\): it must be a scalar"),
        (lambda loss: loss.detach(), RuntimeError, "does not require a gradient"),
    ],
    ids=["float", "dict", "tuple", "vector", "detached"],
)
def test_wrong_results(assert_refused: Any, wrong: Any, error: Any, match: str) -> None:
    assert_refused(with_step(lambda self, batch, batch_idx: wrong(self.loss(batch))), match, error)


@compat(
    "Misuse",
    "`torch.compile(module)`",
    status="refused",
    note="Lightning allows it for its own strategies only: use `RoundPipeStrategy(compile_units=True)`.",
)
def test_compiled_module(assert_refused: Any) -> None:
    compiled = torch.compile(Small(), backend="eager")
    assert_refused(
        compiled, "compiled model is incompatible with the current strategy: `RoundPipeStrategy`", RuntimeError
    )


@compat(
    "Misuse",
    '`strategy="roundpipe"` without `import lightning_roundpipe`',
    status="refused",
    note="Lightning does not know the name.",
)
def test_forgotten_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(StrategyRegistry, "roundpipe")
    with pytest.raises(ValueError, match="invalid strategy name: `strategy='roundpipe'`"):
        L.Trainer(strategy="roundpipe", accelerator="cpu")


@compat(
    "Misuse",
    "the package `pytorch_lightning`",
    status="refused",
    note="Its Trainer does not know the strategy, and Lightning's not its modules: `import lightning as L`.",
)
def test_the_other_package(make_trainer: Any, make_loader: Any) -> None:
    other = pytest.importorskip("pytorch_lightning", reason="needs the package pytorch_lightning")
    for strategy in ("roundpipe", RoundPipeStrategy()):
        with pytest.raises(ValueError, match="invalid strategy name"):
            other.Trainer(strategy=strategy, accelerator="cpu", logger=False)
    with pytest.raises(TypeError, match="must be a `LightningModule`"):
        make_trainer().fit(type("Theirs", (other.LightningModule,), {})(), make_loader())


@compat(
    "Misuse",
    "one strategy object for two Trainers",
    status="refused",
    note="Lightning says that accelerator or devices are set twice: make a new `RoundPipeStrategy` for each Trainer.",
)
def test_strategy_of_another_trainer(make_trainer: Any, make_loader: Any) -> None:
    trainer = make_trainer()
    for accelerator in ("cpu", "auto"):
        with pytest.raises(MisconfigurationException, match=r"set through (both|RoundPipeStrategy)"):
            L.Trainer(strategy=trainer.strategy, accelerator=accelerator, devices=3, logger=False)
    trainer.fit(Small(), make_loader())
    assert (trainer.global_step, len(trainer.strategy.pool)) == (3, 2)


@compat(
    "Misuse",
    "accelerators and devices that make no sense",
    status="refused",
    note="As in plain Lightning, when the Trainer is made.",
)
@pytest.mark.parametrize(
    "settings",
    [
        {"accelerator": "cpu", "devices": 0},
        {"accelerator": "cpu", "devices": [0, 1]},
        {"accelerator": "cpu", "devices": "two"},
        {"accelerator": "roundpipe", "devices": 0},
        {"accelerator": "roundpipe", "devices": 1.5},
        {"accelerator": "tpu"},
        {"accelerator": "nothing"},
    ],
    ids=lambda settings: " ".join(map(str, settings.values())),
)
def test_senseless_devices(settings: dict[str, Any]) -> None:
    with pytest.raises((MisconfigurationException, TypeError, ValueError, ModuleNotFoundError)) as caught:
        L.Trainer(strategy="roundpipe", logger=False, **settings)
    words = ("devices", settings["accelerator"], "torch_xla")
    assert any(word in str(caught.value) for word in words)


@compat("Misuse", "options of a wrong type, or that contradict each other", status="refused", note="When it is made.")
@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_microbatches": "4"}, "num_microbatches='4': use a positive integer or 'auto'"),
        ({"num_microbatches": True}, "num_microbatches=True"),
        ({"units": nn.Linear}, "units=.*non-empty list of module classes"),
        ({"loss_weight": "tokens"}, "loss_weight='tokens': use one of 'samples'"),
        ({"device_memory_limit": 24}, "24 bytes, on which nothing can run.*'24GiB'"),
        ({"compile_units": {"mode": "default", "options": {"a": 1}}}, "either mode or options"),
        ({"precision": 16}, "unexpected keyword argument 'precision'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_options(options: dict[str, Any], match: str) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        RoundPipeStrategy(**options)


@compat("Misuse", "`deepcopy` of a Trainer that has run")
@compat("Misuse", "`pickle` of a Trainer")
@pytest.mark.parametrize("has_run", [False, True])
def test_copies_of_a_trainer(make_trainer: Any, make_loader: Any, assert_alike: Any, has_run: bool) -> None:
    """A plain Trainer that has run cannot be pickled either: Lightning's wrappers of optimizers cannot."""
    trainer, module, expected = make_trainer(), Small(), Small()
    if has_run:
        trainer.fit(Small(), make_loader())
        other = copy.deepcopy(trainer)
        other.fit_loop.max_epochs = 2
    else:
        other = pickle.loads(pickle.dumps(trainer))
    assert other.strategy is not trainer.strategy
    other.fit(module, make_loader())
    assert (other.current_epoch, trainer.current_epoch) == ((2, 1) if has_run else (1, 0))
    make_trainer("plain").fit(expected, make_loader())
    assert_alike(dict(module.state_dict()), dict(expected.state_dict()))
