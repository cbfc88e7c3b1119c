"""What ranks compute against plain Lightning on one device with the batches of all ranks together.

Ranks differ in rows, in label tokens, in micro-batches, and in what they use of the model.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_roundpipe.integration import overlap
from tests.support.forks import Forks
from tests.support.parity import Watch, assert_alike, make_trainer, ready
from tests.support.rank_runs.launch import place, run_ranks, values_of_ranks
from tests.support.small import CLASSES, WIDTH, Small

STEPS = 5
LENGTH = 4
# Rows of each rank in a batch.
PARTS = {2: (5, 2), 3: (3, 1, 4)}

Batch = dict[str, Tensor]


class Tokens(Small):
    """A mean over labels that are not -100; embeddings are used by a unit and, as weights of the head, by user code."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.position = nn.Parameter(torch.randn(WIDTH))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        hidden = self.body(batch["x"] + self.position + self.embedding(batch["tokens"]))
        logits = F.linear(hidden, self.embedding.weight)
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        self.log("loss", loss, batch_size=len(logits))
        return loss


class Weighed(Small):
    """A mean over samples with weights of their own."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        losses = F.cross_entropy(self(batch["x"][:, 0]), batch["tokens"][:, 0], reduction="none")
        return (losses * batch["weights"]).sum() / batch["weights"].sum()


class Summed(Small):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch["x"][:, 0]), batch["tokens"][:, 0], reduction="sum")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02)


class Teaching(Small):
    """Moves an average of its weights in every step, which only a whole batch does once."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.body).requires_grad_(False)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        with torch.no_grad():
            for ours, theirs in zip(self.teacher.parameters(), self.body.parameters(), strict=True):
                ours.lerp_(theirs, 0.1)
        x = batch["x"][:, 0]
        return F.cross_entropy(self(x), batch["tokens"][:, 0]) + F.mse_loss(self.body(x), self.teacher(x))


class Knowing(Small):
    """Knows how many rows batches have; those of rank 0 show it on the first batch, and those of the others do not."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        rows = len(batch["x"])
        if rows not in (7, 5, 2) and not (rows == 1 and batch_idx == 0):
            raise ValueError(f"{rows} rows")
        return F.cross_entropy(self(batch["x"][:, 0]), batch["tokens"][:, 0])


class Mean(Small):
    """A mean over samples, with state in the optimizer, and a part that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.body[1].requires_grad_(False)
        self.body[3].requires_grad_(False)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        return F.cross_entropy(self(batch["x"][:, 0]), batch["tokens"][:, 0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-4)


class Skipping(Mean):
    """Has no loss for rows of a negative weight, and so on some ranks none at all in some steps."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        counts = (batch["x"][:, 0, 0] > 1.0).float()
        if not counts.any():
            return None
        losses = F.cross_entropy(self(batch["x"][:, 0]), batch["tokens"][:, 0], reduction="none")
        return (losses * counts).sum() / len(counts)


class Branching(Small):
    """Has a layer that few rows take, so that a rank may not use it, one that none takes, and a weight in no unit."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x = batch["x"][:, 0]
        takes = x[:, 0] > 0.8
        if takes.any():
            x = torch.where(takes[:, None], self.branch(x), x)
        return F.cross_entropy(self(x * self.scale), batch["tokens"][:, 0])


class Adversaries(Small):
    """A GAN: two optimizers, two backwards, in each of which the weights of the other part are at rest."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        x = batch["x"][:, 0]
        makes, judges = self.optimizers()
        with makes.toggle_model():
            loss = -self.critic(self.body(x)).mean()
            self.manual_backward(loss)
            makes.step()
            makes.zero_grad()
        with judges.toggle_model():
            loss = F.softplus(self.critic(self.body(x).detach())).mean() + F.softplus(-self.critic(x)).mean()
            self.manual_backward(loss)
            self.clip_gradients(judges, gradient_clip_val=0.05)
            judges.step()
            judges.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), lr=0.01, eps=1e-4) for part in (self.body, self.critic)]


class Accumulating(Small):
    """Adds gradients of two batches up by hand: those of the first stay on the rank, or not (in batch 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer = self.optimizers()
        is_last = batch_idx % 2 == 1
        with optimizer.toggle_model(sync_grad=is_last or batch_idx == 2):
            self.manual_backward(F.cross_entropy(self(batch["x"][:, 0]), batch["tokens"][:, 0]))
        with optimizer.toggle_model(sync_grad=is_last):
            self.manual_backward(self(batch["x"][:, 1]).square().mean())
        if is_last:
            optimizer.step()
            optimizer.zero_grad()


def weight_of(batch: Batch) -> float:
    return float(batch["weights"].sum())


@dataclass
class Case:
    make: Callable[[], L.LightningModule]
    settings: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    tolerances: dict[str, float] = field(default_factory=lambda: {"rtol": 1e-3, "atol": 1e-5})
    min_bytes: int | None = None
    num_microbatches: int | str | None = None


CASES = {
    "label tokens": Case(Tokens, options={"virtual_copies": True}),
    "label tokens, accumulated": Case(Tokens, {"accumulate_grad_batches": 2}, {"loss_weight": "label_tokens"}),
    "own weights": Case(Weighed, options={"loss_weight": weight_of}),
    "sums": Case(Summed, options={"loss_weight": "sum"}),
    "sums, found on the first batch": Case(Summed),
    "whole batches": Case(Teaching, num_microbatches="auto"),
    "whole batches, as one rank has found": Case(Knowing, num_microbatches="auto"),
    "frozen parts": Case(Mean),
    "clipped, accumulated": Case(Mean, {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}, min_bytes=0),
    "mixed precision": Case(Mean, {"precision": "bf16-mixed"}, {"virtual_copies": True}, {"rtol": 0.1, "atol": 0.02}),
    "bf16 between ranks": Case(Mean, options={"reduce_dtype": "bf16"}, tolerances={"rtol": 0.1, "atol": 0.01}),
    "low precision": Case(
        Weighed,
        {"precision": "bf16-true"},
        {"loss_weight": weight_of},
        {"rtol": 0.1, "atol": 0.02, "of_largest": 0.1},
    ),
    "no loss on some ranks": Case(Skipping),
    "branches": Case(Branching),
    "adversaries": Case(Adversaries),
    "accumulated by hand": Case(Accumulating),
}
# Those in which ranks have different things to say: with a third one, two may differ from the first.
ON_THREE = ("label tokens", "no loss on some ranks", "branches")


def batches(size: int, *, has_labels: bool) -> list[Batch]:
    """The batches of all ranks together: in the third, rank 0 has no label, in the fourth no rank lacks one."""
    generator = torch.Generator().manual_seed(1)
    rows = sum(PARTS[size])
    made = []
    for index in range(STEPS):
        labels = torch.randint(CLASSES, (rows, LENGTH), generator=generator)
        if index != 3:
            labels[torch.rand(labels.shape, generator=generator) < 0.4] = -100
        if index == 2:
            labels[: PARTS[size][0]] = -100
        made.append(
            {
                "x": torch.randn(rows, LENGTH, WIDTH, generator=generator),
                "tokens": torch.randint(CLASSES, (rows, LENGTH), generator=generator),
                "weights": torch.rand(rows, generator=generator) + 0.1,
                **({"labels": labels} if has_labels else {}),
            }
        )
    return made


def rows_of_this_rank(*, has_labels: bool = False) -> list[Batch]:
    rank, size = place()
    start = sum(PARTS[size][:rank])
    rows = slice(start, start + PARTS[size][rank])
    return [{name: value[rows] for name, value in batch.items()} for batch in batches(size, has_labels=has_labels)]


def train(case: Case, kind: str, data: Sequence[Batch], **settings: Any) -> dict[str, Any]:
    """What must be the same on every rank, and in the plain training; and what was logged."""
    torch.manual_seed(3)
    module, watch = case.make(), Watch()
    trainer = make_trainer(kind, callbacks=[watch], **{**case.settings, **settings})
    trainer.fit(module, ready(list(data)))
    return {
        "state": {name: value.clone() for name, value in module.state_dict().items()},
        "gradients": watch.gradients,
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "steps": trainer.global_step,
    }


def trained_on_a_rank(name: str, **settings: Any) -> dict[str, Any]:
    case, rank = CASES_OF_RANKS[name], int(os.environ["RANK"])
    with pytest.MonkeyPatch.context() as patch:
        if case.min_bytes is not None:
            patch.setattr(overlap, "MIN_BYTES", case.min_bytes)
        return train(
            case,
            "roundpipe",
            rows_of_this_rank(has_labels=case.make is Tokens),
            devices=2 * int(os.environ["WORLD_SIZE"]),
            num_microbatches=case.num_microbatches or 2 + rank,
            options=case.options,
            use_distributed_sampler=False,
            **settings,
        )


def trained_plainly(name: str, size: int) -> dict[str, Any]:
    case = CASES[name]
    return train(case, "plain", batches(size, has_labels=case.make is Tokens))


def all_trained(names: Sequence[str]) -> dict[str, Any]:
    """One training after the other, between which ranks stay connected; the last one is repeated with the same bits."""
    found: dict[str, Any] = {name: trained_on_a_rank(name) for name in names}
    # Plans are not made anew from what was measured.
    found["twice"] = [trained_on_a_rank("label tokens", deterministic=True)["state"] for _ in range(2)]
    return found


OfRanks = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def of_ranks(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> OfRanks:
    """By number of ranks and by rank, what came of each case."""
    folder = tmp_path_factory.mktemp("ranks")
    names = {2: list(CASES_OF_RANKS), 3: ON_THREE}
    return {size: values_of_ranks(forks, folder / str(size), size, all_trained, names[size]) for size in names}


@pytest.mark.parametrize(("name", "size"), [*((name, 2) for name in CASES), *((name, 3) for name in ON_THREE)])
def test_ranks_train_as_one_device_with_the_batches_of_all(of_ranks: OfRanks, name: str, size: int) -> None:
    expected = trained_plainly(name, size)
    assert expected["steps"] > 0
    found = [one[name] for one in of_ranks[size]]
    for one in found:
        assert_alike(one, expected, **CASES[name].tolerances)
        for parameter, value in one["state"].items():
            assert torch.equal(value, found[0]["state"][parameter]), parameter


STALE = Case(Mean, {"gradient_clip_val": 0.05}, {"optimizer_overlap": "stale", "stale_after_steps": 1})
CASES_OF_RANKS = {**CASES, "stale": STALE}


def test_stale_steps_of_ranks_are_those_of_one_process(of_ranks: OfRanks) -> None:
    expected = train(STALE, "roundpipe", batches(2, has_labels=False), options=STALE.options)
    for one in of_ranks[2]:
        assert_alike(one["stale"], expected, **STALE.tolerances)


def test_trainings_that_are_repeated_end_with_the_same_bits(of_ranks: OfRanks) -> None:
    for once, again in (one["twice"] for ranks in of_ranks.values() for one in ranks):
        assert_alike(once, again, rtol=0.0, atol=0.0)


# --- ranks that do different things -------------------------------------------------------------------------------


class MoreBackwards(Small):
    """One backward more on rank 0, in the second step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        for _ in range(2 if self.global_rank == 0 and batch_idx == 1 else 1):
            self.manual_backward(self(batch["x"][:, 0]).square().mean())
        self.optimizers().step()


class Blocking(Mean):
    """Rank 1 takes steps for those that only accumulate."""

    def on_train_start(self) -> None:
        self.trainer.accumulate_grad_batches = 1 + self.global_rank


DIFFERENT: dict[str, tuple[Callable[[], L.LightningModule], str]] = {
    "backwards": (MoreBackwards, "rank 1 has come for the end of training step 1 of epoch 0"),
    "accumulation": (Blocking, "rank 1 has come for training step 0 of epoch 0 without a sum over ranks"),
}


def different_on_ranks(name: str) -> None:
    train(Case(DIFFERENT[name][0]), "roundpipe", rows_of_this_rank(), use_distributed_sampler=False)


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_do_different_things_end_with_an_error_that_says_what(
    forks: Forks, tmp_path: Path, name: str
) -> None:
    ends = run_ranks(forks, tmp_path, 2, different_on_ranks, name)
    for end in ends:
        assert end.status == 1
        assert DIFFERENT[name][1] in end.output
