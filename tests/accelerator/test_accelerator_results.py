"""What leaves steps on several simulated GPUs: results, logged values, metrics, and what a list has collected; and text
that they generate, where layers change places from token to token and caches follow."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torchmetrics import CatMetric, MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from tests.parity.batches.test_parity_whole_batch import CLIP, ByHand, OwnRows, Towers
from tests.parity.batches.test_parity_whole_batch import batches as pairs
from tests.support.huggingface import Task, batches, causal, text
from tests.support.parity import assert_alike, compare, make_loader, make_trainer, ready
from tests.support.small import CLASSES, Small

pytestmark = pytest.mark.accelerator

GPUS: dict[str, Any] = {"accelerator": "roundpipe", "devices": 2}


class Logging(Small):
    """Logs, measures, collects and returns what units have computed."""

    def __init__(self) -> None:
        super().__init__()
        self.places: set[str] = set()
        self.train_accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.val_accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.several = MetricCollection(
            {"f1": MulticlassF1Score(CLASSES), "accuracy": MulticlassAccuracy(CLASSES)}, compute_groups=False
        )
        self.mean, self.rows = MeanMetric(), CatMetric()
        self.collected: list[Tensor] = []

    def shared_step(self, batch: Any, stage: str) -> tuple[Tensor, Tensor]:
        x, y = batch
        logits = self(x)
        predicted = logits.detach()
        self.places.add(predicted.device.type)
        accuracy = self.train_accuracy if stage == "train" else self.val_accuracy
        accuracy(predicted, y)
        self.log(f"{stage}_accuracy", accuracy, on_step=True, on_epoch=True)
        self.several.update(predicted, y)
        self.mean.update(predicted.mean(), weight=len(x))
        self.rows.update(predicted.amax(1))
        self.log(f"{stage}_mean", predicted.mean(), on_epoch=True)
        self.log(f"{stage}_largest", predicted.max(), reduce_fx="max", on_epoch=True)
        return F.cross_entropy(logits, y), predicted

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, predicted = self.shared_step(batch, "train")
        return {"loss": loss, "predicted": predicted, "nested": {"most": predicted.argmax(-1)}}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss, predicted = self.shared_step(batch, "val")
        self.collected.append(predicted)
        return {"loss": loss, "predicted": predicted}

    def on_validation_epoch_end(self) -> None:
        self.log("collected", torch.cat(self.collected).mean())
        self.collected.clear()

    def on_train_epoch_end(self) -> None:
        self.log_dict(self.several.compute())
        self.log("computed_mean", self.mean.compute())
        self.log("computed_rows", self.rows.compute().median())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])


class Outputs(L.Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append((outputs["predicted"], outputs["nested"]["most"]))

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *rest: Any) -> None:
        self.seen.append(outputs["predicted"])


@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_results_metrics_and_logs_are_those_of_the_host(sim: ModuleType, num_microbatches: int) -> None:
    runs = []
    for kind, settings in (("plain", {}), ("roundpipe", GPUS)):
        outputs, module = Outputs(), Logging()
        trainer = make_trainer(kind, num_microbatches=num_microbatches, callbacks=[outputs], **settings)
        trainer.fit(module, make_loader(), make_loader())
        logged = dict(trainer.callback_metrics)
        runs.append((logged, outputs.seen, trainer.predict(module, make_loader())))
        assert module.places == ({"cpu"} if kind == "plain" else {"sim"})
    plain, ours = runs
    assert len(plain[0]) >= 12
    assert all(type(leaf) is Tensor and leaf.is_cpu for leaf in pytree.tree_leaves(ours))
    assert_alike([*ours], [*plain])


# --- generation -----------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("make", [CLIP, OwnRows, ByHand])
def test_rows_of_all_micro_batches_meet_on_the_gpu_of_each(make: Callable[[], Towers]) -> None:
    compare(make, pairs(), pairs((6, 9)), max_epochs=2, ours=GPUS, tolerances={"of_largest": 1e-5})
