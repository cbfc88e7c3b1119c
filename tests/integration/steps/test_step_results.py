"""What leaves a step on GPUs: results, logged values and metrics, with tensors that claim to be elsewhere.

The stand-in has values, reports another device, and refuses to meet tensors of the host as a GPU would.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from tests.support.parity import assert_alike, make_loader, make_trainer
from tests.support.small import Small

CLASSES = 3


class Elsewhere(torch.Tensor):
    """A tensor with values on a device that is not there."""

    num_brought = 0
    value: Tensor

    @staticmethod
    def __new__(cls, value: Tensor) -> Elsewhere:
        return torch.Tensor._make_wrapper_subclass(cls, value.shape, dtype=value.dtype, device="meta")

    def __init__(self, value: Tensor) -> None:
        self.value = value

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if any(not isinstance(x, Elsewhere) and x.dim() for x in tensors):
            raise RuntimeError(f"{func}: expected all tensors to be on the same device")
        target = kwargs.pop("device", None)
        args, kwargs = pytree.tree_map_only(Elsewhere, lambda x: x.value, (args, kwargs))
        result = func(*args, **kwargs)
        if target is not None and torch.device(target).type == "cpu":
            Elsewhere.num_brought += 1
            return result.clone()
        return pytree.tree_map_only(Tensor, Elsewhere, result)

    __torch_function__ = torch._C._disabled_torch_function_impl


def here(tensor: Tensor) -> Tensor:
    return tensor


def elsewhere(tensor: Tensor) -> Tensor:
    return Elsewhere(tensor.detach())


class Logging(Small):
    """Makes modules whose predictions are ``here`` or ``elsewhere``."""

    def __init__(self, place: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.place = place
        self.train_accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.val_accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.several = MetricCollection(
            {"f1": MulticlassF1Score(CLASSES), "accuracy": MulticlassAccuracy(CLASSES)}, compute_groups=False
        )
        self.mean = MeanMetric()
        self.collected: list[Tensor] = []

    def shared_step(self, batch: Any, stage: str) -> tuple[Tensor, Tensor]:
        x, y = batch
        logits = self(x)
        predicted = self.place(logits)
        accuracy = self.train_accuracy if stage == "train" else self.val_accuracy
        accuracy(predicted, y)
        self.log(f"{stage}_accuracy", accuracy, on_step=True, on_epoch=True)
        self.several.update(predicted, y)
        self.mean.update(predicted.mean(), weight=len(x))
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

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.place(self(batch[0]))


class Outputs(L.Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append((outputs["predicted"], outputs["nested"]["most"]))

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *rest: Any) -> None:
        self.seen.append(outputs["predicted"])


@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_results_metrics_and_logs(num_microbatches: int) -> None:
    runs = []
    for kind, place in (("plain", here), ("roundpipe", elsewhere)):
        torch.manual_seed(0)
        outputs = Outputs()
        module = Logging(place)
        trainer = make_trainer(kind, num_microbatches=num_microbatches, callbacks=[outputs])
        trainer.fit(module, make_loader(), make_loader())
        logged = {name: value.cpu() for name, value in trainer.callback_metrics.items()}
        predicted = trainer.predict(module, make_loader())
        runs.append((logged, outputs.seen, predicted))
    plain, ours = runs
    assert len(plain[0]) >= 12
    assert all(type(leaf) is Tensor for leaf in pytree.tree_leaves(ours))
    assert_alike([*ours], [*plain])


def test_metrics_of_a_collection_share_what_was_brought() -> None:
    module = Logging(elsewhere)
    trainer = make_trainer(num_microbatches=1, logger=False)
    before = Elsewhere.num_brought
    trainer.fit(module, make_loader(rows=4, batch_size=4), make_loader(rows=4, batch_size=4))
    # In training and in validation: the predictions for three metrics, their mean for one, two logged values. Then two
    # tensors in the result of training, one in that of validation, which has left it in a list as well.
    assert Elsewhere.num_brought - before == 2 * (1 + 1 + 2) + 2 + 2


def test_metrics_are_as_before_after_a_step() -> None:
    module = Logging(here)
    updates = {name: metric.update for name, metric in module.named_modules() if hasattr(metric, "update")}
    make_trainer().fit(module, make_loader(), make_loader())
    assert {name: metric.update for name, metric in module.named_modules() if hasattr(metric, "update")} == updates
