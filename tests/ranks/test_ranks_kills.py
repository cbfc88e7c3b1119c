"""Ranks that are killed at any moment: the others say so, and the checkpoints that are there can be read.

``make test-kills`` tries fifty moments.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.support.forks import Forks
from tests.support.parity import make_loader, make_trainer
from tests.support.rank_runs.launch import run_ranks
from tests.support.small import Small

# A training takes about as long, with a checkpoint after every step.
_LONGEST_S = 2.0


class Kill(L.Callback):
    """Kills this process some time after the fit has begun."""

    def __init__(self, after_s: float) -> None:
        self.after_s = after_s

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        def kill() -> None:
            threading.Event().wait(self.after_s)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=kill, daemon=True).start()


def train_until_killed(rank: int, after_s: float) -> None:
    callbacks: list[L.Callback] = [ModelCheckpoint(Path.cwd(), every_n_train_steps=1, save_top_k=-1)]
    if os.environ["RANK"] == str(rank):
        callbacks.append(Kill(after_s))
    trainer = make_trainer(max_epochs=-1, max_steps=10_000, devices=4, callbacks=callbacks, enable_checkpointing=True)
    trainer.fit(Small(), make_loader(40))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("seed", range(metafunc.config.getoption("--kills")))


def test_a_killed_rank_ends_the_others_and_leaves_whole_files(forks: Forks, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([2, 3])
    rank, after_s = rng.randrange(size), rng.uniform(0.0, _LONGEST_S)
    ends = run_ranks(forks, tmp_path, size, train_until_killed, rank, after_s)
    assert ends[rank].status == -signal.SIGKILL, ends[rank].output
    for other, end in enumerate(ends):
        if other != rank:
            assert end.status == 1, end.output
            assert f"RankError: rank {rank} (" in end.output, end.output
            assert end.late_s < 15.0
    for path in tmp_path.glob("*.ckpt"):
        assert torch.load(path, weights_only=False)["global_step"] > 0, path
