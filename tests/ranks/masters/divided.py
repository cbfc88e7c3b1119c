"""Training on a rank whose masters are divided, or all kept, to be compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import torch
from torch import Tensor, nn

from lightning_roundpipe.optimizer.masters import Masters
from lightning_roundpipe.ranks.group import ManyRanks
from lightning_roundpipe.weights.futures import unwaited
from lightning_roundpipe.weights.kept_low import low_of
from tests.ranks.test_ranks_sharding import part_of_rank, state_of
from tests.support.parity import make_trainer, ready
from tests.support.rank_runs.launch import place


def weight_bytes(module: nn.Module) -> int:
    """What masters take on this rank, and copies that are kept in their place."""
    with unwaited():
        masters = sum(p.data.untyped_storage().nbytes() for p in module.parameters())
    return masters + sum(low.nbytes for p in module.parameters() if (low := low_of(p)) is not None)


class Seen(L.Callback):
    """Of each training step: the loss, bytes of weights, and a checkpoint if there is a folder for it."""

    def __init__(self, folder: str | None) -> None:
        self.folder = folder
        self.losses: list[Tensor] = []
        self.bytes: list[int] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].detach().clone() if outputs else None)
        self.bytes.append(weight_bytes(pl_module))
        if self.folder is not None:
            trainer.save_checkpoint(Path(self.folder) / f"{batch_idx}.ckpt")


def trained(
    make: Callable[[], L.LightningModule],
    *,
    divides: bool = True,
    folder: str | None = None,
    options: dict[str, Any] | None = None,
    callbacks: Sequence[L.Callback] = (),
    loaders: dict[str, Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """What came of a fit with the rank's rows of each batch."""
    torch.manual_seed(3)
    seen, module, handed_out = Seen(folder), make(), []
    trainer = make_trainer(
        devices=2,
        num_microbatches=2,
        options={"shard_optimizer": True, "virtual_copies": True, **(options or {})},
        callbacks=[*callbacks, seen],
        **{"use_distributed_sampler": False, "precision": "bf16-mixed", **settings},
    )
    plain = ManyRanks.share

    def share(self: ManyRanks, mine: Tensor, sizes: Sequence[int], what: str) -> list[Tensor]:
        handed_out.extend(sizes)
        return plain(self, mine, sizes, what)

    with (
        mock.patch.object(ManyRanks, "share", share),
        mock.patch.object(Masters, "begin_step", Masters.begin_step if divides else mock.Mock(return_value=0)),
    ):
        trainer.fit(module, ready(part_of_rank(*place())), **(loaders or {}))
    return {
        "module": module,
        "trainer": trainer,
        "weights": state_of(module),
        "losses": seen.losses,
        "bytes": seen.bytes,
        "handed out": sum(handed_out),
        "end": weight_bytes(module),
    }


def told(run: dict[str, Any]) -> dict[str, Any]:
    """What a rank hands back of :func:`trained`."""
    return {name: value for name, value in run.items() if name not in ("module", "trainer")}
