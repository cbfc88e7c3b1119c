"""Mistakes with batches, results, options and Trainers: a clear error, or the right result all the same."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.planning import CallCost, CostProfile
from tests.compatibility.mistakes.refusals import assert_refused, with_step
from tests.support.loaders import Loader
from tests.support.parity import COPIES, assert_alike, both_refuse, compare, fit, make_loader, make_trainer
from tests.support.rows import compat
from tests.support.small import CLASSES, WIDTH, Small

# --- batches ---------------------------------------------------------------------------------------------------------


@compat("Misuse", "the batch changed in place in `training_step`")
@pytest.mark.parametrize("virtual_copies", [False, True])
def test_batch_changed_in_place(virtual_copies: bool) -> None:
    """Units compute with the masters, or with copies of them."""
    options: dict[str, Any] = {"virtual_copies": virtual_copies}

    class Scales(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            batch[0].mul_(2).add_(1)
            return self.loss(batch)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.seen = batch[0]

    plain, ours = compare(Scales, ours={"options": options})
    assert torch.equal(ours.module.seen, plain.module.seen)
    # One stage keeps the graphs of all micro-batches with what they were made of.
    profile = CostProfile(tuple(CallCost(name, 1.0, 2.0) for name in (*(f"body.{i}.0" for i in range(4)), "head")))
    settings: dict[str, Any] = {"options": {**options, "cost_profile": profile}, "devices": 1}
    in_one_stage = fit("roundpipe", Scales, make_loader(), **settings)
    assert_alike(in_one_stage.results, plain.results)
    assert in_one_stage.trainer.strategy.last_step.partition.num_stages == 1


@compat(
    "Misuse",
    "a tensor changed in place that all micro-batches share",
    status="refused",
    note="Change a copy of it.",
)
def test_shared_tensor_changed_in_place() -> None:
    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        batch["more"][0].mul_(0.5)
        return self.loss((batch["x"] * batch["more"][0], batch["y"]))

    def batches() -> Loader:
        return Loader([{"x": x, "y": y, "more": [torch.ones(1, WIDTH)]} for x, y in make_loader()])

    message = assert_refused(
        with_step(step), r"changes the tensor batch\['more'\]\[0\] in place.*clone", loader=batches(), after=0
    )
    assert "3 times" in message


class Sample:
    """One row, in an object that cannot be pickled."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.lock = x, y, threading.Lock()


@compat("Misuse", "batches that cannot be pickled")
def test_batches_that_cannot_be_pickled() -> None:
    class Stacks(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss((torch.stack([sample.x for sample in batch]), torch.stack([sample.y for sample in batch])))

    samples = Loader([[Sample(a, b) for a, b in zip(x, y, strict=True)] for x, y in make_loader()])
    with pytest.raises(TypeError, match="pickle"):
        pickle.dumps(samples.batches[0])
    compare(Stacks, samples)


@compat("Misuse", "batch norm and a batch of one row; batch norm and fewer rows than twice the micro-batches")
def test_batch_norm_and_few_rows() -> None:
    class Normalizes(Small):
        def __init__(self) -> None:
            super().__init__()
            self.body[0].append(nn.BatchNorm1d(WIDTH))

    trainer = make_trainer()
    trainer.fit(Normalizes(), make_loader(11))  # the last batch has 3 rows
    assert trainer.global_step == 2

    def act(kind: str) -> None:
        trainer = make_trainer(kind)
        try:
            trainer.fit(Normalizes(), make_loader(9))  # the last batch has 1
        finally:
            assert trainer.global_step == 1

    both_refuse(act, ValueError, "more than 1 value per channel")


@compat(
    "Misuse",
    "code that needs several rows, in micro-batches of one",
    status="differs",
    note="The error of the code, with a note that names `num_microbatches` (Python 3.11 and later).",
)
def test_too_few_rows_for_the_code() -> None:
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


@pytest.mark.skipif(not hasattr(BaseException, "add_note"), reason="notes on errors need Python 3.11")
def test_rows_that_the_code_counts_on() -> None:
    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return self.loss((x + torch.zeros(8, 1), y))

    with pytest.raises(RuntimeError, match="size of tensor") as caught:
        make_trainer(num_microbatches=2).fit(with_step(step), make_loader())

    assert "8 rows was split into 2 micro-batches of 4 or more" in caught.value.__notes__[0]
    assert caught.value.__notes__[0].endswith("or use num_microbatches=1.")


@compat(
    "Misuse",
    "`batch_size=1`",
    status="differs",
    note="A warning: there is nothing to pipeline.",
)
def test_nothing_to_pipeline() -> None:
    with pytest.warns(UserWarning, match=r"has 1 row, so.*batch_size of 3 or more") as caught:
        compare(Small, make_loader(4, 1))
    assert sum("nothing" in str(w.message) or "single micro-batch" in str(w.message) for w in caught) == 1


def test_no_hint_where_it_would_be_wrong(recwarn: pytest.WarningsRecorder) -> None:
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
        (lambda loss: loss.item(), MisconfigurationException, "must return a Tensor, a dict, or None"),
        (lambda loss: {"los": loss}, MisconfigurationException, "the 'loss' key needs to be present"),
        (lambda loss: {"loss": loss.item()}, MisconfigurationException, "'loss' is of type float: it must be a tensor"),
        (lambda loss: (loss, 1), MisconfigurationException, "must return a Tensor, a dict, or None"),
        (lambda loss: loss.repeat(2), ValueError, r"loss of shape \(2,\): it must be a scalar"),
        (lambda loss: loss.detach(), RuntimeError, "does not require a gradient"),
    ],
    ids=["float", "dict", "float in a dict", "tuple", "vector", "detached"],
)
def test_wrong_results(wrong: Any, error: Any, match: str) -> None:
    assert_refused(with_step(lambda self, batch, batch_idx: wrong(self.loss(batch))), match, error)


class Lazy(Small):
    """Some of its modules know the width of what they get from the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.body[1].append(nn.LazyBatchNorm1d(affine=False))
        self.head = nn.LazyLinear(CLASSES)


@compat(
    "Misuse",
    "lazy modules (`nn.LazyLinear`)",
    status="refused",
    note="Call the module once in `configure_model`.",
)
def test_lazy_modules() -> None:
    for run in ("fit", "validate"):
        module = Lazy()
        module.validation_step = module.training_step
        with pytest.raises(MisconfigurationException, match=r"'body.1.3' \(LazyBatchNorm1d\) is lazy.*configure_model"):
            getattr(make_trainer(), run)(module, make_loader())


@compat("Misuse", "lazy modules that are called once in `configure_model`")
def test_lazy_modules_that_are_called_before() -> None:
    class Called(Lazy):
        def configure_model(self) -> None:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(3)
                self.eval()(torch.zeros(2, WIDTH))
                self.train()

    compare(Called, ours={**COPIES, "num_microbatches": 1})


@compat(
    "Misuse",
    "`torch.compile(module)`",
    status="refused",
    note="Compile the units: `compile_units=True`.",
)
@compat(
    "LightningModule hook",
    "hooks of a module compiled as a whole",
    "refused",
    "Compile the units: `compile_units=True`.",
)
def test_compiled_module() -> None:
    compiled = torch.compile(Small(), backend="eager")
    assert_refused(
        compiled, "compiled model is incompatible with the current strategy: `RoundPipeStrategy`", RuntimeError
    )


@compat(
    "Misuse",
    '`strategy="roundpipe"` without `import lightning_roundpipe`',
    status="refused",
    note="Import the package first.",
)
def test_forgotten_import() -> None:
    # Its own methods would make a strategy of the entry.
    entry = dict.pop(StrategyRegistry, "roundpipe")
    try:
        with pytest.raises(ValueError, match="invalid strategy name: `strategy='roundpipe'`"):
            L.Trainer(strategy="roundpipe", accelerator="cpu")
    finally:
        dict.__setitem__(StrategyRegistry, "roundpipe", entry)
    assert type(L.Trainer(strategy="roundpipe", accelerator="cpu", logger=False).strategy) is RoundPipeStrategy


@compat(
    "Misuse",
    "accelerators and devices that make no sense",
    status="refused",
    note="The error comes with the Trainer.",
)
@pytest.mark.parametrize(
    "settings",
    [
        {"accelerator": "cpu", "devices": 0},
        {"accelerator": "cpu", "devices": [0, 1]},
        {"accelerator": "cpu", "devices": "two"},
        {"accelerator": "roundpipe", "devices": 0},
        {"accelerator": "roundpipe", "devices": 1.5},
        {"accelerator": "nothing"},
    ],
    ids=lambda settings: " ".join(map(str, settings.values())),
)
def test_senseless_devices(settings: dict[str, Any]) -> None:
    with pytest.raises((MisconfigurationException, TypeError, ValueError)) as caught:
        L.Trainer(strategy="roundpipe", logger=False, **settings)
    assert any(word in str(caught.value) for word in ("devices", settings["accelerator"]))


@compat("Misuse", "`deepcopy` of a Trainer that has run; `pickle` of a Trainer")
@pytest.mark.parametrize("has_run", [False, True])
def test_copies_of_a_trainer(has_run: bool) -> None:
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
