"""What ranks tell each other, and add up."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_roundpipe.ranks.failures import RankError
from lightning_roundpipe.ranks.group import ALONE, ManyRanks
from tests.support.forks import Forks
from tests.support.rank_runs.launch import values_of_ranks


def connected(timeout_s: float = 30.0) -> ManyRanks:
    """The group of the ranks that the variables of the environment tell of."""
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", timeout=timeout)
    return ManyRanks(timeout, "127.0.0.1")


def all_messages() -> dict[str, Any]:
    group = connected()
    rank = group.rank
    found: dict[str, Any] = {"place": (rank, group.size)}
    found["few"] = group.exchange([rank, 1 / (rank + 3)], "few")
    found["many"] = group.exchange([rank * 1000.0 + i for i in range(100)], "many")
    found["none"] = group.exchange([], "none")
    found["objects"] = group.gather({"of": "x" * (rank * 5)}, "objects")
    found["broadcast"] = group.broadcast([rank, "text"], "broadcast", source=1)
    tensors = [torch.full((2, 3), float(rank)).t(), torch.tensor(rank == 1), torch.empty(0)]
    tensors.append(torch.tensor([rank], dtype=torch.bfloat16))
    group.copy_from(tensors, "tensors", source=1)
    found["tensors"] = tensors
    mine = torch.arange(1000.0) * (rank + 1) / 3
    found["parts"] = mine.clone()
    group.add_up(mine, "sum")
    found["sum"] = mine
    group.barrier("end")
    group.close()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_learn_what_the_others_say(forks: Forks, tmp_path: Path, size: int) -> None:
    found = values_of_ranks(forks, tmp_path, size, all_messages)
    assert [one["place"] for one in found] == [(rank, size) for rank in range(size)]
    for one in found:
        assert one["few"] == [[rank, 1 / (rank + 3)] for rank in range(size)]
        assert one["many"] == [[rank * 1000.0 + i for i in range(100)] for rank in range(size)]
        assert one["none"] == [[]] * size
        assert one["objects"] == [{"of": "x" * (rank * 5)} for rank in range(size)]
        assert one["broadcast"] == [1, "text"]
        assert torch.equal(one["tensors"][0], torch.full((3, 2), 1.0))
        assert torch.equal(one["tensors"][1], torch.tensor(True))
        assert torch.equal(one["tensors"][3], torch.tensor([1], dtype=torch.bfloat16))
        torch.testing.assert_close(one["sum"], sum(other["parts"] for other in found))
        assert torch.equal(one["sum"], found[0]["sum"])


# Sums in these dtypes themselves would be 256 and 2048.
_LOW = {torch.bfloat16: [256.0, 1.0, 1.0], torch.float16: [2048.0, 1.0, 1.0]}


def low_sums() -> dict[torch.dtype, Tensor]:
    group = connected()
    found = {}
    for wire, values in _LOW.items():
        for dtype in (torch.float32, wire):
            tensor = torch.full((10,), values[group.rank], dtype=dtype)
            tensor[7] = float(group.rank)
            group.add_up(tensor, "sum", wire)
            assert tensor.dtype == dtype
            assert found.setdefault(wire, tensor).equal(tensor.to(found[wire].dtype))
    group.close()
    dist.destroy_process_group()
    return found


def test_sums_in_low_precision_are_made_in_float32(forks: Forks, tmp_path: Path) -> None:
    for found in values_of_ranks(forks, tmp_path, 3, low_sums):
        for wire, values in _LOW.items():
            expected = torch.full((10,), sum(values))
            expected[7] = 3.0
            assert torch.equal(found[wire], expected)


def different_ways() -> str:
    group = connected()
    try:
        group.barrier("the barrier 'a'" if group.rank == 0 else "step 3")
    except RankError as error:
        return str(error)
    return "no error"


def test_ranks_that_come_for_different_things_are_told_of_each_other(forks: Forks, tmp_path: Path) -> None:
    for message in values_of_ranks(forks, tmp_path, 2, different_ways):
        assert "rank 0 has come for the barrier 'a'" in message
        assert "rank 1 has come for step 3" in message


def test_one_rank_alone_hears_itself() -> None:
    tensor = torch.ones(2)
    assert ALONE.exchange([1, 2.5], "numbers") == [[1.0, 2.5]]
    assert ALONE.gather("x", "objects") == ["x"]
    assert ALONE.broadcast("x", "object") == "x"
    ALONE.add_up(tensor, "sum")
    ALONE.copy_from([tensor], "tensor")
    ALONE.barrier("end")
    ALONE.check("anything")
    ALONE.close()
    assert torch.equal(tensor, torch.ones(2))
    assert (ALONE.rank, ALONE.size) == (0, 1)
