"""The example of preference optimization makes the right rows, and computes what plain Lightning does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.support.huggingface import adapted, assert_planned, lora
from tests.support.parity import compare
from tests.test_examples import loaded


def test_rows_of_a_pair_are_as_long_as_asked_and_end() -> None:
    example = loaded("dpo.py")
    _, tokenizer = example.load(None)
    pairs = [
        {"prompt": "abc", "chosen": "de", "rejected": "fghi"},
        {"prompt": "a" * 50, "chosen": "b" * 50, "rejected": "c"},
    ]
    rows = [example.tokens_of(pair, tokenizer, 16) for pair in pairs]
    texts = [[tokenizer.decode(tokens) for tokens, _ in row] for row in rows]
    assert texts == [["abcde<end>", "abcfghi<end>"], ["a" * 8 + "b" * 8, "a" * 8 + "c<end>"]]
    batch = example.collate(rows, tokenizer.pad_token_id)
    assert {name: tuple(column.shape) for name, column in batch.items()} == dict.fromkeys(batch, (2, 2, 16))
    assert batch["answer"].sum(-1).tolist() == [[3, 5], [8, 2]]
    assert batch["attention_mask"].sum(-1).tolist() == [[6, 8], [16, 10]]


def test_example_trains_like_plain_lightning() -> None:
    example = loaded("dpo.py")

    class Compared(example.PreferenceOptimization):  # type: ignore[misc,name-defined]
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2, eps=1e-2)

    def make() -> Any:
        return Compared(adapted(lora(target_modules="all-linear")), lr=1e-2, beta=0.1)

    def batches() -> list[dict[str, Tensor]]:
        torch.manual_seed(2)
        rows = [[(torch.randint(3, 24, (6 + i + j,)), 3) for j in range(2)] for i in range(5)]
        return [example.collate(rows, 0), example.collate(rows[::-1], 0)]

    ours = {"options": {"virtual_copies": True}}
    _, pipelined = compare(make, batches, ours=ours, seed=5, tolerances={"of_largest": 1e-3})
    assert_planned(pipelined)
    assert pipelined.watch.num_microbatches == [3, 3]
