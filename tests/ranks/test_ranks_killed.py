"""A rank is killed at any point of a training: the others say which one it was, and no file is broken.

``make test-kills`` kills fifty.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.support.forks import Forks
from tests.support.parity import make_loader, make_trainer
from tests.support.rank_runs.launch import SOON_S, run_ranks
from tests.support.small import Small

RANKS = 3
# About as long as some dozens of steps take.
_LONGEST_S = 1.5


class Killed(Small):
    """Trains until one rank is killed, some time after the start, wherever it is."""

    def __init__(self, rank: int, after_s: float) -> None:
        super().__init__()
        self.rank, self.after_s = rank, after_s

    def on_train_start(self) -> None:
        if self.global_rank == self.rank:
            threading.Timer(self.after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()


def train_until_killed(rank: int, after_s: float) -> None:
    saves = ModelCheckpoint("files", every_n_train_steps=3, save_top_k=-1, save_last=True)
    trainer = make_trainer(
        devices=RANKS, max_epochs=-1, enable_checkpointing=True, callbacks=[saves], options={"virtual_copies": True}
    )
    trainer.fit(Killed(rank, after_s), make_loader(48, 4), make_loader(24))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("seed", range(metafunc.config.getoption("--kills")))


def test_others_name_a_rank_that_was_killed_at_any_point(forks: Forks, tmp_path: Path, seed: int) -> None:
    drawn = random.Random(seed)
    rank = drawn.randrange(RANKS)
    ends = run_ranks(forks, tmp_path, RANKS, train_until_killed, rank, drawn.uniform(0, _LONGEST_S))
    for other, end in enumerate(ends):
        if other == rank:
            assert end.status == -signal.SIGKILL
            continue
        assert end.status == 1, end.output
        assert end.late_s < SOON_S
        assert f"RankError: rank {rank} (" in end.output, end.output
        assert "has ended without an error message" in end.output
    for path in (tmp_path / "files").glob("*.ckpt"):
        torch.load(path, weights_only=False)
