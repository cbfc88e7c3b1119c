"""Ranks with simulated GPUs: the same numbers as on the host, with gradients that travel by way of the GPUs or not."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_roundpipe.ranks.failures import RankError
from lightning_roundpipe.ranks.group import ManyRanks
from tests.support import accelerator
from tests.support.forks import Forks
from tests.support.parity import assert_alike, fit, make_loader
from tests.support.rank_runs.launch import run_ranks, values_of_ranks
from tests.support.small import Small

pytestmark = pytest.mark.accelerator

DTYPES = {"float32": (torch.float32, None), "wire": (torch.float32, torch.bfloat16), "float64": (torch.float64, None)}


def staged(timeout_s: float = 30.0) -> ManyRanks:
    """A group of ranks whose sums go by way of simulated GPUs."""
    module = accelerator.install()
    module.set_delay(200)
    collectives().register()
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", timeout=timeout)
    group = ManyRanks(timeout, "127.0.0.1")
    group.stage_sums("simccl", torch.device("sim", group.rank % 2))
    return group


def collectives() -> Any:
    """Imported late: it needs no simulated accelerator, and it is the rank's own."""
    from tests.support.accelerator import collectives

    return collectives


def sums() -> dict[str, Any]:
    group = staged()
    found: dict[str, Any] = {}
    for name, (dtype, wire) in DTYPES.items():
        whole = torch.arange(1000, dtype=dtype) * (group.rank + 1)
        found[name, "parts"] = group.add_up_parts(whole, [300, 700], "parts", wire)
        group.add_up(whole, "sum", wire)
        found[name, "sum"] = whole
    found["called"] = collectives().called
    found["races"] = torch.get_device_module("sim").stats()["races"]
    group.close()
    dist.destroy_process_group()
    return found


def test_sums_that_go_by_way_of_devices_are_those_of_the_host(forks: Forks, tmp_path: Path) -> None:
    found = values_of_ranks(forks, tmp_path, 2, sums)
    for rank, one in enumerate(found):
        for name, (dtype, wire) in DTYPES.items():
            expected = torch.arange(1000, dtype=dtype) * 3
            rounded = expected if wire is None else expected.to(wire).to(dtype)
            torch.testing.assert_close(one[name, "sum"], rounded, rtol=0 if wire is None else 2**-7, atol=0)
            part = expected[:300] if rank == 0 else expected[300:]
            torch.testing.assert_close(one[name, "parts"], part, rtol=0 if wire is None else 2**-7, atol=0)
            assert {one[name, kind].device.type for kind in ("sum", "parts")} == {"cpu"}
        assert sorted(one["called"]) == sorted(["alltoall", "allreduce"] * 2 + ["alltoall"] * 2 + ["allgather"])
        assert one["races"] == 0


def one_is_gone() -> str:
    group = staged()
    store = dist.distributed_c10d._get_default_store()
    if group.rank == 1:
        store.wait(["rank 0 is connected"])
        group.close(ValueError("no more"))
        return ""
    store.set("rank 0 is connected", "")
    with pytest.raises(RankError) as caught:
        group.add_up(torch.ones(10), "a sum that rank 1 does not come for")
    group.close(caught.value)
    return str(caught.value)


def test_a_wait_on_a_device_ends_when_another_rank_fails(forks: Forks, tmp_path: Path) -> None:
    first, _ = run_ranks(forks, tmp_path, 2, one_is_gone)
    assert first.status == 0, first.output
    assert "no more" in first.value


def one_does_not_connect() -> str:
    timeout = timedelta(seconds=100)
    dist.init_process_group("gloo", timeout=timeout)
    group = ManyRanks(timeout, "127.0.0.1")
    accelerator.install()
    collectives().register()
    group._timeout = timedelta(seconds=3)  # of the connections between devices
    if group.rank == 1:
        group.exchange([1.0], "whether gradients travel over simccl")
        group.close(ValueError("no more"))
        return ""
    with pytest.raises(RankError) as caught:
        group.stage_sums("simccl", torch.device("sim", 0))
    group.close(caught.value)
    return str(caught.value)


def test_connecting_devices_ends_when_another_rank_fails(forks: Forks, tmp_path: Path) -> None:
    first, _ = run_ranks(forks, tmp_path, 2, one_does_not_connect)
    assert first.status == 0, first.output
    assert "no more" in first.value


def rows_of(rank: int | None) -> list[tuple[Tensor, ...]]:
    """Batches of eight rows, of which rank 0 has five; all of them without a rank."""
    part = slice(None) if rank is None else slice(5) if rank == 0 else slice(5, None)
    return [tuple(tensor[part] for tensor in batch) for batch in make_loader(24)]


def trained(options: dict[str, Any]) -> dict[str, Tensor]:
    module = accelerator.install()
    collectives().register()
    settings: dict[str, Any] = {"accelerator": "roundpipe", "devices": 2, "use_distributed_sampler": False}
    run = fit("roundpipe", Small, rows_of(int(os.environ["RANK"])), options=options, max_epochs=1, **settings)
    assert str(run.trainer.strategy.parallel_devices[0]).startswith("sim")
    assert bool(collectives().called) is ("process_group_backend" in options)
    assert module.stats()["races"] == 0
    return run.state


OPTIONS: list[dict[str, Any]] = [
    {},
    {"process_group_backend": "cpu:gloo,sim:simccl"},
    {"process_group_backend": "cpu:gloo,sim:simccl", "shard_optimizer": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=["host", "devices", "devices, sharded"])
def test_ranks_train_as_one_device_does(forks: Forks, tmp_path: Path, options: dict[str, Any]) -> None:
    plain = fit("plain", Small, rows_of(None), max_epochs=1)
    plain.assert_moved()
    for state in values_of_ranks(forks, tmp_path, 2, trained, options):
        assert_alike(state, plain.state)
