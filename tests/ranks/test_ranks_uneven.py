"""Ranks with different numbers of batches: the one that runs out goes on without weight."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from tests.support.forks import Forks
from tests.support.parity import Watch, assert_alike, make_trainer, ready
from tests.support.rank_runs.launch import place, run_ranks, values_of_ranks
from tests.support.small import CLASSES, WIDTH, Small

Batch = tuple[Tensor, Tensor]
# Batches of each rank.
NUMBERS = {2: (4, 2), 3: (1, 4, 3)}
EPOCHS = 2
ROWS = 3


def batches_of(rank: int, size: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(rank)
    return [
        (torch.randn(ROWS, WIDTH, generator=generator), torch.randint(CLASSES, (ROWS,), generator=generator))
        for _ in range(NUMBERS[size][rank])
    ]


class Stream(IterableDataset[Batch]):
    """Batches whose number is not known."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


class Collecting(Small):
    """Does things with other ranks in each step, and normalizes in place what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.num_steps = 0
        self.gathered: list[list[float]] = []

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        self.gathered.append(self.all_gather(batch[0].sum()).reshape(-1).tolist())
        self.trainer.strategy.batch_to_device(batch)  # as the Trainer does it, but for no step

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss: Tensor = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        copy.deepcopy(self.trainer.strategy)  # without what connects the ranks
        self.num_steps += 1


def trained_on_a_rank(is_stream: bool, settings: dict[str, Any]) -> dict[str, Any]:
    rank, size = place()
    mine = batches_of(rank, size)
    loader: Any = DataLoader(Stream(mine), batch_size=None) if is_stream else ready(mine)
    module, watch = Collecting(), Watch()
    trainer = make_trainer(
        devices=2 * size, max_epochs=EPOCHS, callbacks=[watch], use_distributed_sampler=False, **settings
    )
    trainer.fit(module, loader)
    return {"seen": seen(module, watch), "gathered": module.gathered, "num_steps": module.num_steps}


def seen(module: Small, watch: Watch) -> dict[str, Any]:
    return {"state": dict(module.state_dict()), "gradients": watch.gradients}


def trained_plainly(size: int, settings: dict[str, Any]) -> dict[str, Any]:
    """The batches of those ranks that have one, together."""
    all_of = [batches_of(rank, size) for rank in range(size)]
    together = []
    for index in range(max(NUMBERS[size])):
        there = [own[index] for own in all_of if index < len(own)]
        together.append(tuple(torch.cat(part) for part in zip(*there, strict=True)))
    module, watch = Small(), Watch()
    trainer = make_trainer("plain", max_epochs=EPOCHS, callbacks=[watch], **settings)
    trainer.fit(module, ready(together))
    return seen(module, watch)


SETTINGS: dict[str, dict[str, Any]] = {"each": {}, "accumulated": {"accumulate_grad_batches": 3}}
# By number of ranks: whether the number of batches is known, and when there is a step.
CASES = {2: (("stream", "each"), ("lengths", "accumulated")), 3: (("lengths", "each"), ("stream", "accumulated"))}


def all_trained() -> dict[str, dict[str, Any]]:
    cases = CASES[place()[1]]
    return {kind: trained_on_a_rank(kind == "stream", SETTINGS[settings]) for kind, settings in cases}


@pytest.fixture(scope="module")
def of_ranks(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """By number of ranks and by rank, what came of each case."""
    folder = tmp_path_factory.mktemp("ranks")
    return {size: values_of_ranks(forks, folder / str(size), size, all_trained) for size in NUMBERS}


@pytest.mark.parametrize(
    ("size", "kind", "settings"), [(size, *case) for size, cases in CASES.items() for case in cases]
)
def test_ranks_without_batches_go_on_without_weight(
    of_ranks: dict[int, list[dict[str, Any]]], size: int, kind: str, settings: str
) -> None:
    expected = trained_plainly(size, SETTINGS[settings])
    found = [one[kind] for one in of_ranks[size]]
    for one in found:
        assert one["num_steps"] == EPOCHS * max(NUMBERS[size])
        assert one["gathered"] == found[0]["gathered"]
        assert_alike(one["seen"], expected, rtol=1e-3, atol=1e-5)


def takes_batches_itself() -> None:
    class Takes(Small):
        def training_step(self, dataloader_iter: Iterator[Any]) -> Tensor:
            loss: Tensor = self.loss(next(dataloader_iter)[0])
            return loss

    rank, size = place()
    make_trainer(use_distributed_sampler=False).fit(Takes(), ready(batches_of(rank, size)))


def test_steps_that_take_their_batches_are_refused(forks: Forks, tmp_path: Path) -> None:
    for end in run_ranks(forks, tmp_path, 2, takes_batches_itself):
        assert end.status == 1
        assert "training_step(self, dataloader_iter) takes batches itself, and ranks have different" in end.output


def named() -> list[int]:
    """How many names each micro-batch has."""
    found = []

    class Named(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            found.append(len(batch["classes"]))
            loss: Tensor = self.loss((batch["x"], batch["y"]))
            return loss

    rank, size = place()
    rows = [
        {"x": x, "y": y, "classes": ("a", "b", "c")} for b in batches_of(rank, size) for x, y in zip(*b, strict=True)
    ]
    make_trainer(use_distributed_sampler=False, max_steps=2).fit(Named(), DataLoader(rows, batch_size=3))
    return found


def test_the_layout_of_batches_is_known_as_without_other_ranks(forks: Forks, tmp_path: Path) -> None:
    """A list of three columns is not one of three samples."""
    for found in values_of_ranks(forks, tmp_path, 2, named):
        assert set(found) == {3}


def has_nothing() -> None:
    batches = batches_of(0, 2) if os.environ["RANK"] == "0" else []
    make_trainer(use_distributed_sampler=False).fit(Small(), DataLoader(Stream(batches), batch_size=None))


def test_a_rank_without_any_batch_is_an_error(forks: Forks, tmp_path: Path) -> None:
    for end in run_ranks(forks, tmp_path, 2, has_nothing):
        assert end.status == 1
        assert "training loader 1 has no batch at all on rank 1" in end.output
