"""Sums over ranks that go by way of GPUs, over NCCL."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_roundpipe.ranks.group import ManyRanks
from tests.support.forks import Forks
from tests.support.rank_runs.launch import values_of_ranks

pytestmark = pytest.mark.gpu

SIZE = 3_000_000  # elements, of which a rank of two owns a third


def sums() -> list[Tensor]:
    timeout = timedelta(seconds=60)
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout)
    group = ManyRanks(timeout, "127.0.0.1")
    group.stage_sums("nccl", torch.device("cuda", group.rank))
    whole = torch.ones(SIZE) * (group.rank + 1)
    low = whole.clone()
    parts = group.add_up_parts(whole, [SIZE] if group.size == 1 else [SIZE // 3, SIZE - SIZE // 3], "parts")
    group.add_up(whole, "sum")
    group.add_up(low, "sum in half", torch.bfloat16)
    group.close()
    dist.destroy_process_group()
    return [parts, whole, low]


@pytest.mark.parametrize("size", [1, 2])
def test_sums_over_nccl_are_exact_for_small_integers(forks: Forks, tmp_path: Path, size: int) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    for found in values_of_ranks(forks, tmp_path, size, sums):
        for total in found:
            assert total.device.type == "cpu"
            assert torch.equal(total, torch.full_like(total, float(size * (size + 1) // 2)))
