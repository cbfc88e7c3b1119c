"""Ranks on two hosts, with a cable of 1 Gbit/s between them: ``make test-network``."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe.ranks.environment import interface_of
from tests.ranks.test_ranks_failures import train_and_fail
from tests.ranks.test_ranks_numbers import trained_on_a_rank, trained_plainly
from tests.support.forks import Forks
from tests.support.parity import assert_alike, make_loader, make_trainer
from tests.support.rank_runs.hosts import CABLE, Host, two_hosts
from tests.support.rank_runs.launch import run_ranks, values_of_ranks
from tests.support.small import WIDTH, Small

pytestmark = pytest.mark.network

Hosts = tuple[Host, Host]
_WIDE = 1000


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with two_hosts() as both:
        yield both


@pytest.mark.parametrize("case", ["frozen parts", "branches", "adversaries"])
def test_ranks_on_two_hosts_train_as_one_device_with_all_rows(
    forks: Forks, tmp_path: Path, hosts: Hosts, case: str
) -> None:
    for one in values_of_ranks(forks, tmp_path, 2, trained_on_a_rank, case, hosts=hosts):
        assert_alike(one, trained_plainly(case, 2), rtol=1e-3, atol=1e-5)


class Wide(Small):
    """With a layer of a few megabytes in front."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Sequential(nn.Linear(WIDTH, _WIDE), nn.Linear(_WIDE, _WIDE), nn.Linear(_WIDE, WIDTH))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return super().loss((self.wide(x), y))


def train_wide(num_steps: int) -> None:
    torch.manual_seed(0)
    trainer = make_trainer(max_steps=num_steps, max_epochs=-1, devices=4)
    trainer.fit(Wide(), make_loader(40))


def test_gradients_travel_once(forks: Forks, tmp_path: Path, hosts: Hosts) -> None:
    """Each of two ranks sends one half of the bytes, and the sum of the other."""
    sent = []
    for num_steps in (2, 8):
        before = [host.num_bytes_sent for host in hosts]
        values_of_ranks(forks, tmp_path / str(num_steps), 2, train_wide, num_steps, hosts=hosts)
        sent.append([host.num_bytes_sent - known for host, known in zip(hosts, before, strict=True)])
    num_bytes = sum(weight.nbytes for weight in Wide().parameters())
    for few, many in zip(*sent, strict=True):
        assert num_bytes <= (many - few) / 6 <= 1.1 * num_bytes, "headers, and what ranks tell each other"


class CutOff(Small):
    """Rank 1 loses its network."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1 and os.environ["RANK"] == "1":
            subprocess.run(["ip", "link", "set", CABLE, "down"], check=True)
        return super().training_step(batch, batch_idx)


def train_and_lose_the_network() -> None:
    trainer = make_trainer(options={"timeout": timedelta(seconds=4)}, max_epochs=2, devices=4)
    trainer.fit(CutOff(), make_loader(40))


def test_ranks_without_a_network_end_and_name_each_other(forks: Forks, tmp_path: Path, hosts: Hosts) -> None:
    ends = run_ranks(forks, tmp_path, 2, train_and_lose_the_network, hosts=hosts)
    for rank, end in enumerate(ends):
        assert end.status == 1, end.output
        assert "RankError" in end.output
        assert f"rank {1 - rank}" in end.output.split("RankError: ")[-1]


@pytest.mark.parametrize("deed", ["SIGKILL", "raise"])
def test_a_rank_on_another_host_is_named(forks: Forks, tmp_path: Path, hosts: Hosts, deed: str) -> None:
    ends = run_ranks(forks, tmp_path, 2, train_and_fail, "training_step", 1, deed, hosts=hosts)
    assert ends[0].status == 1
    error = ends[0].output.split("RankError: ")[-1]
    assert error.startswith("rank 1 (")
    assert ("boom" if deed == "raise" else "has ended without an error message") in error


def test_an_interface_is_found_by_its_address(hosts: Hosts) -> None:
    code = "from lightning_roundpipe.ranks.environment import interface_of; print(interface_of('10.77.0.2'))"
    assert hosts[1].run(sys.executable, "-c", code).strip() == CABLE
    assert interface_of("127.0.0.1") is None
    assert interface_of("10.77.0.2") is None, "the host is another one"
