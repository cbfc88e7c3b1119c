"""What the Trainer takes its batches from: several loaders, combined ones, streams, batches of every shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_roundpipe import BatchSplitError
from tests.support.rows import compat

WIDTH, CLASSES = 6, 3


def pairs_in(batch: Any) -> list[tuple[Tensor, Tensor]]:
    """Every ``(x, y)`` in a nesting of batches."""
    if isinstance(batch, dict):
        return [pair for value in batch.values() for pair in pairs_in(value)]
    if isinstance(batch, (list, tuple)):
        if len(batch) == 2 and all(isinstance(value, Tensor) for value in batch):
            return [tuple(batch)]
        return [pair for value in batch for pair in pairs_in(value)]
    return []


@pytest.fixture
def learner(small: Any) -> Callable[[], Any]:
    """Makes a module whose steps take any nesting of batches, and that notes the batches it is shown."""

    class Learner(small):
        def __init__(self) -> None:
            super().__init__()
            self.batches: list[Any] = []

        def note(self, what: str, batch: Any, *where: int) -> None:
            pairs = pairs_in(batch)
            self.batches.append((what, *where, type(batch).__name__, [x[:, 0].tolist() for x, _ in pairs]))

        def mean_loss(self, batch: Any) -> Tensor:
            losses = [self.loss(pair) for pair in pairs_in(batch)]
            return torch.stack(losses).mean()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.mean_loss(batch)
            self.log("loss", loss, on_step=False, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("val", self.mean_loss(batch))

        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("test", self.mean_loss(batch) * (1 + dataloader_idx))

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return [self(x) + dataloader_idx for x, _ in pairs_in(batch)]

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.note("train", batch, batch_idx)

        def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.note("validation", batch, batch_idx, dataloader_idx)

        def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.note("test", batch, batch_idx, dataloader_idx)

        def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.note("predict", batch, batch_idx, dataloader_idx)

    return Learner


@pytest.fixture
def outcome(make_trainer: Any, learner: Any) -> Callable[..., Any]:
    """What a run gives: batches, weights, logged values, results."""

    def run(kind: str, train: Any, evaluation: Any, **settings: Any) -> dict[str, Any]:
        module, trainer = learner(), make_trainer(kind, **settings)
        found: dict[str, Any] = {}
        if train is not None:
            trainer.fit(module, train, evaluation)
            found["fitted"] = [dict(module.state_dict()), dict(trainer.callback_metrics), trainer.global_step]
        else:
            found["validated"] = trainer.validate(module, evaluation, verbose=False)
            found["tested"] = trainer.test(module, evaluation, verbose=False)
            if not isinstance(evaluation, CombinedLoader) or evaluation._mode == "sequential":  # as Lightning demands
                found["predicted"] = trainer.predict(module, evaluation)
        return {**found, "batches": module.batches}

    return run


class Stream(IterableDataset[Any]):
    """Rows one after the other; nobody knows how many."""

    def __init__(self, num_rows: int = 20) -> None:
        self.num_rows = num_rows

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(self.num_rows)
        for _ in range(self.num_rows):
            yield torch.randn(WIDTH, generator=generator), torch.randint(CLASSES, (), generator=generator)


class SizedStream(Stream):
    """Rows one after the other, their number known."""

    def __len__(self) -> int:
        return self.num_rows


class Rows(Dataset[Any]):
    """Rows that a loader's own collation makes into batches: ``shape`` of an ``(x, y)``."""

    def __init__(self, shape: Callable[[Tensor, Tensor], Any]) -> None:
        self.shape = shape
        self.data = list(Stream(20))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.shape(*self.data[index])


SHAPES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tuple": lambda x, y: (x, y),
    "list": lambda x, y: [x, y],
    "dict": lambda x, y: {"pair": (x, y), "name": "row"},
    "nested": lambda x, y: {"one": {"two": [(x, y), {"three": (2 * x, y)}]}, "number": 3.0},
}
TRAINING: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "iterable without length": (lambda make: DataLoader(Stream(), batch_size=8), {"max_epochs": 2}),
    "iterable with length": (lambda make: DataLoader(SizedStream(), batch_size=8), {}),
    "iterable, validation by batches": (
        lambda make: DataLoader(Stream(), batch_size=8),
        {"val_check_interval": 2, "check_val_every_n_epoch": None, "max_epochs": 2},
    ),
    "iterable, limited": (lambda make: DataLoader(Stream(), batch_size=8), {"limit_train_batches": 2}),
    "drop_last": (lambda make: make(20, drop_last=True), {}),
    "batch_size=None": (lambda make: DataLoader(list(make(20)), batch_size=None), {}),
    "list of loaders": (lambda make: [make(24), make(16)], {}),
    "dict of loaders": (lambda make: {"a": make(24), "b": make(16)}, {}),
    "nested loaders": (lambda make: {"a": [make(24), make(16)], "b": (make(24),)}, {}),
    "min_size": (lambda make: CombinedLoader({"a": make(24), "b": make(16)}, "min_size"), {}),
    "max_size_cycle": (lambda make: CombinedLoader([make(24), make(16)], "max_size_cycle"), {}),
    "max_size": (lambda make: CombinedLoader({"a": make(24), "b": make(16)}, "max_size"), {"max_epochs": 2}),
    **{f"rows of a {name}": (lambda make, s=shape: DataLoader(Rows(s), 8), {}) for name, shape in SHAPES.items()},
}


@compat("Library", "torch DataLoader, IterableDataset")
@compat("Library", "CombinedLoader", note="Loaders whose batches have as many rows as each other; else a clear error.")
@pytest.mark.parametrize("name", TRAINING)
def test_training_data(outcome: Any, make_loader: Any, assert_alike: Any, name: str) -> None:
    make, settings = TRAINING[name]
    plain, ours = (outcome(kind, make(make_loader), make_loader(8, 4), **settings) for kind in ("plain", "roundpipe"))
    assert plain["fitted"][2] > 0
    assert_alike(ours, plain)


EVALUATION: dict[str, Callable[[Any], Any]] = {
    "list of loaders": lambda make: [make(12), make(10, 4)],
    "dict of loaders": lambda make: {"a": make(12), "b": make(10, 4)},
    "iterable without length": lambda make: DataLoader(Stream(), batch_size=8),
    "sequential": lambda make: CombinedLoader([make(12), make(10, 4)], "sequential"),
    "min_size": lambda make: CombinedLoader({"a": make(24), "b": make(16)}, "min_size"),
    "max_size_cycle": lambda make: CombinedLoader([make(24), make(16)], "max_size_cycle"),
    "max_size": lambda make: CombinedLoader({"a": make(24), "b": make(16)}, "max_size"),
}


@compat("Library", "CombinedLoader", note="Loaders whose batches have as many rows as each other; else a clear error.")
@pytest.mark.parametrize("name", EVALUATION)
def test_evaluation_data(outcome: Any, make_loader: Any, assert_alike: Any, name: str) -> None:
    make = EVALUATION[name]
    plain, ours = (outcome(kind, None, make(make_loader)) for kind in ("plain", "roundpipe"))
    assert len(plain["batches"]) >= 4
    assert_alike(ours, plain)


def test_loaders_in_sequence_are_refused_as_in_plain(outcome: Any, make_loader: Any) -> None:
    messages = []
    for kind in ("plain", "roundpipe"):
        with pytest.raises(ValueError, match="sequential") as caught:
            outcome(kind, CombinedLoader([make_loader(), make_loader()], "sequential"), None)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


@compat(
    "Misuse",
    "CombinedLoader with batches of different sizes",
    "refused",
    "BatchSplitError before the first step, which names the batch and the ways out.",
)
def test_loaders_of_different_batch_sizes_are_refused(outcome: Any, make_loader: Any, assert_alike: Any) -> None:
    def loader() -> CombinedLoader:
        return CombinedLoader({"labelled": make_loader(8, 2), "other": make_loader(20, 5)}, "min_size")

    with pytest.raises(BatchSplitError, match=r"batch\['other'\]\[0\] of shape \(5, 6\).*size is 2") as caught:
        outcome("roundpipe", loader(), None)
    for way_out in ("split_batch", "num_microbatches=1"):
        assert way_out in str(caught.value)
    plain, ours = outcome("plain", loader(), None), outcome("roundpipe", loader(), None, num_microbatches=1)
    assert_alike(ours, plain)


@compat("LightningModule hook", "training_step (dataloader_iter)")
@pytest.mark.parametrize("flavor", ["training", "validation"])
def test_steps_that_pull_from_the_loader(
    small: Any, make_trainer: Any, make_loader: Any, assert_alike: Any, flavor: str
) -> None:
    """One micro-batch each, as nobody else can see the batch."""

    class Pulls(small):
        def on_fit_start(self) -> None:
            self.pulled: list[Any] = []

        def training_step(self, dataloader_iter: Any) -> Tensor:
            batch, batch_idx, dataloader_idx = next(dataloader_iter)
            self.pulled.append(("train", batch_idx, dataloader_idx, len(batch[0])))
            return self.loss(batch)

    class PullsBoth(Pulls):
        def validation_step(self, dataloader_iter: Any) -> None:
            batch, batch_idx, dataloader_idx = next(dataloader_iter)
            self.pulled.append(("validation", batch_idx, dataloader_idx, len(batch[0])))
            self.log("val", self.loss(batch), batch_size=len(batch[0]))

    found = []
    for kind in ("plain", "roundpipe"):
        module = (PullsBoth if flavor == "validation" else Pulls)()
        trainer = make_trainer(kind, max_epochs=2)
        loaders = (make_loader(), make_loader(10, 4)) if flavor == "validation" else (make_loader(),)
        trainer.fit(module, *loaders)
        found.append([module.pulled, dict(module.state_dict()), dict(trainer.callback_metrics), trainer.global_step])
    assert found[0][3] == 6
    assert_alike(found[1], found[0])


@compat("Library", "DataLoader with worker processes")
def test_loaders_with_worker_processes(outcome: Any, make_loader: Any, assert_alike: Any) -> None:
    def loader() -> DataLoader[Any]:
        return make_loader(20, num_workers=1, persistent_workers=True)

    plain, ours = (outcome(kind, loader(), None, max_epochs=2) for kind in ("plain", "roundpipe"))
    assert_alike(ours, plain)


class Data(L.LightningDataModule):
    """Loaders of a datamodule, several for validation."""

    def __init__(self, make_loader: Any) -> None:
        super().__init__()
        self.make_loader = make_loader

    def train_dataloader(self) -> Any:
        return {"a": self.make_loader(24), "b": self.make_loader(16)}

    def val_dataloader(self) -> Any:
        return [self.make_loader(12), self.make_loader(10, 4)]


def test_loaders_of_a_datamodule(learner: Any, make_trainer: Any, make_loader: Any, assert_alike: Any) -> None:
    found = []
    for kind in ("plain", "roundpipe"):
        module, trainer = learner(), make_trainer(kind)
        trainer.fit(module, datamodule=Data(make_loader))
        found.append([module.batches, dict(module.state_dict()), dict(trainer.callback_metrics)])
    assert {"val/dataloader_idx_0", "val/dataloader_idx_1"} <= set(found[0][2])
    assert_alike(found[1], found[0])
