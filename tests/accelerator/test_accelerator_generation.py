"""Generation on several simulated GPUs: the layers of the model change places from token to token, caches follow."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.huggingface import Task, batches, causal, text
from tests.support.parity import compare, make_trainer, ready

pytestmark = pytest.mark.accelerator

GPUS: dict[str, Any] = {"accelerator": "roundpipe", "devices": 2}


class Generating(Task):
    def __init__(self, family: str, **options: Any) -> None:
        super().__init__(causal(family))
        self.options = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6, **options}

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        given = {name: batch[name] for name in ("input_ids", "attention_mask")}
        tokens: Tensor = self.model.generate(**given, **self.options)
        return tokens


class FromItself(Generating):
    """Trains on what it has generated in the same step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            tokens = self.predict_step(batch, batch_idx)
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss


MODELS: dict[str, Callable[[], Generating]] = {
    "greedy": lambda: Generating("Llama"),
    "beams": lambda: Generating("GPT2", num_beams=3),
    "static cache": lambda: Generating("Llama", cache_implementation="static"),
}


@pytest.mark.parametrize("name", MODELS)
def test_generates_what_plain_lightning_does(name: str, sim: ModuleType) -> None:
    data = batches(text)
    expected = make_trainer("plain").predict(MODELS[name](), ready(data))
    trainer = make_trainer(**GPUS)
    found = trainer.predict(MODELS[name](), ready(data))
    assert expected is not None
    assert found is not None
    for tokens, wanted in zip(found, expected, strict=True):
        assert torch.equal(tokens.cpu(), wanted)
    assert all(device.num_unit_runs for device in trainer.strategy.pool.devices)
    assert sim.stats()["races"] == 0


def test_step_trains_on_what_it_has_generated(sim: ModuleType) -> None:
    compare(lambda: FromItself("Llama"), batches(text), ours=GPUS, seed=5)
    assert sim.stats()["races"] == 0
