"""Masters that their owners alone keep: values, checkpoints and bytes, against ranks that keep all of them.

Both make the same sums in the same order, so that all bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from tests.ranks.masters.divided import told, trained
from tests.ranks.test_ranks_sharding import STEPS, Frozen, Groups, Two, batches, part_of_rank
from tests.support.forks import Forks
from tests.support.parity import assert_alike, make_trainer, ready
from tests.support.rank_runs.launch import place, values_of_ranks
from tests.support.small import CLASSES, WIDTH


class Normed(Groups):
    """Has a weight that autocast never casts, and a tied one."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(8)
            self.body = nn.Sequential(*self.body, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
            self.head = nn.Linear(WIDTH, CLASSES)


def scaled() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))


@dataclass(frozen=True)
class Case:
    """A module, settings of the trainer, and options of the strategy."""

    module: Callable[[], L.LightningModule] = Groups
    settings: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    "exact": Case(),
    "off": Case(settings={"gradient_clip_val": 0.05}, options={"optimizer_overlap": "off"}),
    "normed": Case(Normed),
    "frozen": Case(Frozen),
    "two": Case(Two),
    "accumulated": Case(settings={"accumulate_grad_batches": 2, "max_epochs": 2}),
    "scaled": Case(settings={"plugins": [scaled], "precision": None}),
}
# By number of ranks, the cases that run on so many.
ON = {2: tuple(CASES), 3: ("exact", "two")}


def settings_of(case: Case) -> dict[str, Any]:
    return {**case.settings, "plugins": [make() for make in case.settings.get("plugins", ())] or None}


def both_ways(folder: str, names: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    return {
        name: [
            told(
                trained(
                    case.module,
                    divides=divides,
                    folder=f"{folder}/{name}/{divides}",
                    options=case.options,
                    **settings_of(case),
                )
            )
            for divides in (True, False)
        ]
        for name in names
        for case in [CASES[name]]
    }


OfRanks = dict[int, tuple[Path, list[dict[str, list[dict[str, Any]]]]]]


@pytest.fixture(scope="module")
def of_ranks(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> OfRanks:
    """By number of ranks: where checkpoints are, and by rank what came of each case, divided and not."""
    found = {}
    for size, names in ON.items():
        folder = tmp_path_factory.mktemp(f"ranks-{size}")
        ranks = values_of_ranks(forks, folder / "runs", size, both_ways, str(folder), names, limit_s=120.0)
        found[size] = folder, ranks
    return found


@pytest.mark.parametrize(("name", "size"), [(name, size) for size, names in ON.items() for name in names])
def test_divided_masters_train_and_save_as_whole_ones_do(of_ranks: OfRanks, name: str, size: int) -> None:
    folder, ranks = of_ranks[size]
    for rank in ranks:
        divided, whole = rank[name]
        assert_alike(divided["weights"], whole["weights"], rtol=0.0, atol=0.0)
        assert_alike(divided["losses"], whole["losses"], rtol=0.0, atol=0.0)
        assert divided["bytes"][-1] < whole["bytes"][-1]
        assert divided["end"] == whole["end"]
    saved = sorted(path.name for path in (folder / name / "True").glob("*.ckpt"))
    assert len(saved) == STEPS
    for path in saved:
        one, other = (torch.load(folder / name / kind / path, weights_only=True) for kind in ("True", "False"))
        for part in ("state_dict", "optimizer_states"):
            assert_alike(one[part], other[part], rtol=0.0, atol=0.0)


@pytest.mark.parametrize("size", ON)
def test_a_rank_keeps_two_bytes_of_weights_that_are_not_its_own(of_ranks: OfRanks, size: int) -> None:
    ranks = [rank["exact"] for rank in of_ranks[size][1]]
    total = ranks[0][1]["bytes"][0]
    placeholders = 4 * len(ranks[0][1]["weights"])
    for divided, whole in ranks:
        assert whole["bytes"] == [total] * STEPS
        assert divided["bytes"][0] == total  # until it is known how weights are used
    kept = [divided["bytes"][-1] for divided, _ in ranks]
    assert (size + 1) * total // 2 <= sum(kept) <= (size + 1) * total // 2 + size * placeholders
    # Of the updates that are sent, all but the first are half as large.
    for divided, whole in ranks:
        assert divided["handed out"] * 2 * STEPS == whole["handed out"] * (STEPS + 1)


def test_what_autocast_does_not_cast_stays_whole(of_ranks: OfRanks) -> None:
    for rank in of_ranks[2][1]:
        divided, whole = rank["normed"]
        norm = 2 * 4 * WIDTH
        assert divided["bytes"][-1] > norm
        assert divided["handed out"] > (whole["handed out"] * (STEPS + 1)) // (2 * STEPS)


@pytest.mark.parametrize(("writers", "readers"), [(2, 3), (3, 1)])
def test_a_checkpoint_from_the_middle_resumes_with_another_number_of_ranks(
    forks: Forks, of_ranks: OfRanks, tmp_path: Path, writers: int, readers: int
) -> None:
    path = of_ranks[writers][0] / "exact" / "True" / "1.ckpt"
    expected = Groups()
    trainer = make_trainer("plain", precision="bf16-mixed")
    trainer.fit(expected, ready(batches(1)), ckpt_path=path)
    assert trainer.global_step == STEPS
    for rank in values_of_ranks(forks, tmp_path, readers, resumed, str(path)):
        assert rank["steps"] == STEPS
        assert_alike(rank["weights"], expected.state_dict(), rtol=0.05, atol=5e-4)


def resumed(path: str) -> dict[str, Any]:
    module = Groups()
    trainer = make_trainer(
        devices=2,
        num_microbatches=2,
        options={"shard_optimizer": True, "virtual_copies": True},
        use_distributed_sampler=False,
        precision="bf16-mixed",
    )
    trainer.fit(module, ready(part_of_rank(*place())), ckpt_path=path)
    weights: dict[str, Tensor] = dict(module.state_dict())
    return {"weights": weights, "steps": trainer.global_step}


def unaffected() -> list[dict[str, Any]]:
    return [
        told(trained(Groups, options={"virtual_copies": False})),
        told(trained(Groups, precision="32-true")),
        told(trained(Groups, options={"optimizer_overlap": "stale"})),
    ]


def test_where_weights_do_not_travel_in_low_precision_or_are_stale_all_ranks_keep_them(
    forks: Forks, tmp_path: Path
) -> None:
    for rank in values_of_ranks(forks, tmp_path, 2, unaffected):
        for run in rank:
            assert run["bytes"] == [run["end"]] * STEPS
