"""Batches of every layout, loss weights, and what ``training_step`` may return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from tests.support.loaders import Loader
from tests.support.parity import both, both_refuse, compare, make_loader, make_trainer, ready
from tests.support.small import Small


class Opaque:
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


def batches_of(loader: Any, build: Callable[[Tensor, Tensor], Any]) -> Loader:
    return Loader([build(x, y) for x, y in loader])


def _samples(loader: Any) -> list[tuple[Tensor, Tensor]]:
    return [(x, y) for xs, ys in loader for x, y in zip(xs, ys, strict=True)][:5]


# name: (makes a loader of samples or of batches that were made before, micro-batches of each)
PREMADE: dict[str, tuple[Callable[[Any], Any], int]] = {
    "samples": (lambda loader: Loader(_samples(loader)), 1),
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
def test_samples_and_batches_that_the_loader_does_not_make(name: str) -> None:
    """Entries of a data set as they are, be they samples without a batch dimension, or whole batches; in training, and
    in two loaders of the evaluation after each other."""
    make, num_microbatches = PREMADE[name]

    class Takes(Small):
        def take(self, batch: Any) -> Tensor:
            return F.cross_entropy(self(batch[0]), batch[1])

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.take(batch)

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
            self.log("val", self.take(batch) * (1 + dataloader_idx), batch_size=1 if num_microbatches == 1 else None)

        def on_train_batch_end(self, *args: Any) -> None:
            counts.append(getattr(self.trainer.strategy, "last_step", None))

    counts: list[Any] = []
    plain, _ = compare(Takes, make(make_loader()), val=[make(make_loader(12)), make(make_loader(24))])
    assert len(plain.trainer.callback_metrics) == 2
    assert {step.num_microbatches for step in counts if step is not None} == {num_microbatches}


@pytest.mark.parametrize(("run", "sequence"), [("validate", tuple), ("predict", list)])
def test_loaders_of_single_rows_after_each_other(run: str, sequence: Callable[[Any], Any]) -> None:
    class Takes(Small):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
            assert batch[0].shape == ((6,) if dataloader_idx == 2 else (1, 6))
            self.log("loss", self.loss(batch) + dataloader_idx + batch_idx, batch_size=1)

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> Any:
            return self(batch[0]) + dataloader_idx + batch_idx

    def act(kind: str) -> Any:
        loaders = sequence([make_loader(3, 1), make_loader(2, 1), Loader(_samples(make_loader()))])
        return getattr(make_trainer(kind), run)(Takes(), loaders, **({} if run == "predict" else {"verbose": False}))

    assert [len(result) for result in both(act)] == ([3, 2, 5] if run == "predict" else [1, 1, 1])


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


def test_way_out_by_hook() -> None:
    class Takes(TakesOpaque, Small):
        def roundpipe_split_batch(self, batch: Any, num_microbatches: int) -> Any:
            return split_opaque(batch, num_microbatches)

    loader = batches_of(make_loader(16), Opaque)
    _, ours = compare(Takes, loader, ours={"num_microbatches": 2})
    assert list(ours.module.sizes) == [4, 4] * 2


def test_way_out_with_unequal_parts() -> None:
    """Rows that can be read from the micro-batches weigh them; a function weighs those that cannot."""
    by_rows = {"split_batch": lambda batch, n: [tuple(part[:1] for part in batch), tuple(part[1:] for part in batch)]}
    compare(Small, ours={"options": by_rows})

    class Takes(TakesOpaque, Small):
        pass

    weighed = {"split_batch": split_opaque, "loss_weight": lambda batch: len(batch.x)}
    compare(Takes, batches_of(make_loader(), Opaque), ours={"options": weighed})


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ([], "returned no micro-batch"),
        (None, "returned None"),
        (torch.zeros(4, 2), r"returned a tensor of shape \(4, 2\)"),
        ({"x": 1}, r"returned \{'x': 1\} \(dict\)"),
        (3, r"returned 3 \(int\)"),
    ],
)
def test_what_is_no_list_of_microbatches_is_an_error(result: Any, words: str) -> None:
    def my_split(batch: Any, num_microbatches: int) -> Any:
        return result

    trainer = make_trainer(options={"split_batch": my_split})
    with pytest.raises((TypeError, ValueError), match=rf"my_split {words}.*return a list of micro-batches"):
        trainer.fit(Small(), make_loader())


def test_rows_that_cannot_be_told_are_warned_of() -> None:
    class Takes(TakesOpaque, Small):
        pass

    trainer = make_trainer(options={"split_batch": split_in_kind}, num_microbatches=2)
    with pytest.warns(UserWarning, match=r"2 micro-batches of split_in_kind .*weigh as if it were 1, 1.*loss_weight="):
        trainer.fit(Takes(), batches_of(make_loader(16), Untold))


class Sized(Opaque):
    """An object that says how many samples it has, in a way that its attributes do not show."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.rest = x, y, torch.zeros(7)

    def __len__(self) -> int:
        return len(self.x)


class Graphs(Sized):
    __len__: Any = None

    @property
    def num_graphs(self) -> int:
        return len(self.x)


class Untold(Sized):
    __len__: Any = None


class Predicts(Small):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return {"logits": self(batch.x), "y": batch.y}


def split_in_kind(batch: Any, num_microbatches: int) -> list[Any]:
    return [type(batch)(part.x, part.y) for part in split_opaque(batch, num_microbatches)]


@pytest.mark.parametrize("kind", [Opaque, Sized, Graphs, Untold])
def test_outputs_of_own_microbatches_are_joined(kind: Any) -> None:
    """By rows that their attributes agree on, by their own number, or by what weighs them."""
    options: dict[str, Any] = {"split_batch": split_in_kind}
    if kind is Untold:
        options["loss_weight"] = lambda batch: len(batch.x)
    batches = [kind(x, y) for x, y in make_loader()]

    def act(which: str) -> Any:
        return make_trainer(which, options=options).predict(Predicts(), ready(batches))

    assert [len(output["logits"]) for output in both(act)] == [8, 8, 4]


def test_outputs_that_cannot_be_joined_are_told_of_once() -> None:
    trainer = make_trainer(options={"split_batch": split_in_kind, "check_split": "off"}, num_microbatches=2)
    with pytest.warns(UserWarning, match="cannot be told") as caught:
        outputs = trainer.predict(Predicts(), ready([Untold(x, y) for x, y in make_loader()]))
    assert [[len(part) for part in output["logits"]] for output in outputs] == [[4, 4], [4, 4], [2, 2]]
    told = [str(one.message) for one in caught if "is a list of what each" in str(one.message)]
    assert len(told) == 1
    for word in ("output['logits'] of predict_step", "__len__", "loss_weight="):
        assert word in told[0]


# --- what training_step returns ----------------------------------------------------------------------------------


WRONG_RETURNS: dict[str, Callable[[Tensor], Any]] = {
    "dict without loss": lambda loss: {"value": loss},
    "loss of None": lambda loss: {"loss": None},
    "zero": lambda loss: 0,
    "tuple": lambda loss: (loss, 1),
    "object": lambda loss: Opaque(loss, loss),
}


@pytest.mark.parametrize(
    ("is_automatic", "kind"),
    # Manual optimization takes any dict.
    [*((True, kind) for kind in WRONG_RETURNS), (False, "zero"), (False, "tuple"), (False, "object")],
)
def test_wrong_returns_raise_as_in_plain(kind: str, is_automatic: bool) -> None:
    """The same error with the same words."""

    class Returns(Small):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = is_automatic

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return WRONG_RETURNS[kind](self.loss(batch).detach())

    both_refuse(
        lambda trainer: make_trainer(trainer).fit(Returns(), make_loader(8)), MisconfigurationException, "training_step"
    )


def test_loss_of_one_element() -> None:
    """Plain Lightning takes a loss of shape [1]."""

    class Returns(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch).reshape(1)

    compare(Returns, but_for=["losses"])  # of one element as well
