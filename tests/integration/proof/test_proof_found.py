"""What splitting a batch changes is found on the first batch, and told; with "auto" the batch runs whole, exactly."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn import functional as F

from tests.integration.proof.telling import told
from tests.support.parity import compare, make_loader, make_trainer, ready
from tests.support.rows import compat
from tests.support.small import CLASSES, WIDTH, Small

LABELS = torch.tensor([0, 1, 2, 0, 1, 1, 2, 2])
# Rows of two micro-batches have other numbers of labels that are not 0.
MASKED = [(torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(i)), LABELS) for i in range(3)]


def masked() -> Any:
    return ready(MASKED)


Loss = Callable[[Any, Tensor, Tensor], Tensor]


class Step(Small):
    """Its loss is a function of the module, inputs and labels."""

    def __init__(
        self, loss: Callable[[Any, Tensor, Tensor], Tensor] = lambda m, x, y: F.cross_entropy(m(x), y)
    ) -> None:
        super().__init__()
        self.of = loss

    def loss(self, batch: Any) -> Tensor:
        return self.of(self, *batch)


def similarities(module: Any, x: Tensor) -> Tensor:
    return F.normalize(module.body(x), dim=1) @ F.normalize(x, dim=1).T


def masked_mean(values: Tensor, y: Tensor) -> Tensor:
    return values[y != 0].mean()


def with_ctc(module: Any, x: Tensor, y: Tensor) -> Tensor:
    logits = module(x)[:, None].expand(-1, 4, -1).log_softmax(-1).transpose(0, 1)
    lengths = (y != 0).long()
    kept = lengths > 0
    return F.ctc_loss(logits[:, kept], y[kept, None], torch.full((int(kept.sum()),), 4), lengths[kept])


def focal(module: Any, x: Tensor, y: Tensor) -> Tensor:
    p = module(x).softmax(-1).gather(1, y[:, None]).squeeze(1)
    weight = (1 - p.detach()) ** 2
    return -(weight * p.log()).sum() / weight.sum()


def dice(module: Any, x: Tensor, y: Tensor) -> Tensor:
    p, target = module(x).sigmoid(), F.one_hot(y, CLASSES).float()
    return 1 - 2 * (p * target).sum() / (p.sum() + target.sum())


def hardest(module: Any, x: Tensor, y: Tensor) -> Tensor:
    losses = F.cross_entropy(module(x), y, reduction="none")
    return losses[losses > 1.0].mean()


def standardized(module: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(module((x - x.mean(0)) / x.std(0)), y)


def balanced(module: Any, x: Tensor, y: Tensor) -> Tensor:
    shares = (module(x) + 5 * x[:, :CLASSES]).softmax(-1)
    return (
        F.cross_entropy(module(x), y)
        + CLASSES * (shares.mean(0) * F.one_hot(shares.argmax(-1), CLASSES).float().mean(0)).sum()
    )


# What couples the rows of a batch, or is a mean over something else than rows: the loss, and what is said of the cause.
LOSSES: dict[str, tuple[Loss, str]] = {
    "contrastive": (
        lambda m, x, y: F.cross_entropy(similarities(m, x) * 5, torch.arange(len(x))),
        "compares all rows with each other",
    ),
    "contrastive, by hand": (
        lambda m, x, y: (similarities(m, x).logsumexp(1) - similarities(m, x).diagonal()).mean(), "loss"
    ),
    "masked cross entropy": (
        lambda m, x, y: F.cross_entropy(m(x), y, ignore_index=0), r"entries that are not 0 of batch\[1\], . and . in"
    ),
    "masked BCE": (
        lambda m, x, y: masked_mean(F.softplus(m(x)) - m(x) * x[:, :CLASSES].sigmoid(), y),
        "a mean over the entries that are not 0",
    ),
    "masked MSE": (lambda m, x, y: masked_mean((m(x) - x[:, :CLASSES]) ** 2, y), "a mean over the entries"),
    "masked L1": (lambda m, x, y: masked_mean((m(x) - x[:, :CLASSES]).abs(), y), "a mean over the entries"),
    "masked CTC": (with_ctc, "a mean over the entries that are not 0"),
    "focal, divided by its own sum": (focal, "a mean over something of which"),
    "dice": (dice, "loss"),
    "rows that the step keeps": (hardest, "a mean over something"),
    "standardized": (standardized, "loss"),
    "load balancing": (balanced, "loss"),
}  # fmt: skip


@pytest.mark.parametrize("case", LOSSES)
def test_a_loss_that_is_another_one_for_parts_runs_whole(case: str) -> None:
    loss, cause = LOSSES[case]
    found = told(lambda: compare(lambda: Step(loss), masked(), ours={"num_microbatches": "auto"}))
    assert len(found) == 1
    assert "training_step" in found[0] or "the loss" in found[0]
    assert "So batches are not split" in found[0]
    assert re.search(cause, found[0]), found


def test_a_sum_over_rows_is_trained_as_one() -> None:
    summed = partial(Step, lambda m, x, y: F.cross_entropy(m(x), y, reduction="sum"))
    compare(summed, masked(), ours={"options": {"check_split": "error"}})


@pytest.mark.parametrize("case", ["contrastive", "masked MSE"])
def test_with_a_number_it_is_split_and_said(case: str) -> None:
    module = Step(LOSSES[case][0])
    trainer = make_trainer(num_microbatches=4)
    found = told(lambda: trainer.fit(module, masked()))
    assert len(found) == 1
    assert "Batches are split all the same" in found[0]
    assert trainer.strategy.last_step.num_microbatches == 4  # type: ignore[attr-defined]


def test_the_function_that_the_warning_names_is_the_right_one() -> None:
    (text,) = told(lambda: make_trainer(num_microbatches=4).fit(Step(LOSSES["masked MSE"][0]), masked()))
    function = eval(text.split("loss_weight=")[1].split("; ")[0].removesuffix(")"), {"float": float})
    options = {"loss_weight": function, "check_split": "error"}
    compare(lambda: Step(LOSSES["masked MSE"][0]), masked(), ours={"num_microbatches": 4, "options": options})


@compat(
    "Library",
    "torch (batch norm in training mode, several micro-batches)",
    status="differs",
    note='With "auto" batches run whole.',
)
def test_batch_norm_in_training_mode() -> None:
    class Normalizes(Small):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.norm(x))

    (found,) = told(lambda: compare(Normalizes, ours={"num_microbatches": "auto"}))
    assert "the batch norm 'norm' (BatchNorm1d) takes its statistics from each micro-batch" in found


# --- steps that would do something once per micro-batch ---------------------------------------------------------------


class Teaches(Small):
    """With an average of its weights that is moved in every step."""

    def __init__(self, *, through_data: bool = False) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.body).requires_grad_(False)
        for weight in self.teacher.parameters():
            weight.mul_(2.0)
        self.through_data = through_data

    def loss(self, batch: Any) -> Tensor:
        with torch.no_grad():
            for ours, theirs in zip(self.teacher.parameters(), self.body.parameters(), strict=True):
                (ours.data if self.through_data else ours).mul_(0.9).add_(theirs, alpha=0.1)
        return super().loss(batch) + F.mse_loss(self.body(batch[0]), self.teacher(batch[0]))


class Schedules(Small):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        self.schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return [optimizer], [{"scheduler": self.schedule, "interval": "epoch"}]

    def loss(self, batch: Any) -> Tensor:
        self.schedule.step()
        return super().loss(batch)


class Carries(Small):
    """A state of rows that goes on from batch to batch."""

    state: Tensor | None = None

    def loss(self, batch: Any) -> Tensor:
        hidden = self.body(batch[0])
        if self.state is not None and len(self.state) == len(hidden):
            hidden = hidden + self.state
        self.state = hidden.detach()
        return F.cross_entropy(self.head(hidden), batch[1])


class Quantizes(Small):
    """A buffer that each step moves, and the next one uses."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(WIDTH))

    def loss(self, batch: Any) -> Tensor:
        self.codes.lerp_(batch[0].mean(0), 0.5)
        return super().loss((batch[0] - self.codes, batch[1]))


class Knows(Small):
    """How many rows a batch has."""

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[0]).reshape(8, CLASSES), batch[1])


ONCE: dict[str, tuple[Callable[[], Any], str]] = {
    "a teacher": (Teaches, r"changes the weight 'teacher\.0\.0\.weight' \(and 7 more\) in place"),
    "a teacher, through .data": (lambda: Teaches(through_data=True), r"changes the weight 'teacher\.0\.0\.weight'"),
    "a scheduler": (Schedules, "steps a learning rate scheduler"),
    "a state of rows": (Carries, "the loss of a second step.*leaves a state in 'state'"),
    "a buffer": (Quantizes, "the loss"),
    "a known size": (Knows, r"fails on 4 rows of a batch as one micro-batch \(RuntimeError\("),
}


@pytest.mark.parametrize("case", ONCE)
def test_steps_that_cannot_be_split_run_whole(case: str) -> None:
    make_module, text = ONCE[case]
    (found,) = told(lambda: compare(make_module, masked(), ours={"num_microbatches": "auto"}))
    assert re.search(text, found), found


def test_devices_have_the_weights_that_were_put_back() -> None:
    compare(Teaches, masked(), ours={"num_microbatches": "auto", "options": {"virtual_copies": True}})


def test_a_step_that_changes_what_all_rows_share_runs_whole() -> None:
    class Scales(Small):
        def loss(self, batch: Any) -> Tensor:
            x, y, scale = batch
            return super().loss((x * scale.mul_(2.0), y))

    batches = [(x, y, torch.full((1, WIDTH), 0.5)) for x, y in MASKED]
    trainer = make_trainer(num_microbatches="auto")
    (found,) = told(lambda: trainer.fit(Scales(), ready(batches)))
    assert found.startswith("training_step changes batch[2] in place, which is 1 at element 0 for 4 rows")
    assert trainer.strategy.last_step.num_microbatches == 1  # type: ignore[attr-defined]


def test_a_batch_whose_rows_are_not_certain_runs_whole() -> None:
    class Two(Small):
        def loss(self, batch: Any) -> Tensor:
            (x, y), _ = batch
            return super().loss((x, y))

    batches = [((x, y), torch.zeros(3, 2)) for x, y in MASKED]
    with pytest.warns(UserWarning, match="one micro-batch each: exact"):
        compare(Two, ready(batches), ours={"num_microbatches": "auto"})


@compat(
    "Misuse",
    "a loss that is NaN in some micro-batches only",
    status="differs",
    note='With "auto" batches run whole.',
)
def test_a_part_without_labels() -> None:
    batches = [(x, torch.tensor([0, 0, 0, 0, 1, 2, 1, 2])) for x, _ in MASKED]
    module = Step(lambda m, x, y: F.cross_entropy(m(x), y, ignore_index=0))
    (found,) = told(lambda: make_trainer(num_microbatches=4).fit(module, ready(batches)))
    assert "nan as two" in found


def test_a_whole_batch_that_does_not_fit_is_split() -> None:
    state, row = 2 * 4 * (WIDTH * WIDTH + WIDTH), 4 * WIDTH
    options = {"virtual_copies": True, "device_memory_limit": state + 16 * 6 * row}
    trainer = make_trainer(num_microbatches="auto", options=options)
    with pytest.warns(UserWarning, match=r"is run again with 4.*changes what is trained, as was said before"):
        trainer.fit(Step(LOSSES["contrastive"][0]), make_loader(64, batch_size=64))
    assert trainer.strategy.last_step.num_microbatches == 4  # type: ignore[attr-defined]


# --- what only looks different ----------------------------------------------------------------------------------------


class Logs(Small):
    """Logs what a function makes of logits and labels, and keeps what another makes of them."""

    def __init__(self, value: Any = None, keep: Any = lambda m, logits, y: None, returned: Any = None) -> None:
        super().__init__()
        self.value, self.keep, self.returned = value, keep, returned
        self.seen: Any = 0
        self.kept: dict[str, Any] = {"rows": 0}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        self.keep(self, logits, batch[1])
        if self.value is not None:
            self.log("val", self.value(logits, batch[1]), batch_size=len(batch[1]))
        return {} if self.returned is None else self.returned(logits, batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), **self.validation_step(batch, batch_idx)}


def of_class(logits: Tensor, y: Tensor) -> Tensor:
    return logits.softmax(-1)[y == 2, 2].sum() / (y == 2).sum().clamp(min=1)


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "perplexity": ({"value": lambda p, y: F.cross_entropy(p, y).exp()}, "logged as 'val'.*no mean over rows"),
    "RMSE": ({"value": lambda p, y: (p - y[:, None]).square().mean().sqrt()}, "logged as 'val'.*no mean over rows"),
    "accuracy of a class": ({"value": of_class}, "logged as 'val'"),
    "a largest value": ({"value": lambda p, y: p.max()}, "logged as 'val'.*no mean over rows"),
    "a count": ({"value": lambda p, y: float((y == 2).sum())}, "logged as 'val'.*a count or a sum"),
    "a number": (
        {"keep": lambda m, p, y: setattr(m, "seen", m.seen + len(y))},
        "leaves in 'seen' differs: seen is 4 for",
    ),
    "a number in a dict": (
        {"keep": lambda m, p, y: m.kept.update(rows=len(y))},
        r"leaves in 'kept' differs: kept\['rows'\]",
    ),
    "an output": ({"returned": lambda p, y: {"top": p.max()}}, r"returns differs: output\['top'\]"),
}


@pytest.mark.parametrize("case", OTHERS)
@pytest.mark.parametrize("kind", ["fit", "validate"])
def test_what_looks_different_is_said_once_and_split(case: str, kind: str) -> None:
    arguments, text = OTHERS[case]
    trainer = make_trainer(num_microbatches="auto")
    found = told(lambda: getattr(trainer, kind)(Logs(**arguments), masked()))
    assert len(found) == 1
    assert re.search(text, found[0]), found
    assert "So batches are not split" not in found[0]
    assert trainer.strategy.last_step.num_microbatches == 4  # type: ignore[attr-defined]


# --- the option -------------------------------------------------------------------------------------------------------


def test_the_option() -> None:
    def fit(check: str, case: str = "contrastive") -> Any:
        trainer = make_trainer(num_microbatches="auto", options={"check_split": check})
        return told(lambda: trainer.fit(Step(LOSSES[case][0]), masked())), trainer.strategy.last_step  # type: ignore[attr-defined]

    (found,), step = fit("warn")
    assert "Batches are split all the same" in found
    assert step.num_microbatches == 4
    found, step = fit("off")
    assert not found
    assert step.num_microbatches == 4
    with pytest.raises(MisconfigurationException, match=r"the loss, which is .* Ways out: .*check_split='warn'"):
        fit("error")
    trainer = make_trainer(options={"check_split": "error"})
    with pytest.raises(MisconfigurationException, match="logged as 'val'"):
        trainer.fit(Logs(**OTHERS["perplexity"][0]), masked())


@pytest.mark.parametrize("value", ["maybe", None, True, 1])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=f"check_split={value!r}: use one of 'exact', 'warn', 'error', 'off'"):
        make_trainer(options={"check_split": value})
