"""``validate``, ``test`` and ``predict``: plain Lightning's results, in order."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.rows import compat

Scores = namedtuple("Scores", ["logits", "best"])

OUTPUTS: dict[str, Callable[[Any, Any], Any]] = {
    "tensor": lambda m, x: m(x),
    "labels": lambda m, x: m(x).argmax(-1),
    "dict": lambda m, x: {"logits": m(x), "deep": {"first": x[:, 0]}},
    "tuple": lambda m, x: (m(x), x[:, 1]),
    "namedtuple": lambda m, x: Scores(m(x), m(x).argmax(-1)),
    "strings": lambda m, x: [f"class {k}" for k in m(x).argmax(-1).tolist()],
    "numbers": lambda m, x: m(x).argmax(-1).tolist(),
    "list of rows": lambda m, x: list(m(x)),
    "dict of lists": lambda m, x: {"text": [f"{v:.2f}" for v in x[:, 0].tolist()], "score": m(x).max(-1).values},
    "mean": lambda m, x: m(x).mean(),
    "none": lambda m, x: None,
}


@compat("Trainer method", "predict")
@compat("LightningModule hook", "predict_step")
@pytest.mark.parametrize("shape", OUTPUTS)
@pytest.mark.parametrize("num_microbatches", [3, 16])
def test_predictions(
    small: Any, make_trainer: Any, make_loader: Any, assert_alike: Any, shape: str, num_microbatches: int
) -> None:
    class Predicts(small):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return OUTPUTS[shape](self, batch[0])

    loader = make_loader()
    plain = make_trainer("plain").predict(Predicts(), loader)
    ours = make_trainer(num_microbatches=num_microbatches).predict(Predicts(), loader)
    assert len(plain) == 3
    assert [type(result) for result in ours] == [type(result) for result in plain]
    assert_alike(ours, plain)


def test_default_predict_step(small: Any, make_trainer: Any, make_loader: Any, assert_alike: Any) -> None:
    class Forward(small):
        def forward(self, batch: Any) -> Any:
            return super().forward(batch[0])

    results = [make_trainer(kind).predict(Forward(), make_loader()) for kind in ("roundpipe", "plain")]
    assert_alike(*results)


class Collecting:
    """Mixed into the small model: outputs collected in a list on the module, the way Lightning's guide shows."""

    collect: Callable[[Any, Any, Any, int], Any]

    def __init__(self) -> None:
        super().__init__()
        self.step_outputs: list[Any] = []
        self.epochs: list[Any] = []

    def _step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self(x), y)
        self.step_outputs.append(type(self).collect(self, loss, batch, batch_idx))
        return loss

    def _end(self) -> None:
        self.epochs.append(list(self.step_outputs))
        self.step_outputs.clear()


APPENDED: dict[str, Callable[[Any, Any, Any, int], Any]] = {
    "loss": lambda m, loss, batch, i: loss.detach(),
    "rows": lambda m, loss, batch, i: m(batch[0]).detach(),
    "dict": lambda m, loss, batch, i: {
        "loss": loss.detach(),
        "y": batch[1],
        "text": [str(v) for v in batch[1].tolist()],
    },
    "float": lambda m, loss, batch, i: loss.item(),
    "index": lambda m, loss, batch, i: i,
}


@pytest.mark.parametrize("what", APPENDED)
def test_list_of_step_outputs(small: Any, make_trainer: Any, make_loader: Any, assert_alike: Any, what: str) -> None:
    class Collects(Collecting, small):
        collect = APPENDED[what]

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return self._step(batch, batch_idx)

        def on_validation_epoch_end(self) -> None:
            self._end()

    modules = []
    for kind in ("roundpipe", "plain"):
        module, trainer = Collects(), make_trainer(kind)
        trainer.validate(module, make_loader(), verbose=False)
        trainer.validate(module, make_loader(), verbose=False)
        modules.append(module)
    assert len(modules[1].epochs) == 2
    assert len(modules[1].epochs[0]) == 3
    assert_alike(modules[0].epochs, modules[1].epochs)


# Not: one item appended for each micro-batch of one row, which is read as one of the whole batch.
@pytest.mark.parametrize(
    ("how", "rows", "num_microbatches"),
    [("extend", 6, 3), ("extend", 6, 4), ("extend", 6, 6), ("+=", 6, 3), ("+=", 6, 6), ("append", 6, 3)],
)
def test_lists_of_samples(
    small: Any, make_trainer: Any, make_loader: Any, how: str, rows: int, num_microbatches: int
) -> None:
    class Collects(small):
        def __init__(self) -> None:
            super().__init__()
            self.texts, self.lists, self.numbers = [], [], []

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            numbers = [round(value, 3) for value in self(batch[0])[:, 0].tolist()]
            if how == "extend":
                self.texts.extend(str(number) for number in numbers)
                self.lists.extend([batch_idx, y] for y in batch[1].tolist())
                self.numbers.extend(numbers)
            elif how == "+=":
                self.texts += [str(number) for number in numbers]
                self.lists += [[batch_idx, y] for y in batch[1].tolist()]
                self.numbers += numbers
            else:
                for number, y in zip(numbers, batch[1].tolist(), strict=True):
                    self.texts.append(str(number))
                    self.lists.append([batch_idx, y])
                    self.numbers.append(number)

    modules = [Collects(), Collects()]
    for module, kind in zip(modules, ("plain", "roundpipe"), strict=True):
        trainer = make_trainer(kind, num_microbatches=num_microbatches)
        trainer.validate(module, make_loader(2 * rows, rows), verbose=False)
    for name in ("texts", "lists", "numbers"):
        assert getattr(modules[0], name) == getattr(modules[1], name), name
    assert len(modules[0].texts) == 2 * rows


def test_list_of_training_outputs(small: Any, fit_both: Any, assert_alike: Any) -> None:
    class Collects(Collecting, small):
        collect = APPENDED["dict"]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self._step(batch, batch_idx)

        def on_train_epoch_end(self) -> None:
            self._end()

    plain, ours = fit_both(Collects, max_epochs=2)
    assert_alike(ours.module.epochs, plain.module.epochs)
