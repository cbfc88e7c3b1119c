"""``validate``, ``test`` and ``predict``: plain Lightning's results, in order."""

from __future__ import annotations

from collections import defaultdict, namedtuple
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tests.support.parity import both, compare, make_loader, make_trainer
from tests.support.rows import compat
from tests.support.small import WIDTH, Small

Scores = namedtuple("Scores", ["logits", "best"])

# With 16 micro-batches each has one row.
OUTPUTS: dict[str, tuple[Callable[[Any, Any], Any], int]] = {
    "namedtuple": (lambda m, x: Scores(m(x), m(x).argmax(-1)), 3),
    "dict of lists": (
        lambda m, x: {"text": [f"{v:.2f}" for v in x[:, 0].tolist()], "score": m(x).max(-1).values},
        16,
    ),
    "none": (lambda m, x: None, 3),
}


@compat("Trainer method", "predict")
@compat("LightningModule hook", "predict_step")
@pytest.mark.parametrize("shape", OUTPUTS)
def test_predictions(shape: str) -> None:
    output_of, num_microbatches = OUTPUTS[shape]

    class Predicts(Small):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return output_of(self, batch[0])

    def act(kind: str) -> Any:
        results = make_trainer(kind, num_microbatches=num_microbatches).predict(Predicts(), make_loader())
        return results, [type(result).__name__ for result in results]

    assert len(both(act)[0]) == 3


def test_default_predict_step() -> None:
    class Forward(Small):
        def forward(self, batch: Any) -> Any:
            return super().forward(batch[0])

    both(lambda kind: make_trainer(kind).predict(Forward(), make_loader()))


class Collects(Small):
    """Outputs of all kinds collected in lists on the module, the way Lightning's guide shows."""

    def __init__(self) -> None:
        super().__init__()
        self.losses, self.rows, self.dicts, self.floats, self.indices = [], [], [], [], []
        self.epochs: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        loss = torch.nn.functional.cross_entropy(logits, y)
        self.losses.append(loss.detach())
        self.rows.append(logits.detach())
        self.dicts.append({"loss": loss.detach(), "y": y, "text": [str(v) for v in y.tolist()]})
        self.floats.append(loss.item())
        self.indices.append(batch_idx)
        return loss

    def on_train_epoch_end(self) -> None:
        lists = [self.losses, self.rows, self.dicts, self.floats, self.indices]
        self.epochs.append([list(found) for found in lists])
        for found in lists:
            found.clear()

    validation_step, on_validation_epoch_end = training_step, on_train_epoch_end


def test_lists_of_step_outputs_in_evaluation() -> None:
    def act(kind: str) -> Any:
        module, trainer = Collects(), make_trainer(kind)
        trainer.validate(module, make_loader(), verbose=False)
        trainer.validate(module, make_loader(), verbose=False)
        return module.epochs

    assert [[len(found) for found in epoch] for epoch in both(act)] == [[3] * 5] * 2


def test_lists_of_step_outputs_in_training() -> None:
    compare(Collects, max_epochs=2, also=lambda run: run.module.epochs)


# Not: one item appended for each micro-batch of one row, which is read as one of the whole batch.
@pytest.mark.parametrize(("how", "num_microbatches"), [("extend", 4), ("extend", 6), ("+=", 3), ("append", 3)])
def test_lists_of_samples(how: str, num_microbatches: int) -> None:
    class Collects(Small):
        def __init__(self) -> None:
            super().__init__()
            self.texts, self.lists, self._numbers = [], [], []
            self._last: dict[str, Any] = {}

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            numbers = [round(value, 1) for value in self(batch[0])[:, 0].tolist()]
            self._last["loss"] = self.loss(batch)
            if how == "extend":
                self.texts.extend(str(number) for number in numbers)
                self.lists.extend([batch_idx, y] for y in batch[1].tolist())
                self._numbers.extend(numbers)
            elif how == "+=":
                self.texts += [str(number) for number in numbers]
                self.lists += [[batch_idx, y] for y in batch[1].tolist()]
                self._numbers += numbers
            else:
                for number, y in zip(numbers, batch[1].tolist(), strict=True):
                    self.texts.append(str(number))
                    self.lists.append([batch_idx, y])
                    self._numbers.append(number)

    def act(kind: str) -> Any:
        module = Collects()
        trainer = make_trainer(kind, num_microbatches=num_microbatches)
        trainer.validate(module, make_loader(12, 6), verbose=False)
        return module.texts, module.lists, module._numbers, module._last

    assert len(both(act)[0]) == 12


# Of lists that are in a list or dict, with what there is to begin with.
NESTED: dict[str, Callable[[], Any]] = {
    "dict": lambda: {"x": [], "y": [], "scores": [], "several": []},
    "defaultdict": lambda: defaultdict(list),
    "list": lambda: dict(zip(("x", "y", "scores", "several"), [[], [], [], []], strict=True)),
}


@pytest.mark.parametrize(
    ("kind_of_nest", "num_microbatches"), [("dict", 3), ("dict", 4), ("defaultdict", 4), ("list", 3)]
)
def test_lists_inside_of_lists_and_dicts(kind_of_nest: str, num_microbatches: int) -> None:
    """What is appended before units are called, and after it, belongs together row by row."""

    class Collects(Small):
        def __init__(self) -> None:
            super().__init__()
            found = NESTED[kind_of_nest]()
            self.names = {name: place for place, name in enumerate(("x", "y", "scores", "several"))}
            self.found: Any = [*found.values()] if kind_of_nest == "list" else found
            self.epochs: list[Any] = []

        def lists(self, name: str) -> list[Any]:
            found: list[Any] = self.found[self.names[name] if kind_of_nest == "list" else name]
            return found

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            self.lists("x").append(x)
            scores = self(x)
            self.lists("y").append(y)
            self.lists("scores").append(scores)
            self.lists("several").extend(scores.flatten().tolist())
            self.lists("several").extend(y.tolist())

        def on_validation_epoch_end(self) -> None:
            self.epochs.append({name: list(self.lists(name)) for name in self.names})
            for name in self.names:
                self.lists(name).clear()
            if kind_of_nest == "defaultdict":
                self.found.clear()

    def act(kind: str) -> Any:
        module, trainer = Collects(), make_trainer(kind, num_microbatches=num_microbatches)
        for _ in range(2):
            trainer.validate(module, make_loader(24), verbose=False)
        return module.epochs, type(module.found)

    assert [len(epoch["x"]) for epoch in both(act)[0]] == [3, 3]


def test_a_list_that_two_attributes_hold() -> None:
    class Collects(Small):
        def __init__(self) -> None:
            super().__init__()
            self.found: list[Any] = []
            self.table = {"found": self.found}

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.found.append(batch[1])
            self.table["found"].append(self(batch[0]))
            self.latest = self.table["found"]

    def act(kind: str) -> Any:
        module = Collects()
        make_trainer(kind).validate(module, make_loader(), verbose=False)
        return module.found, module.latest is module.found, module.table["found"] is module.found

    assert len(both(act)[0]) == 6


def test_lists_and_dicts_that_the_step_assigns() -> None:
    class Collects(Small):
        def __init__(self) -> None:
            super().__init__()
            self.found: Any = ["of another epoch"]
            self.epochs: list[Any] = []

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                self.found = []
                self.also_found = self.found
                self.table: dict[str, Any] = {"y": []}
            self.features = {"x": batch[0]}
            self.labels = [*getattr(self, "labels", []), batch[1]]
            self.found.append(self(batch[0]))
            self.table["y"].append(batch[1])

        def on_validation_epoch_end(self) -> None:
            assert self.also_found is self.found
            kept = [list(self.found), dict(self.table), dict(self.features), list(self.labels)]
            assert not any(tensor.requires_grad for tensor in self.found)
            self.epochs.append(kept)

    def act(kind: str) -> Any:
        module, trainer = Collects(), make_trainer(kind)
        for _ in range(2):
            trainer.validate(module, make_loader(), verbose=False)
        return module.epochs

    assert [[len(found) for found in epoch] for epoch in both(act)] == [[3, 1, 1, 3], [3, 1, 1, 6]]


class Named(Dataset[Any]):
    """Rows with a name, which the loader collates as a tuple."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, row: int) -> Any:
        return torch.full((WIDTH,), row / 20), f"{row}.png"


@pytest.mark.parametrize("num_microbatches", [3, 4])
def test_names_that_a_loader_collates(num_microbatches: int) -> None:
    class Predicts(Small):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[Any] = []

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            x, names = batch
            self.names.append(names)
            return {"scores": self(x), "names": names}

    def act(kind: str) -> Any:
        module, trainer = Predicts(), make_trainer(kind, num_microbatches=num_microbatches)
        return trainer.predict(module, DataLoader(Named(), batch_size=8)), module.names

    names = both(act)[1]
    assert names[0][:2] == ("0.png", "1.png")
    assert [type(one) for one in names] == [tuple] * 3


def test_a_mean_is_weighed_by_the_batch_size_that_lightning_infers() -> None:
    """For lists of images that is the number of channels, also where the last batch is a single micro-batch."""

    class Detector(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1))

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            losses = [self.net(image[None]).mean() * 0 + target for image, target in zip(*batch, strict=True)]
            self.log("loss", torch.stack(losses).mean())

    rows = [(torch.zeros(3, 4 + i % 3, 5), torch.tensor(float(i))) for i in range(11)]

    def act(kind: str) -> Any:
        loader = DataLoader(rows, batch_size=5, collate_fn=lambda found: tuple(zip(*found, strict=True)))
        return make_trainer(kind).validate(Detector(), loader)

    assert both(act)[0]["loss"] == pytest.approx((2 + 7 + 10) / 3)
