"""What ranks tell each other, and add up."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_roundpipe.ranks.group import ManyRanks
from tests.support.forks import Forks
from tests.support.rank_runs.launch import values_of_ranks

SIZE = 3


def connected(timeout_s: float = 30.0) -> ManyRanks:
    """The group of the ranks that the variables of the environment tell of."""
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", timeout=timeout)
    return ManyRanks(timeout, "127.0.0.1")


def everything() -> dict[str, Any]:
    group = connected()
    found = {"messages": messages(group), "low": low_sums(group), "parts": parts(group)}
    group.barrier("end")
    group.close()
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def of_ranks(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By rank, what came of each function."""
    return values_of_ranks(forks, tmp_path_factory.mktemp("ranks"), SIZE, everything)


def messages(group: ManyRanks) -> dict[str, Any]:
    rank = group.rank
    found: dict[str, Any] = {"place": (rank, group.size)}
    found["few"] = group.exchange([rank, 1 / (rank + 3)], "few")
    found["many"] = group.exchange([rank * 1000.0 + i for i in range(100)], "many")
    found["none"] = group.exchange([], "none")
    found["objects"] = group.gather({"of": "x" * (rank * 5)}, "objects")
    tensors = [torch.full((2, 3), float(rank)).t(), torch.tensor(rank == 1), torch.empty(0)]
    tensors.append(torch.tensor([rank], dtype=torch.bfloat16))
    group.copy_from(tensors, "tensors", source=1)
    found["tensors"] = tensors
    mine = torch.arange(1000.0) * (rank + 1) / 3
    found["parts"] = mine.clone()
    group.add_up(mine, "sum")
    found["sum"] = mine
    return found


def test_ranks_learn_what_the_others_say(of_ranks: list[dict[str, Any]]) -> None:
    found = [one["messages"] for one in of_ranks]
    assert [one["place"] for one in found] == [(rank, SIZE) for rank in range(SIZE)]
    for one in found:
        assert one["few"] == [[rank, 1 / (rank + 3)] for rank in range(SIZE)]
        assert one["many"] == [[rank * 1000.0 + i for i in range(100)] for rank in range(SIZE)]
        assert one["none"] == [[]] * SIZE
        assert one["objects"] == [{"of": "x" * (rank * 5)} for rank in range(SIZE)]
        assert torch.equal(one["tensors"][0], torch.full((3, 2), 1.0))
        assert torch.equal(one["tensors"][1], torch.tensor(True))
        assert torch.equal(one["tensors"][3], torch.tensor([1], dtype=torch.bfloat16))
        torch.testing.assert_close(one["sum"], sum(other["parts"] for other in found))
        assert torch.equal(one["sum"], found[0]["sum"])


# Sums in these dtypes themselves would be 256 and 2048.
_LOW = {torch.bfloat16: [256.0, 1.0, 1.0], torch.float16: [2048.0, 1.0, 1.0]}


def low_sums(group: ManyRanks) -> dict[torch.dtype, Tensor]:
    found: dict[torch.dtype, Tensor] = {}
    for wire, values in _LOW.items():
        for dtype in (torch.float32, wire):
            tensor = torch.full((10,), values[group.rank], dtype=dtype)
            tensor[7] = float(group.rank)
            group.add_up(tensor, "sum", wire)
            assert tensor.dtype == dtype
            assert found.setdefault(wire, tensor).equal(tensor.to(found[wire].dtype))
    return found


def test_sums_in_low_precision_are_made_in_float32(of_ranks: list[dict[str, Any]]) -> None:
    for found in of_ranks:
        for wire, values in _LOW.items():
            expected = torch.full((10,), sum(values))
            expected[7] = 3.0
            assert torch.equal(found["low"][wire], expected)


def parts(group: ManyRanks) -> list[Any]:
    found: list[Any] = []
    for dtype, wire in ((torch.float64, None), (torch.float32, torch.bfloat16), (torch.float32, None)):
        for sizes in ([2, 0, 3], [0, 4, 0]):
            mine = torch.arange(float(sum(sizes)), dtype=dtype) + 100.0 * group.rank
            before = mine.clone()
            found.append(group.add_up_parts(mine, sizes, "parts", wire))
            assert torch.equal(mine, before)
    for sizes in ([1, 0, 3], [0, 0, 0]):
        mine = torch.full((sizes[group.rank],), group.rank, dtype=torch.uint8)
        found.append(group.share(mine, sizes, "what each has"))
    return found


def test_each_rank_gets_its_part_of_a_sum_and_what_others_share_which_may_be_nothing(
    of_ranks: list[dict[str, Any]],
) -> None:
    expected = [[[300.0, 303.0], [], [306.0, 309.0, 312.0]], [[], [300.0, 303.0, 306.0, 309.0], []]] * 3
    for rank, one in enumerate(of_ranks):
        *sums, shared, nothing = one["parts"]
        assert [values.tolist() for values in shared] == [[0], [], [2, 2, 2]]
        assert [values.tolist() for values in nothing] == [[], [], []]
        for found, wanted in zip(sums, expected, strict=True):
            torch.testing.assert_close(found.tolist(), wanted[rank], rtol=0.01, atol=0.0)
