"""Means over rows and over labels, in batches that have labels of which some are -100."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.huggingface import IGNORED, VOCAB, Task, adapted, batches, build, compare_tasks, lora, padded
from tests.support.parity import Run

Batch = dict[str, Tensor]


def rows() -> list[Any]:
    """Neither 3 nor 5 micro-batches divide them."""
    return batches(padded, (7, 7, 5))


def pairs() -> list[Any]:
    """A chosen and a rejected answer in each row."""
    return [{key: torch.stack([value, value.flip(0)], 1) for key, value in batch.items()} for batch in rows()]


class OwnLoss(Task):
    """Keeps the labels to itself."""

    def logits_of(self, batch: Batch) -> Tensor:
        logits: Tensor = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return logits

    def log_probs(self, batch: Batch) -> Tensor:
        """Of each token with a label, 0 elsewhere."""
        logits, labels = self.logits_of(batch)[:, :-1], batch["labels"][:, 1:]
        return -F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=IGNORED)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.own_loss(dict(batch))
        self.log("loss", loss, batch_size=len(batch["input_ids"]))
        return loss


class MeanOfRows(OwnLoss):
    def own_loss(self, batch: Batch) -> Tensor:
        counted = (batch["labels"][:, 1:] != IGNORED).sum(-1)
        return (-self.log_probs(batch).sum(-1) / counted.clamp(min=1)).mean()


class Preferences(OwnLoss):
    """DPO without a reference, on rows that are made flat."""

    def own_loss(self, batch: Batch) -> Tensor:
        flat = {key: value.flatten(0, 1) for key, value in batch.items()}
        chosen, rejected = self.log_probs(flat).sum(-1).unflatten(0, (-1, 2)).unbind(1)
        return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


class Distilled(OwnLoss):
    """A divergence that is added up over everything and divided by the rows."""

    def own_loss(self, batch: Batch) -> Tensor:
        teacher = F.one_hot(batch["input_ids"].roll(1, 1), VOCAB).float().softmax(-1)
        return F.kl_div(self.logits_of(batch).log_softmax(-1), teacher, reduction="batchmean") / 10


class MeanOfTokens(OwnLoss):
    def own_loss(self, batch: Batch) -> Tensor:
        return -self.log_probs(batch).sum() / (batch["labels"][:, 1:] != IGNORED).sum()


def llama() -> Any:
    return build("llama")


def with_adapter() -> Any:
    return adapted(lora(), build("qwen3"))


def counted(batch: Batch) -> int:
    return int((batch["labels"][:, 1:] != IGNORED).sum())


# name: (task, model, data, what weighs)
LOSSES: dict[str, tuple[type[Task], Any, Any, Any]] = {
    "mean of rows": (MeanOfRows, llama, rows, "samples"),
    "pairs": (Preferences, llama, pairs, "samples"),
    "divergence": (Distilled, llama, rows, "samples"),
    "mean of tokens": (MeanOfTokens, llama, rows, "causal_label_tokens"),
    "function": (MeanOfTokens, llama, rows, counted),
    "loss of the model": (Task, llama, rows, "auto"),
    "loss of the model, with an adapter": (Task, with_adapter, rows, "auto"),
}
MAKE = {name: (lambda task=task, model=model: task(model())) for name, (task, model, _, _) in LOSSES.items()}  # type: ignore[misc]


def compare_losses(name: str, rule: Any, num_microbatches: int, check_split: str = "error") -> tuple[Run, Run]:
    _, _, data, _ = LOSSES[name]
    options = {"loss_weight": rule, "virtual_copies": True, "check_split": check_split}
    ours = {"options": options, "num_microbatches": num_microbatches}
    return compare_tasks(MAKE[name], data(), ours=ours, tolerances={"of_largest": 1e-5})


@pytest.mark.filterwarnings("error:loss_weight='auto' takes")
@pytest.mark.parametrize("num_microbatches", [3, 5])
@pytest.mark.parametrize("name", LOSSES)
def test_means_beside_labels(name: str, num_microbatches: int) -> None:
    compare_losses(name, LOSSES[name][-1], num_microbatches)


@pytest.mark.parametrize("name", ["mean of rows", "pairs", "divergence", "mean of tokens"])
def test_the_first_batch_shows_which_it_is(name: str) -> None:
    compare_losses(name, "auto", 3)


@pytest.mark.parametrize("name", ["mean of rows", "pairs", "divergence"])
def test_labels_are_the_wrong_weight_for_them(name: str) -> None:
    """Or the tests above would prove little: the guess is wrong here, and it is warned of."""
    with (
        pytest.warns(UserWarning, match=r"loss_weight='auto' takes losses for means over the labels"),
        pytest.raises(AssertionError, match="not close"),
    ):
        compare_losses(name, "auto", 3, "off")
