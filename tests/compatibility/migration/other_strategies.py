"""Checkpoints that other strategies write, made by a real run of theirs on two processes.

``python -m tests.compatibility.migration.other_strategies FOLDER`` writes, each after two steps and after one epoch of
3 steps:

- ``ddp-2.ckpt``, ``ddp-3.ckpt``: DDP.
- ``full-2.ckpt``, ...: FSDP2, gathered into one file (``ModelParallelStrategy``).
- ``sharded-2``, ...: the same, as a folder with the parts of both processes.
- ``fsdp-2``, ...: a folder as ``FSDPStrategy(state_dict_type="sharded")`` writes it, which itself needs GPUs: the same
  parts under its names.

Then DDP and FSDP2 go on from ``FOLDER/begun-True.ckpt`` and ``begun-False.ckpt`` (by whether the optimizer has the head
first), to the end of the second epoch: ``ddp-6.ckpt``, ``full-6.ckpt``.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy

from tests.support.loaders import Resumable
from tests.support.rank_runs.script import free_port, variables
from tests.support.small import CLASSES, WIDTH, Small

ROWS, BATCH, PROCESSES = 24, 8, 2
_PATIENCE_S = 200.0  # less than that of the tests, more than ten times what it takes


class Migrating(Small):
    """The small model with hyper-parameters, an optimizer with two states per weight, and a scheduler."""

    def __init__(self, lr: float = 0.02, gamma: float = 0.8, head_first: bool = True) -> None:
        super().__init__()
        self.save_hyperparameters()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def configure_optimizers(self) -> Any:
        head, body = list(self.head.parameters()), list(self.body.parameters())
        groups = [{"params": head, "weight_decay": 0.1}, {"params": body}]
        if not self.hparams["head_first"]:  # the order of the module, which is the only one that FSDP can load
            groups.reverse()
        optimizer = torch.optim.AdamW(groups, lr=self.hparams["lr"], eps=1e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, self.hparams["gamma"])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Sharded(Migrating):
    """Its weights are split over the processes."""

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        for block in self.body:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self, mesh=self.device_mesh["data_parallel"])


def rows(share: slice = slice(None)) -> Resumable:
    """Batches of the data, or the share of one process in them."""
    generator = torch.Generator().manual_seed(ROWS)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    y = torch.randint(CLASSES, (ROWS,), generator=generator)
    return Resumable([[x[i : i + BATCH][share], y[i : i + BATCH][share]] for i in range(0, ROWS, BATCH)])


class SavesAfter(L.Callback):
    """Saves a checkpoint after each of some steps."""

    def __init__(self, pattern: str, steps: tuple[int, ...] = (2, 3)) -> None:
        self.pattern = pattern
        self.steps = steps

    @property
    def state_key(self) -> str:
        return self.pattern

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step in self.steps:
            path = self.pattern.format(trainer.global_step)
            if "fsdp" in path:
                save_as_fsdp(trainer, Path(path))
            else:
                trainer.save_checkpoint(path)


def save_as_fsdp(trainer: L.Trainer, folder: Path) -> None:
    """Writes the parts of this process under the names that ``FSDPStrategy`` gives them."""
    checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    state = {"model": checkpoint.pop("state_dict")}
    states = checkpoint.pop("optimizer_states")
    state.update({f"optimizer_{index}": entry for index, entry in enumerate(states)})
    torch.distributed.checkpoint.save(state, checkpoint_id=folder)
    if trainer.is_global_zero:
        torch.save(checkpoint, folder / "meta.pt")


def fit(module: Migrating, strategy: Strategy, patterns: list[str], rank: int, begun: str | None = None) -> None:
    """One epoch, or the rest of two, in this process, which is one of several."""
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=PROCESSES,
        max_epochs=1 if begun is None else 2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[SavesAfter(pattern, (2, 3) if begun is None else (6,)) for pattern in patterns],
    )
    share = BATCH // PROCESSES
    trainer.fit(module, rows(slice(rank * share, (rank + 1) * share)), ckpt_path=begun)


def process(rank: int, folder: str, port: int) -> None:
    """What one process does; a launcher would set these variables. If it does not end, its stacks tell where it is."""
    faulthandler.dump_traceback_later(_PATIENCE_S, exit=True)
    os.environ.update(variables(rank, PROCESSES, PROCESSES, "127.0.0.1", port))
    torch.set_num_threads(1)
    for has_begun in (False, True):
        begun = f"{folder}/begun-{{}}.ckpt".format if has_begun else lambda head_first: None
        strategy = DDPStrategy(process_group_backend="gloo")
        fit(Migrating(), strategy, [f"{folder}/ddp-{{}}.ckpt"], rank, begun(True))
        module = Sharded(head_first=not has_begun)
        fit(module, sharding(False), [f"{folder}/full-{{}}.ckpt"], rank, begun(False))
    fit(Sharded(), sharding(True), [f"{folder}/sharded-{{}}", f"{folder}/fsdp-{{}}"], rank)


def sharding(writes_folders: bool) -> ModelParallelStrategy:
    """FSDP2 over all processes."""
    return ModelParallelStrategy(
        data_parallel_size=PROCESSES,
        tensor_parallel_size=1,
        save_distributed_checkpoint=writes_folders,
        process_group_backend="gloo",
    )


def main(folder: str) -> None:
    """Runs both processes, as forks of this one: so they need not import everything again."""
    torch.multiprocessing.start_processes(process, (folder, free_port()), nprocs=PROCESSES, start_method="fork")


if __name__ == "__main__":
    main(sys.argv[1])
