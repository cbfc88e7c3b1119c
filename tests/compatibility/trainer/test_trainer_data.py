"""What the Trainer takes its batches from: several loaders, combined ones, streams, batches of every shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_roundpipe import BatchSplitError
from tests.support.parity import Run, both, both_refuse, compare, make_loader, make_trainer
from tests.support.rows import compat
from tests.support.small import CLASSES, WIDTH, Small


def pairs_in(batch: Any) -> list[tuple[Tensor, Tensor]]:
    """Every ``(x, y)`` in a nesting of batches."""
    if isinstance(batch, dict):
        return [pair for value in batch.values() for pair in pairs_in(value)]
    if isinstance(batch, (list, tuple)):
        if len(batch) == 2 and all(isinstance(value, Tensor) for value in batch):
            return [tuple(batch)]
        return [pair for value in batch for pair in pairs_in(value)]
    return []


class Learner(Small):
    """Its steps take any nesting of batches; notes the batches that it is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Any] = []

    def note(self, batch: Any, *where: int) -> None:
        pairs = pairs_in(batch)
        stage = self.trainer.state.stage
        self.batches.append((stage, *where, type(batch).__name__, [x[:, 0].tolist() for x, _ in pairs]))

    on_train_batch_start = on_validation_batch_start = on_test_batch_start = on_predict_batch_start = note

    def mean_loss(self, batch: Any) -> Tensor:
        return torch.stack([self.loss(pair) for pair in pairs_in(batch)]).mean()

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


def evaluated(kind: str, data: Any) -> Any:
    module, trainer = Learner(), make_trainer(kind)
    found = [trainer.validate(module, data, verbose=False), trainer.test(module, data, verbose=False)]
    if not isinstance(data, CombinedLoader) or data._mode == "sequential":  # as Lightning demands
        found.append(trainer.predict(module, data))
    return module.batches, found


def shown(run: Run) -> Any:
    return run.module.batches


class Stream(IterableDataset[Any]):
    """Rows one after the other; their number unknown."""

    def __init__(self, num_rows: int = 20) -> None:
        self.num_rows = num_rows

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(self.num_rows)
        for _ in range(self.num_rows):
            yield torch.randn(WIDTH, generator=generator), torch.randint(CLASSES, (), generator=generator)


def nested_rows() -> list[Any]:
    """Rows that a loader's own collation makes into batches."""
    return [{"one": {"two": [(x, y), {"three": (2 * x, y)}]}, "number": 3.0, "name": "row"} for x, y in Stream()]


TRAINING: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "iterable without length": (
        lambda make: DataLoader(Stream(), batch_size=8),
        {"val_check_interval": 2, "check_val_every_n_epoch": None, "max_epochs": 2},
    ),
    "list of loaders": (lambda make: [make(24), make(16)], {}),
    "nested loaders": (lambda make: {"a": [make(24), make(16)], "b": (make(24),)}, {}),
    "min_size": (lambda make: CombinedLoader({"a": make(24), "b": make(16)}, "min_size"), {}),
    "max_size": (lambda make: CombinedLoader({"a": make(24), "b": make(16)}, "max_size"), {"max_epochs": 2}),
    "nested rows": (lambda make: DataLoader(nested_rows(), 8), {}),  # type: ignore[arg-type]
}


@compat("Library", "torch DataLoader, IterableDataset")
@compat("Library", "CombinedLoader", note="If batches have as many rows as each other.")
@pytest.mark.parametrize("name", TRAINING)
def test_training_data(name: str) -> None:
    make, settings = TRAINING[name]
    compare(Learner, make(make_loader), make_loader(8, 4), also=shown, **settings)


EVALUATION: dict[str, Callable[[Any], Any]] = {
    "list of loaders": lambda make: [make(12), make(10, 4)],
    "iterable without length": lambda make: DataLoader(Stream(), batch_size=8),
    "sequential": lambda make: CombinedLoader({"a": make(12), "b": make(10, 4)}, "sequential"),
    "max_size_cycle": lambda make: CombinedLoader([make(24), make(16)], "max_size_cycle"),
    "max_size": lambda make: CombinedLoader({"a": make(24), "b": make(16)}, "max_size"),
}


@compat("Library", "CombinedLoader", note="If batches have as many rows as each other.")
@compat("Trainer method", "validate; test; predict")
@pytest.mark.parametrize("name", EVALUATION)
def test_evaluation_data(name: str) -> None:
    assert len(both(lambda kind: evaluated(kind, EVALUATION[name](make_loader)))[0]) >= 4


def test_loaders_in_sequence_are_refused_as_in_plain() -> None:
    def act(kind: str) -> None:
        make_trainer(kind).fit(Learner(), CombinedLoader([make_loader(), make_loader()], "sequential"))

    both_refuse(act, ValueError, "sequential")


@compat(
    "Misuse",
    "CombinedLoader with batches of different sizes",
    "refused",
    "Make their rows agree, or use `split_batch`.",
)
def test_loaders_of_different_batch_sizes_are_refused() -> None:
    data = CombinedLoader({"labelled": make_loader(8, 2), "other": make_loader(20, 5)}, "min_size")
    with pytest.raises(BatchSplitError, match=r"batch\['other'\]\[0\] of shape \(5, 6\).*size is 2") as caught:
        evaluated("roundpipe", data)
    for way_out in ("split_batch", "num_microbatches=1"):
        assert way_out in str(caught.value)
    compare(Learner, data, also=shown, ours={"num_microbatches": 1})


@compat("Library", "DataLoader with worker processes")
def test_loaders_with_worker_processes() -> None:
    compare(Learner, make_loader(20, num_workers=1, persistent_workers=True), also=shown, max_epochs=2)
