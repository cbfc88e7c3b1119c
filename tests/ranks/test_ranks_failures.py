"""A rank that fails, is interrupted or does not come: the others end soon, and say who it was, and why.

Ranks that are killed: test_ranks_killed.py.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from lightning_roundpipe.ranks.failures import Mailbox, RankError, failure_of
from tests.ranks.test_ranks_group import connected
from tests.support.forks import Forks
from tests.support.parity import make_loader, make_trainer
from tests.support.rank_runs.launch import SOON_S, RankEnd, run_ranks, values_of_ranks
from tests.support.small import Small


def is_rank(rank: int) -> bool:
    return os.environ["RANK"] == str(rank)


class Failing(Small):
    """Does something bad in one place on one rank."""

    def __init__(self, place: str, rank: int, deed: str) -> None:
        super().__init__()
        self.place, self.rank, self.deed = place, rank, deed

    def fail_in(self, place: str) -> None:
        if place != self.place or not is_rank(self.rank):
            return
        if self.deed == "raise":
            raise ValueError(f"boom in {place}")
        if self.deed == "hang":
            while not all(Path(f"ended-{other}").exists() for other in (0, 2)):
                threading.Event().wait(0.05)
            return
        os.kill(os.getpid(), getattr(signal, self.deed))

    def setup(self, stage: str) -> None:
        self.fail_in("setup")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            self.fail_in("training_step")
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("value", 1.0, sync_dist=True)
        if batch_idx == 1:
            self.fail_in("on_train_batch_end")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.fail_in("on_save_checkpoint")


def train_and_fail(place: str, rank: int, deed: str, timeout_s: float = 300.0) -> None:
    trainer = make_trainer(
        options={"timeout": timedelta(seconds=timeout_s)}, max_epochs=2, enable_checkpointing=True, devices=4
    )
    trainer.fit(Failing(place, rank, deed), make_loader(40))


def failed(forks: Forks, folder: Path, size: int, place: str, rank: int, deed: str) -> tuple[RankEnd, list[RankEnd]]:
    """How the rank has ended, and the others, who must have ended soon."""
    ends = run_ranks(forks, folder, size, train_and_fail, place, rank, deed)
    others = [end for other, end in enumerate(ends) if other != rank]
    for end in others:
        assert end.status == 1, end.output
        assert end.late_s < SOON_S, end.output
        assert f"rank {rank} (" in end.output.splitlines()[_last_error(end)], end.output
    return ends[rank], others


def _last_error(end: RankEnd) -> int:
    lines = end.output.splitlines()
    return max(i for i, line in enumerate(lines) if "RankError: " in line)


@pytest.mark.parametrize(
    ("place", "size", "rank"),
    [
        ("setup", 2, 1),
        ("training_step", 3, 1),
        ("on_save_checkpoint", 2, 0),
    ],
)
def test_others_end_with_the_error_of_a_rank_that_raises(
    forks: Forks, tmp_path: Path, place: str, size: int, rank: int
) -> None:
    end, others = failed(forks, tmp_path, size, place, rank, "raise")
    assert f"ValueError: boom in {place}" in end.output
    assert "RankError" not in end.output
    for other in others:
        assert f"has failed: ValueError: boom in {place}" in other.output


def test_an_interrupt_of_one_rank_ends_all(forks: Forks, tmp_path: Path) -> None:
    end, others = failed(forks, tmp_path, 2, "on_train_batch_end", 0, "SIGINT")
    assert end.status == 1
    for other in others:
        assert "has failed: KeyboardInterrupt" in other.output


def wait_in_vain() -> None:
    try:
        train_and_fail("on_train_batch_end", 1, "hang", timeout_s=10.0)  # the limit of the start as well
    finally:
        Path(f"ended-{os.environ['RANK']}").touch()


def test_a_rank_that_does_not_come_is_named_when_the_time_is_over(forks: Forks, tmp_path: Path) -> None:
    ends = run_ranks(forks, tmp_path, 3, wait_in_vain)
    for end in ends:
        assert end.status == 1
        assert "for 10 s, the time limit" in end.output
        assert "and rank 1 did not come" in end.output
    assert "RankError: rank 0 (" in ends[1].output or "RankError: rank 2 (" in ends[1].output


def wait_for_a_silent_machine() -> tuple[str, float]:
    """Rank 1 cannot be reached any more, and its connections stay as they are, as when a machine is gone."""
    group, told = connected(timeout_s=2 * SOON_S), Path("told")
    if group.rank == 1:
        group.check("nothing")
        group._mailbox.close()
        Path("silent").touch()
        while not told.exists():
            threading.Event().wait(0.05)
        return "", 0.0
    while not Path("silent").exists():
        threading.Event().wait(0.05)
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        group.barrier("something")
    told.touch()
    return str(caught.value), time.monotonic() - start


def test_a_machine_that_is_silent_is_found_long_before_the_time_is_over(forks: Forks, tmp_path: Path) -> None:
    (said, waited_s), _ = values_of_ranks(forks, tmp_path, 2, wait_for_a_silent_machine)
    assert said.startswith("rank 1 (")
    assert "its machine is out of reach" in said
    assert waited_s < SOON_S


def test_others_learn_of_an_error_with_a_long_message() -> None:
    """As that of load_state_dict, which names every key."""
    boxes = [Mailbox("127.0.0.1", "127.0.0.1") for _ in range(2)]
    for rank, box in enumerate(boxes):
        box.connect(rank, [box.address for box in boxes], ["here", "there"], "secret")
    boxes[0].send(failure_of(0, ValueError("missing: " + "\U0001f984" * 100_000)))
    assert "has failed: ValueError: missing: " in str(boxes[1].look())
    for box in boxes:
        box.close()
