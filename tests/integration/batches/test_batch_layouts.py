"""Batches of every layout, loss weights, and what ``training_step`` may return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler, TensorDataset

from tests.support.loaders import Loader
from tests.support.rows import compat


@dataclass
class Sample:
    x: Tensor
    y: Tensor
    scale: float = 1.0


class Opaque:
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


# name: (build a batch from x and y, take x and y out of it)
LAYOUTS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Any, Any]]]] = {
    "nested": (
        lambda x, y: {"in": [{"x": x}, None, 3], "out": ((y,), "text")},
        lambda b: (b["in"][0]["x"] * (b["in"][2] / 3), b["out"][0][0]),
    ),
    "dataclass": (lambda x, y: Sample(x, y, 2.0), lambda b: (b.x * b.scale, b.y)),
    "strings": (
        lambda x, y: {"x": x, "y": [f"class {k}" for k in y.tolist()]},
        lambda b: (b["x"], torch.tensor([int(text.split()[1]) for text in b["y"]])),
    ),
    "list of dicts": (
        lambda x, y: {"x": x, "targets": [{"y": k, "boxes": torch.ones(i, 4)} for i, k in enumerate(y)]},
        lambda b: (b["x"], torch.stack([target["y"] for target in b["targets"]])),
    ),
    "scalars and None": (
        lambda x, y: {"x": x, "y": y, "step": 5, "scale": torch.tensor(2.0), "mask": None, "flag": True, "id": "a"},
        lambda b: (b["x"] * b["scale"] * (b["step"] / 5) if b["mask"] is None and b["flag"] else None, b["y"]),
    ),
    "shared row": (
        lambda x, y: {"x": x, "y": y, "bias": torch.linspace(0, 1, x.shape[1])[None]},
        lambda b: (b["x"] + b["bias"], b["y"]),
    ),
}


def batches_of(loader: Any, build: Callable[[Tensor, Tensor], Any]) -> Loader:
    return Loader([build(x, y) for x, y in loader])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(small: Any, fit_alike: Any, make_loader: Any, layout: str) -> None:
    build, take = LAYOUTS[layout]

    sizes: list[int] = []

    class Takes(small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = take(batch)
            sizes.append(len(x))
            return self.loss((x, y))

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            rows = len(take(batch)[0])
            assert rows in (8, 4), "hooks see the whole batch"

    fit_alike(Takes, batches_of(make_loader(), build))
    assert sizes[:3] == [8, 8, 4]
    assert sorted(sizes[3:]) == sorted([3, 3, 2] * 2 + [2, 1, 1])


def _samples(loader: Any) -> list[tuple[Tensor, Tensor]]:
    return [(x, y) for xs, ys in loader for x, y in zip(xs, ys, strict=True)][:5]


class Samples(Dataset[Any]):
    """Gives what is in a list."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


# name: (makes a loader of samples or of batches that were made before, micro-batches of each)
PREMADE: dict[str, tuple[Callable[[Any], Any], int]] = {
    "samples": (lambda loader: Loader(_samples(loader)), 1),
    "a data set of samples": (lambda loader: DataLoader(Samples(_samples(loader)), batch_size=None), 1),
    "dicts of a sample": (lambda loader: Loader([{"x": x, "y": y} for x, y in _samples(loader)]), 1),
    "rows of one sample": (lambda loader: DataLoader(Samples(_samples(loader))), 1),
    "batches": (lambda loader: Loader(list(loader)), 3),
    "a data set of batches": (lambda loader: DataLoader(Samples(list(loader)), batch_size=None), 3),
    "a sampler of batches": (
        lambda loader: DataLoader(
            TensorDataset(*loader.dataset.tensors),
            sampler=BatchSampler(SequentialSampler(loader.dataset), 8, False),
            batch_size=None,
        ),
        3,
    ),
}


@pytest.mark.parametrize("name", PREMADE)
def test_samples_and_batches_that_the_loader_does_not_make(
    small: Any, fit_alike: Any, make_loader: Any, assert_alike: Any, name: str
) -> None:
    """Entries of a data set as they are, be they samples without a batch dimension, or whole batches; in training, and
    in two loaders of the evaluation after each other."""
    make, num_microbatches = PREMADE[name]

    class Takes(small):
        def take(self, batch: Any) -> Tensor:
            x, y = batch.values() if isinstance(batch, dict) else batch
            return F.cross_entropy(self(x), y)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.take(batch)

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
            self.log("val", self.take(batch) * (1 + dataloader_idx), batch_size=1 if num_microbatches == 1 else None)

        def on_train_batch_end(self, *args: Any) -> None:
            counts.append(getattr(self.trainer.strategy, "last_step", None))

    counts: list[Any] = []
    plain, ours = fit_alike(Takes, make(make_loader()), val_loader=[make(make_loader(12)), make(make_loader(24))])
    assert_alike(dict(ours.trainer.callback_metrics), dict(plain.trainer.callback_metrics))
    assert len(plain.trainer.callback_metrics) == 2
    assert {step.num_microbatches for step in counts if step is not None} == {num_microbatches}


@pytest.mark.parametrize("run", ["validate", "test", "predict"])
@pytest.mark.parametrize("sequence", [tuple, list], ids=["tuple", "list"])
def test_loaders_of_single_rows_after_each_other(
    small: Any, make_trainer: Any, make_loader: Any, assert_alike: Any, sequence: Callable[[Any], Any], run: str
) -> None:
    class Takes(small):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
            assert batch[0].shape == ((6,) if dataloader_idx == 2 else (1, 6))
            self.log("loss", self.loss(batch) + dataloader_idx + batch_idx, batch_size=1)

        test_step = validation_step

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> Any:
            return self(batch[0]) + dataloader_idx + batch_idx

    results = []
    for kind in ("plain", "roundpipe"):
        loaders = sequence([make_loader(3, 1), make_loader(2, 1), Loader(_samples(make_loader()))])
        trainer, quiet = make_trainer(kind), {} if run == "predict" else {"verbose": False}
        results.append(getattr(trainer, run)(Takes(), loaders, **quiet))
    assert [len(result) for result in results[0]] == ([3, 2, 5] if run == "predict" else [1, 1, 1])
    assert_alike(results[1], results[0])


def split_opaque(batch: Opaque, num_microbatches: int) -> list[Opaque]:
    parts = zip(batch.x.chunk(num_microbatches), batch.y.chunk(num_microbatches), strict=True)
    return [Opaque(x, y) for x, y in parts]


class SharedList(list[Any]):
    """No plain list, so that all micro-batches write to the same one."""


class TakesOpaque:
    """Mixed into the small model: its step takes an :class:`Opaque`."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = SharedList()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.sizes.append(len(batch.x))
        return self.loss((batch.x, batch.y))


# Micro-batches whose rows the engine cannot know are of equal size here: 8 rows in 2.
def test_way_out_by_option(small: Any, fit_alike: Any, make_loader: Any) -> None:
    class Takes(TakesOpaque, small):
        pass

    loader = batches_of(make_loader(16), Opaque)
    _, ours = fit_alike(Takes, loader, ours={"num_microbatches": 2, "options": {"split_batch": split_opaque}})
    assert list(ours.module.sizes) == [4, 4] * 2


def test_way_out_by_hook(small: Any, fit_alike: Any, make_loader: Any) -> None:
    class Takes(TakesOpaque, small):
        def roundpipe_split_batch(self, batch: Any, num_microbatches: int) -> Any:
            return split_opaque(batch, num_microbatches)

    loader = batches_of(make_loader(16), Opaque)
    _, ours = fit_alike(Takes, loader, ours={"num_microbatches": 2})
    assert list(ours.module.sizes) == [4, 4] * 2


def test_way_out_with_unequal_parts(small: Any, fit_alike: Any, make_loader: Any) -> None:
    """Rows that can be read from the micro-batches weigh them; a function weighs those that cannot."""
    by_rows = {"split_batch": lambda batch, n: [tuple(part[:1] for part in batch), tuple(part[1:] for part in batch)]}
    fit_alike(small, ours={"options": by_rows})

    class Takes(TakesOpaque, small):
        pass

    weighed = {"split_batch": split_opaque, "loss_weight": lambda batch: len(batch.x)}
    fit_alike(Takes, batches_of(make_loader(), Opaque), ours={"options": weighed})


def test_one_microbatch_takes_any_batch(small: Any, fit_alike: Any, make_loader: Any) -> None:
    class Takes(TakesOpaque, small):
        pass

    fit_alike(Takes, batches_of(make_loader(), Opaque), ours={"num_microbatches": 1})


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ([], "returned no micro-batch"),
        ((), "returned no micro-batch"),
        (None, "returned None"),
        (torch.zeros(4, 2), r"returned a tensor of shape \(4, 2\)"),
        ({"x": 1}, r"returned \{'x': 1\} \(dict\)"),
        (3, r"returned 3 \(int\)"),
    ],
)
def test_what_is_no_list_of_microbatches_is_an_error(
    small: Any, make_trainer: Any, make_loader: Any, result: Any, words: str
) -> None:
    def my_split(batch: Any, num_microbatches: int) -> Any:
        return result

    trainer = make_trainer(options={"split_batch": my_split})
    with pytest.raises((TypeError, ValueError), match=rf"my_split {words}.*return a list of micro-batches"):
        trainer.fit(small(), make_loader())


def test_rows_that_cannot_be_told_are_warned_of(small: Any, make_trainer: Any, make_loader: Any) -> None:
    class Takes(TakesOpaque, small):
        pass

    trainer = make_trainer(options={"split_batch": split_opaque}, num_microbatches=2)
    with pytest.warns(UserWarning, match=r"2 micro-batches of split_opaque .*weigh as if it were 1, 1.*loss_weight="):
        trainer.fit(Takes(), batches_of(make_loader(16), Opaque))


# --- what training_step returns ----------------------------------------------------------------------------------


@compat("LightningModule hook", "training_step")
def test_dict_with_more_than_the_loss(small: Any, fit_alike: Any, assert_alike: Any) -> None:
    class Returns(small):
        def __init__(self) -> None:
            super().__init__()
            self.given: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            logits = self(batch[0])
            loss = F.cross_entropy(logits, batch[1])
            names = [str(k) for k in batch[1].tolist()]
            return {
                "loss": loss,
                "logits": logits.detach(),
                "names": names,
                "index": batch_idx,
                "double": 2 * loss.detach(),
            }

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.given.append({name: outputs[name] for name in sorted(outputs)})

    plain, ours = fit_alike(Returns)
    assert plain.module.given[0]["logits"].shape == (8, 3)
    assert_alike(ours.module.given, plain.module.given)


WRONG_RETURNS: dict[str, Callable[[Tensor], Any]] = {
    "dict without loss": lambda loss: {"value": loss},
    "loss of None": lambda loss: {"loss": None},
    "empty dict": lambda loss: {},
    "float": lambda loss: loss.item(),
    "zero": lambda loss: 0,
    "string": lambda loss: "loss",
    "tuple": lambda loss: (loss, 1),
    "list": lambda loss: [loss],
    "object": lambda loss: Opaque(loss, loss),
}
# Of manual optimization, which takes any dict.
WRONG_MANUAL_RETURNS = [name for name in WRONG_RETURNS if name.split()[0] not in ("dict", "loss", "empty")]


@pytest.mark.parametrize(
    ("is_automatic", "kind"),
    [*((True, kind) for kind in WRONG_RETURNS), *((False, kind) for kind in WRONG_MANUAL_RETURNS)],
)
def test_wrong_returns_raise_as_in_plain(
    small: Any, make_trainer: Any, make_loader: Any, kind: str, is_automatic: bool
) -> None:
    """The same error with the same words."""

    class Returns(small):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = is_automatic

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return WRONG_RETURNS[kind](self.loss(batch).detach())

    said = []
    for trainer in (make_trainer("plain"), make_trainer()):
        with pytest.raises(MisconfigurationException, match="training_step") as raised:
            trainer.fit(Returns(), make_loader(8))
        said.append(str(raised.value))
    assert said[0] == said[1]


def test_loss_of_one_element(small: Any, fit_alike: Any) -> None:
    """Plain Lightning takes a loss of shape [1]."""

    class Returns(small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch).reshape(1)

    fit_alike(Returns)
