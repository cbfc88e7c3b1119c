"""``verify=N``: training steps beside plain autograd. Quiet where all is well, without a trace; a fault is named."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torchmetrics import MeanMetric

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.integration.verify import VerificationError
from lightning_roundpipe.usercode.lock import current
from lightning_roundpipe.weights import gradients
from tests.support.huggingface import Task, adapted, batches, padded
from tests.support.identical import assert_identical
from tests.support.late_updates import Late
from tests.support.models import Logs
from tests.support.parity import Run, fit, make_loader
from tests.support.small import CLASSES, WIDTH, Small

NUM_STEPS = 2


def verified(
    make_module: Callable[[], Any], data: Any = None, *, verify: int | None = NUM_STEPS, **settings: Any
) -> Run:
    options = {**settings.pop("options", {}), "verify": verify}
    return fit("roundpipe", make_module, make_loader() if data is None else data, options=options, **settings)


# --- quiet where all is well ---------------------------------------------------------------------------------------


class Normed(Small):
    """With statistics of batches, a spectral norm, and a buffer that the step counts in."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*self.body, nn.BatchNorm1d(WIDTH), parametrizations.spectral_norm(nn.Linear(6, 6)))
        self.register_buffer("seen", torch.zeros(1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.add_(len(batch[0]))
        return super().training_step(batch, batch_idx)


class Watched(Small):
    """Logs, has metrics, changes its batch, and has hooks on a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = MeanMetric()
        self.num_hooks = [0, 0]
        self.head.weight.register_hook(lambda _: self.count(0))
        self.head.bias.register_post_accumulate_grad_hook(lambda _: self.count(1))

    def count(self, index: int) -> None:
        self.num_hooks[index] += 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        x.mul_(0.5)
        loss = F.cross_entropy(self(x), y)
        self.metric(loss.detach())
        self.log("metric", self.metric, on_step=True, on_epoch=True)
        self.log("loss", loss, prog_bar=True)
        for logger in self.loggers:
            logger.log_metrics({"direct": float(loss.detach())})
        return {"loss": loss, "rows": x.sum(1)}


class Tied(Small):
    """The head uses the weight of the embedding, which has sparse gradients in ``Sparse``."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH, sparse=sparse)
        if not sparse:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x + self.embedding(torch.arange(len(x)) % CLASSES)))


class Sparse(Tied):
    def __init__(self) -> None:
        super().__init__(sparse=True)


class Joins(Small):
    """A weight that takes part in some batches only."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(CLASSES))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.cross_entropy(self(x) * self.scale if batch_idx % 2 else self(x), y)


class Labelled(Small):
    """The mean over labels of a micro-batch that has none is NaN, and does not count."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        is_label = batch["labels"] >= 0
        losses = F.cross_entropy(self(batch["x"]), batch["labels"].clamp(min=0), reduction="none")
        return (losses * is_label).sum() / is_label.sum()


def labelled() -> list[Any]:
    return [{"x": x, "labels": y.where(torch.arange(len(y)) > 2, -100)} for x, y in make_loader()]


class Skips(Small):
    """No loss for some micro-batches, weights that get no gradient, and one that only an optimizer knows."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)
        self.shift = [torch.zeros(CLASSES, requires_grad=True)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return None if x[0, 0] < 0.0 else F.cross_entropy(self(x) + self.shift[0], y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), *self.shift], lr=0.1)


def language_model() -> Task:
    return Task(adapted())


CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "MLP": (Small, {}),
    "one micro-batch": (Small, {"num_microbatches": 1}),
    "copies": (Small, {"options": {"virtual_copies": True}}),
    "sums": (Small, {"options": {"loss_weight": "sum"}}),
    "accumulated": (Joins, {"accumulate_grad_batches": 2}),
    "labels": (Labelled, {}),
    "stale": (Small, {"options": {"optimizer_overlap": "stale"}}),
    "norms": (Normed, {}),
    "what is watched": (Watched, {}),
    "tied weights": (Tied, {}),
    "sparse gradients": (Sparse, {}),
    "skipped": (Skips, {"accumulate_grad_batches": 2}),
    "bf16-mixed": (Small, {"precision": "bf16-mixed"}),
    "bf16-true": (Small, {"precision": "bf16-true"}),
    "64-true": (Small, {"precision": "64-true"}),
    "LoRA": (language_model, {}),
    "LoRA, bf16-mixed": (language_model, {"precision": "bf16-mixed", "options": {"virtual_copies": True}}),
}


@pytest.mark.parametrize("case", CASES)
def test_verified_training_is_quiet_and_the_same_to_the_last_bit(case: str, caplog: pytest.LogCaptureFixture) -> None:
    make_module, settings = CASES[case]
    data = batches(padded) if make_module is language_model else labelled() if make_module is Labelled else None
    with warnings.catch_warnings(), caplog.at_level("INFO"):
        warnings.filterwarnings("error", message="verify")
        run = verified(make_module, data, **settings)
        told = [record.message for record in caplog.records if record.message.startswith("verify=2: training step")]
        plain = verified(make_module, data, verify=0, **settings)
    assert len(told) == NUM_STEPS, told
    assert all("gives what plain autograd gives" in message for message in told)
    assert_identical(run.results, plain.results)
    assert_identical(getattr(run.module, "num_hooks", None), getattr(plain.module, "num_hooks", None))


def test_gradients_that_are_there_stay(tmp_path: Any) -> None:
    """With accumulation those of batches before, to which the plain run must not add; loggers hear nothing of it."""
    logger = CSVLogger(tmp_path)
    run = verified(Watched, accumulate_grad_batches=3, logger=logger, num_microbatches=2)
    assert run.trainer.loggers == [logger]
    plain = verified(Watched, accumulate_grad_batches=3, verify=0, num_microbatches=2)
    assert_identical(run.watch.gradients, plain.watch.gradients)
    rows = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text()
    assert rows.count("\n") == 1 + 3 * 2 + 1  # of each micro-batch, and the epoch


def test_updates_that_are_under_way_are_waited_for(late: Late) -> None:
    run = verified(Small)
    assert late.num_buckets > 0
    assert_identical(run.results, verified(Small, verify=0).results)


# --- faults --------------------------------------------------------------------------------------------------------


class Counts(nn.Linear):
    """A unit that keeps another count in the pipeline."""

    def __init__(self) -> None:
        super().__init__(CLASSES, CLASSES)
        self.register_buffer("count", torch.zeros(1))
        self.fault = ""

    def forward(self, x: Tensor) -> Tensor:
        self.count += 2.0 if current() is not None and self.fault == "buffer" else 1.0
        return super().forward(x)


class Elsewhere(Small):
    """Computes something else in the pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.last = Counts()
        self.fault = ""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(super().forward(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        is_wrong = current() is not None
        if not is_wrong and self.fault == "fails there":
            raise ValueError("no such kernel")
        return self.loss(batch) * (1.01 if is_wrong and self.fault == "loss" else 1.0)


def elsewhere(fault: str) -> Elsewhere:
    module = Elsewhere()
    module.fault = module.last.fault = fault
    return module


@pytest.mark.parametrize(
    ("fault", "match"),
    [
        ("loss", r"the loss of micro-batch 0 is \d\.\d+, and not \d\.\d+; .* 'body.0.0.bias' is off .*; and 9 more of"),
        ("buffer", r"the buffer 'last.count' is off by up to 3, where its largest entry is 3\."),
        ("fails there", r"plain autograd on the host has failed, and the pipeline has not: ValueError: no such kernel"),
    ],
)
def test_steps_that_compute_something_else_in_the_pipeline_are_an_error(fault: str, match: str) -> None:
    with pytest.raises(VerificationError, match=f"^verify=2: training step 0 of epoch 0 .*{match}"):
        verified(lambda: elsewhere(fault))


def test_a_gradient_that_is_wrong_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is one percent too large, in the second step."""
    module, total = Small(), gradients._total
    steps = iter((1.0, 1.01))
    monkeypatch.setattr(
        gradients,
        "_total",
        lambda master, *rest: total(master, *rest) * (next(steps) if master is module.body[2][0].weight else 1.0),
    )
    with pytest.raises(VerificationError) as caught:
        verified(lambda: module)
    text = str(caught.value)
    assert text.startswith("verify=2: training step 1 of epoch 0 (3 micro-batches) differs from plain autograd")
    assert "the gradient of 'body.2.0.weight' is off by up to " in text
    assert "more" not in text
    for remedy in ("`roundpipe doctor`", "units=[...]", "num_microbatches=1"):
        assert remedy in text


def test_a_gradient_that_is_lost_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module, take = Small(), gradients.GradientStore.take

    def without_head(self: Any) -> Any:
        return {master: gradient for master, gradient in take(self).items() if master is not module.head.bias}

    monkeypatch.setattr(gradients.GradientStore, "take", without_head)
    with pytest.raises(VerificationError, match=r"the gradient of 'head\.bias' is missing, and is off by up to 0\."):
        verified(lambda: module)
    with pytest.warns(UserWarning, match=r"^a micro-batch of 5 rows differs .*'head\.bias' is missing"):
        verified(lambda: module, verify=None)
    verified(lambda: module, verify=0)  # nobody notices


def test_gradients_that_are_rounding_alone_are_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as that of an attention key's bias: a wrong one that is far below all others is let pass."""
    module, take = Small(), gradients.GradientStore.take
    module.register_parameter("offset", nn.Parameter(torch.zeros(())))
    module.loss = lambda batch: Small.loss(module, batch) + 1e-9 * module.offset  # type: ignore[method-assign]

    def doubled(self: Any) -> Any:
        return {
            master: 2 * gradient if master is module.offset else gradient for master, gradient in take(self).items()
        }

    monkeypatch.setattr(gradients.GradientStore, "take", doubled)
    verified(lambda: module)


class CountsOutside(Small):
    """Leaves another value in the pipeline, as code may whose result depends on the order of the micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count += 1.0 if current() is None else 2.0
        return super().training_step(batch, batch_idx)


def test_buffers_outside_of_units_are_compared_where_they_have_one_order() -> None:
    verified(CountsOutside)
    with pytest.raises(VerificationError, match="with the same rows: the buffer 'count' is off by up to 1,"):
        verified(CountsOutside, num_microbatches=1)


# --- what cannot be compared ---------------------------------------------------------------------------------------


class DrawsOutside(Logs):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return super().training_step((x + torch.rand(len(x), 1), y), batch_idx)


class DrawsElsewhere(Logs):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return super().training_step((x * random.random(), y), batch_idx)


@pytest.mark.parametrize(
    "make_module", [lambda: Small(0.5), DrawsOutside, DrawsElsewhere], ids=["unit", "step", "random"]
)
def test_steps_that_draw_are_not_compared_which_is_said_once(make_module: Any) -> None:
    random.seed(0)
    with pytest.warns(UserWarning, match=r"verify=2: training step 0 of epoch 0 .* it draws random") as seen:
        run = verified(make_module)
    assert sum("verify=" in str(warning.message) for warning in seen) == 1
    drawn, others = torch.get_rng_state(), random.getstate()
    random.seed(0)
    assert_identical(run.results, verified(make_module, verify=0).results)
    assert torch.equal(drawn, torch.get_rng_state())
    assert others == random.getstate()


class Iterates(Small):
    def training_step(self, dataloader_iter: Any) -> Any:
        return self.loss(next(dataloader_iter)[0])


def test_steps_that_take_batches_themselves_are_not_compared() -> None:
    with pytest.warns(UserWarning, match="verify=2: .* it takes its batches from an iterator"):
        verified(Iterates)


class Manual(Small):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Teacher(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            self.head.bias.mul_(0.9)
        return super().training_step(batch, batch_idx)


def test_manual_optimization_is_refused() -> None:
    with pytest.raises(
        MisconfigurationException, match=r"verify=2: steps with manual optimization .* Leave verify out"
    ):
        verified(Manual)


def test_steps_that_change_weights_are_put_back() -> None:
    verified(Teacher, num_microbatches=1)


class Wrong(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise KeyError("of the user")


def test_errors_of_the_step_are_those_of_the_user() -> None:
    with pytest.raises(KeyError, match="of the user"):
        verified(Wrong)


@pytest.mark.parametrize("value", [-1, True, "x", 1.5])
def test_other_values_are_errors_that_name_the_option(value: Any) -> None:
    with pytest.raises(ValueError, match=f"^verify={value!r}: use an integer >= 0 \\(how many training steps"):
        RoundPipeStrategy(verify=value)
