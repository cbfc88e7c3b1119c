"""``self.log(..., batch_size=...)``: it weighs batches against each other and nothing else. And: users' warnings."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_roundpipe.integration.batches.splitting import Batches
from lightning_roundpipe.integration.steps.log_merging import _batch_size, _LogCall
from tests.support.loaders import Loader
from tests.support.parity import both, compare, make_loader, make_trainer
from tests.support.small import Small


def labelled() -> list[dict[str, Tensor]]:
    """Batches of different sizes, with different losses; rows have between none and all of 5 positions labelled."""
    generator = torch.Generator().manual_seed(5)
    batches = []
    for scale, rows in enumerate((8, 7, 4)):
        labels = torch.randint(3, (rows, 5), generator=generator)
        keep = torch.randint(0, 6, (rows, 1), generator=generator)
        keep[0], keep[1] = 1, 5
        labels[torch.arange(5)[None] >= keep] = -100
        x = torch.randn(rows, 5, 6, generator=generator)
        batches.append({"x": x, "labels": labels, "scale": torch.full((rows,), 2.0**scale)})
    return batches


# What users give as batch_size.
SIZES: dict[str, Any] = {
    "none": lambda batch: None,
    "rows": lambda batch: len(batch["x"]),
    "positions": lambda batch: batch["labels"].numel(),
    "labels": lambda batch: int((batch["labels"] >= 0).sum()),
    "configured": lambda batch: 8,
    "less than there are": lambda batch: 3,
    "one": lambda batch: 1,
}


class Tokens(Small):
    """A mean over labels."""

    def token_loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch["x"]).flatten(0, 1), batch["labels"].flatten()) * batch["scale"][0]

    def log_sizes(self, batch: Any, loss: Tensor, **where: Any) -> None:
        for name, size in SIZES.items():
            self.log(f"{name} {where}", loss, batch_size=size(batch), **where)
        size = len(batch["x"])
        self.log(f"sum {where}", batch["x"].sum(), reduce_fx="sum", batch_size=size, **where)
        self.log(f"max {where}", batch["x"].max(), reduce_fx="max", batch_size=size, **where)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.token_loss(batch)
        self.log_sizes(batch, loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.token_loss(batch)
        self.log_sizes(batch, loss)
        self.log("val_loss", loss, batch_size=len(batch["x"]))


def test_batch_sizes_weigh_batches_and_nothing_else() -> None:
    """Three micro-batches of each batch have different numbers of rows, which a constant has not."""
    ours = {"options": {"loss_weight": "label_tokens"}}
    plain, _ = compare(Tokens, Loader(labelled()), Loader(labelled()), ours=ours)
    found = {name: round(float(plain.trainer.callback_metrics[f"{name} {{}}"]), 3) for name in SIZES}
    assert found["none"] == found["rows"] == found["positions"]
    assert found["configured"] == found["less than there are"] == found["one"]
    assert len(set(found.values())) == 3


# name: (what micro-batches give, how many rows they have, how many the batch has, what is given for the batch)
MERGED: dict[str, tuple[list[int | None], tuple[int, ...], int | None, int | None]] = {
    "rows": ([4, 4], (4, 4), 8, 8),
    "unequal rows": ([3, 2], (3, 2), 5, 5),
    "other counts": ([12, 7], (4, 4), 8, 19),
    "the whole batch": ([8, 8], (4, 4), 8, 8),
    "configured, in the last batch": ([8, 8], (2, 2), 4, 8),
    "one": ([1, 1], (4, 4), 8, 1),
    "unlike rows": ([4, 4], (3, 2), 5, 4),
    "rows that are not known": ([4, 4], (1, 1), None, 8),
    "not all": ([4, None], (4, 4), 8, None),
    "none": ([None, None], (4, 4), 8, None),
}


@pytest.mark.parametrize("name", MERGED)
def test_the_batch_size_of_the_batch(name: str) -> None:
    given, sizes, rows, wanted = MERGED[name]
    weights = tuple(1 / len(sizes) for _ in sizes)
    batches = Batches(tuple(range(len(sizes))), sizes, weights, weights, rows)
    group = [_LogCall(i, "", "", 0.0, {"batch_size": size}, "") for i, size in enumerate(given)]
    assert _batch_size(group, batches) == wanted


def test_the_mean_of_a_validation_by_hand() -> None:
    """Losses of 1 for three labels and of 4 for one: 1.75, and not the 2.5 of two rows."""

    class Known(Small):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            labels = batch["labels"]
            loss = (batch["x"] * (labels >= 0)).sum() / (labels >= 0).sum()
            self.log("val_loss", loss, batch_size=len(labels))

    x, labels = torch.tensor([[1.0, 1.0, 1.0], [4.0, 0.0, 0.0]]), torch.tensor([[1, 1, 1], [1, -100, -100]])
    loader = Loader([{"x": x, "labels": labels}])

    def validated(kind: str) -> float:
        options = {"loss_weight": "label_tokens"}
        (found,) = make_trainer(kind, num_microbatches=2, options=options).validate(Known(), loader, verbose=False)
        return float(found["val_loss"])

    assert both(validated) == pytest.approx(1.75)


def test_what_users_warn_of_is_heard_once() -> None:
    class Warns(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            warnings.warn("of the step", stacklevel=1)
            for _ in range(2):
                warnings.warn(f"of {batch[0].sum():.6f}", stacklevel=1)
            return self.loss(batch)

    def heard(kind: str) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            show = warnings.showwarning
            make_trainer(kind).fit(Warns(), make_loader())
            assert warnings.showwarning is show
        return [str(one.message).split(" ")[1][:3] for one in caught if str(one.message).startswith("of ")]

    plain, ours = heard("plain"), heard("roundpipe")
    assert len(ours) == len(plain) == 9
    assert ours.count("the") == 3
