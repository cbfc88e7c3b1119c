"""Losses over the rows of all micro-batches of all ranks, against plain Lightning with all rows in one batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.parity.batches.test_parity_whole_batch import CLIP
from tests.support.forks import Forks
from tests.support.parity import Watch, assert_alike, make_trainer, ready
from tests.support.rank_runs.launch import place, values_of_ranks
from tests.support.small import WIDTH

# Rows of each rank in each batch: as many micro-batches or not, one row, and a rank that runs out of batches.
ROWS = ((5, 3, 4, 6), (2, 3, 1))
VAL_ROWS = ((4, 4), (3, 3))

Batch = tuple[Tensor, Tensor]


def batches_of(rank: int, rows: tuple[tuple[int, ...], ...] = ROWS) -> list[Batch]:
    generator = torch.Generator().manual_seed(rank)
    return [
        (torch.randn(n, WIDTH, generator=generator), torch.randn(n, WIDTH, generator=generator)) for n in rows[rank]
    ]


def joined(rows: tuple[tuple[int, ...], ...]) -> list[Batch]:
    """The batches of all ranks in one, as far as they have any."""
    ranks = [batches_of(rank, rows) for rank in range(len(rows))]
    steps = range(max(map(len, ranks)))
    return [
        tuple(torch.cat([rank[step][i] for rank in ranks if step < len(rank)]) for i in range(2))  # type: ignore[misc]
        for step in steps
    ]


def trained(kind: str, train: list[Batch], val: list[Batch], **settings: Any) -> dict[str, Any]:
    module, watch = CLIP(), Watch()
    trainer = make_trainer(kind, callbacks=[watch], use_distributed_sampler=False, max_epochs=2, **settings)
    trainer.fit(module, ready(train), ready(val))
    return {
        "losses": [float(output["loss"]) for output in watch.losses],
        "gradients": watch.gradients,
        "state": module.state_dict(),
        "val_loss": float(trainer.callback_metrics["val_loss"]),
        "counts": watch.num_microbatches,
    }


def trained_on_a_rank() -> dict[str, Any]:
    rank, size = place()
    return trained("roundpipe", batches_of(rank), batches_of(rank, VAL_ROWS), devices=2 * size)


def test_rows_of_all_ranks(forks: Forks, tmp_path: Path) -> None:
    expected = trained("plain", joined(ROWS), joined(VAL_ROWS))
    for found in values_of_ranks(forks, tmp_path, 2, trained_on_a_rank):
        assert_alike(found["gradients"], expected["gradients"])
        assert_alike(found["state"], expected["state"])
        assert_alike(found["losses"][:3], expected["losses"][:3])
        assert_alike(found["val_loss"], expected["val_loss"])
        assert found["counts"][0] > 1
