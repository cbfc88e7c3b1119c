"""The page for those who come from TRL: its modules, run from the page, train as in plain Lightning."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from tests.docs.pages import run_block
from tests.support.huggingface import IGNORED, VOCAB, adapted, assert_planned, causal, lora
from tests.support.parity import KINDS, Run, compare, make_trainer, ready

PAGE = "docs/migration/trl.md"
LENGTH = 16


def samples(count: int = 14) -> list[tuple[list[int], list[int]]]:
    """Token ids and labels, of unequal lengths; the first tokens are a prompt."""
    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(3, 9, (count,), generator=generator).tolist()
    ids = [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]
    return [(row, [IGNORED] * (number % 3) + row[number % 3 :]) for number, row in enumerate(ids)]


def model_of(way: str) -> nn.Module:
    return adapted(lora(target_modules="all-linear")) if way == "LoRA" else causal()


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All blocks, one after the other, in one namespace: what the page tells to write runs as it is written."""
    names: dict[str, Any] = {"model": causal(), "samples": samples(40)}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("run"))
        for mark in ("class PackedSFT", "class DPO", "class GRPO"):
            run_block(PAGE, mark, names)
    return names


def compare_modules(kind: type[L.LightningModule], make: Any, data: Any, loss_weight: Any = "auto") -> tuple[Run, Run]:
    """Plain and pipelined, with an optimizer whose steps do not follow rounding: :mod:`tests.support.huggingface`."""

    def configure(module: Any) -> torch.optim.Optimizer:
        (group,) = kind.configure_optimizers(module).param_groups
        return torch.optim.AdamW(group["params"], lr=1e-2, eps=1e-2)

    made = type(kind.__name__, (kind,), {"configure_optimizers": configure})
    ours = {"options": {"virtual_copies": True, "loss_weight": loss_weight}}
    # Differences of log-probabilities cancel digits.
    plain, pipelined = compare(lambda: make(made), data, ours=ours, seed=5, tolerances={"of_largest": 1e-3})
    assert_planned(pipelined)
    assert pipelined.watch.num_microbatches == [3] * len(pipelined.watch.losses)
    return plain, pipelined


# SFT with packing -----------------------------------------------------------------------------------------------------


def packed_batches(code: dict[str, Any]) -> list[dict[str, Tensor]]:
    rows = code["pack"](samples(), LENGTH)
    assert len(rows) >= 5
    assert max(map(len, rows)) > 1
    return [code["collate"](rows[:3]), code["collate"](rows[3:])]


def test_packed_rows_hold_all_samples_and_no_more_than_fits(code: dict[str, Any]) -> None:
    given = [*samples(), (list(range(30)), list(range(30)))]
    rows = code["pack"](given, LENGTH)
    assert all(sum(len(ids) for ids, _ in row) <= LENGTH for row in rows)
    found = [sample for row in rows for sample in row]
    assert found[:-1] == given[:-1]
    assert found[-1] == (list(range(LENGTH)), list(range(LENGTH)))


def test_packed_sft_trains_like_plain_lightning(code: dict[str, Any]) -> None:
    """The loss is that of each sample by itself, weighted by the labels that it has: attention crosses no border."""
    assert code["trainer"].global_step >= 1
    assert len(code["trainer"].strategy.pool) == 4
    plain, ours = compare_modules(
        code["PackedSFT"], lambda kind: kind(model_of("LoRA")), lambda: packed_batches(code), "causal_label_tokens"
    )
    assert all("lora_" in name for name in plain.moved)
    model, total, count = model_of("LoRA"), 0.0, 0
    for row in code["pack"](samples(), LENGTH)[:3]:
        for ids, labels in row:
            tokens = sum(label != IGNORED for label in labels[1:])
            with torch.no_grad():
                loss = model(input_ids=torch.tensor([ids]), labels=torch.tensor([labels])).loss
            total, count = total + float(loss) * tokens, count + tokens
    assert float(ours.watch.losses[0]["loss"]) == pytest.approx(total / count, rel=1e-4)


# DPO ------------------------------------------------------------------------------------------------------------------


def pairs(count: int = 5, length: int = 9) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCAB, (count, 2, length))
    ids[:, 1, :3] = ids[:, 0, :3]
    mask = torch.arange(length).expand_as(ids) < torch.randint(5, length + 1, (count, 2, 1))
    completion = mask & (torch.arange(length) >= 3)
    return {"input_ids": ids, "attention_mask": mask.long(), "completion": completion.long()}


def pairs_batches() -> list[dict[str, Tensor]]:
    torch.manual_seed(2)
    first = pairs(5)
    return [first, pairs(4), {name: value.clone() for name, value in first.items()}]


def dpo(kind: Any, way: str) -> Any:
    model = model_of(way)
    return kind(model, None if way == "LoRA" else copy.deepcopy(model))


@pytest.mark.parametrize("way", ["full", "LoRA"])
def test_dpo_trains_like_plain_lightning(code: dict[str, Any], way: str) -> None:
    plain, ours = compare_modules(code["DPO"], lambda kind: dpo(kind, way), pairs_batches)
    assert plain.moved
    assert not [name for name in plain.moved if name.startswith("reference.")]
    assert all("lora_" in name for name in plain.moved) == (way == "LoRA")
    first, _, again = (float(loss["loss"]) for loss in ours.watch.losses)
    assert again < first
    if way == "full":  # before the first update the model is its own reference: no margin
        assert first == pytest.approx(math.log(2), abs=1e-4)


def test_log_probs_of_a_reference_can_be_predicted(code: dict[str, Any]) -> None:
    class Predicting(code["DPO"]):  # type: ignore[misc]
        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.reference_log_probs(batch)

    plain, ours = (make_trainer(kind).predict(dpo(Predicting, "LoRA"), ready(pairs_batches())) for kind in KINDS)
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
    assert [tuple(part.shape) for part in plain] == [(5, 2, 8), (4, 2, 8), (5, 2, 8)]


# GRPO -----------------------------------------------------------------------------------------------------------------

# Beams are several completions without random numbers, which would be others than those of plain Lightning.
BEAMS = {"do_sample": False, "num_beams": 3, "num_generations": 3, "max_new_tokens": 5}


def reward(batch: dict[str, Tensor]) -> Tensor:
    """Prefers even tokens, and short answers."""
    wanted = (batch["input_ids"] % 2 == 0) * batch["completion"]
    return wanted.sum(-1) / batch["completion"].sum(-1) - 0.05 * batch["completion"].sum(-1)


def prompts(counts: tuple[int, ...] = (5, 4)) -> list[dict[str, Tensor]]:
    torch.manual_seed(6)
    batches = []
    for count in counts:
        ids = torch.randint(3, VOCAB, (count, 4))
        mask = torch.arange(4).expand_as(ids) >= torch.randint(0, 3, (count, 1))
        batches.append({"input_ids": ids.masked_fill(~mask, 0), "attention_mask": mask.long()})
    return batches


def test_grpo_trains_like_plain_lightning(code: dict[str, Any]) -> None:
    def make(kind: Any) -> Any:
        return kind(model_of("LoRA"), reward, beta=0.1, **BEAMS)

    weight = code["strategy"].options.loss_weight
    plain, _ = compare_modules(code["GRPO"], make, prompts, weight)
    assert all("lora_" in name for name in plain.moved)
    assert all("reward" in logged for logged in plain.watch.logged)


def test_grpo_may_generate_in_its_step(code: dict[str, Any]) -> None:
    """On the devices; completions of one length, so that prompts weigh alike."""

    def training_step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        batch = dict(batch)
        code["GRPO"].on_train_batch_start(module, batch, batch_idx)
        return code["GRPO"].training_step(module, batch, batch_idx)

    hooks = {"on_train_batch_start": lambda module, batch, batch_idx: None, "training_step": training_step}
    within = type("Within", (code["GRPO"],), hooks)
    _, ours = compare_modules(within, lambda kind: kind(causal(), reward, **{**BEAMS, "min_new_tokens": 5}), prompts)
    assert min(ours.watch.num_calls) >= 5 * 4  # a pass over the layers for each token


def test_grpo_learns_what_is_rewarded(code: dict[str, Any], tmp_path: Path) -> None:
    """Samples, with the settings of the page."""
    torch.manual_seed(0)
    module = code["GRPO"](causal(), reward, lr=3e-2, max_new_tokens=5)
    rewards: list[float] = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            rewards.append(float(trainer.logged_metrics["reward"]))

    options = {"loss_weight": code["strategy"].options.loss_weight}
    trainer = make_trainer(options=options, callbacks=[Watch()], max_epochs=6)
    trainer.fit(module, ready(prompts((5, 4, 5))))
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3
