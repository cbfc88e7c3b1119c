"""Who owns which weights, what an update over ranks does in which order, and the state of all ranks in one piece."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe.optimizer.sharded_state import gathered_state, own_part
from lightning_roundpipe.optimizer.sharding import Shards
from lightning_roundpipe.optimizer.updates import Updates
from lightning_roundpipe.ranks.buckets import Slice, buckets_of
from lightning_roundpipe.ranks.failures import RankError
from lightning_roundpipe.ranks.group import RankGroup
from lightning_roundpipe.ranks.reduction import Reduction, StepReduction
from lightning_roundpipe.weights.gradients import GradientStore
from tests.support.rank_threads import TIMEOUT_S, Hub, ThreadRank, run_ranks

Made = tuple[Shards, dict[str, nn.Parameter]]


def made(group: RankGroup, *sizes: int) -> Made:
    weights = {f"w{i}": nn.Parameter(torch.full((size,), float(i))) for i, size in enumerate(sizes)}
    shards = Shards(group, weights.items)
    shards.refresh()
    return shards, weights


class Alone(RankGroup):
    """A rank that asks no other one."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


# --- owners --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 5])
def test_owners_have_equal_parts_up_to_one_weight_and_are_the_same_on_all_ranks(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    sizes = torch.randint(1, 60, (90,), generator=generator).tolist()
    owners = []
    for rank in range(size):
        shards, weights = made(Alone(rank, size), *sizes)
        owners.append([shards.owner_of(weight) for weight in weights.values()])
        assert [shards.is_mine(weight) for weight in weights.values()] == [owner == rank for owner in owners[-1]]
    assert owners == [owners[0]] * size
    loads = [sum(n for n, owner in zip(sizes, owners[0], strict=True) if owner == rank) for rank in range(size)]
    assert max(loads) - min(loads) <= max(sizes)


def test_frozen_weights_do_not_count_and_later_ones_get_an_owner_while_others_keep_theirs() -> None:
    weights = [nn.Parameter(torch.zeros(10), requires_grad=i >= 4) for i in range(8)]
    known = weights[:-1]
    shards = Shards(Alone(0, 2), lambda: ((str(i), weight) for i, weight in enumerate(known)))
    shards.refresh()
    first = [shards.owner_of(weight) for weight in weights]
    assert sorted(map(str, first[4:])) == ["0", "0", "1", "None"]
    known = weights
    shards.refresh()
    assert [shards.owner_of(weight) for weight in weights[:-1]] == first[:-1]
    assert shards.owner_of(weights[-1]) in (0, 1)


def test_a_rank_may_own_nothing() -> None:
    shards, weights = made(Alone(2, 3), 10, 10)
    assert sorted(str(shards.owner_of(weight)) for weight in weights.values()) == ["0", "1"]


# --- gradients -----------------------------------------------------------------------------------------------------


def test_buckets_hold_gradients_of_several_owners_but_not_those_of_none() -> None:
    shards, weights = made(Alone(0, 2), 4, 4, 4, 4)
    owners = [shards.owner_of(weight) for weight in weights.values()]
    assert owners == [0, 1, 0, 1]
    other = nn.Parameter(torch.zeros(2))
    assert buckets_of([other, *weights.values()], 10**6, owners=shards) == [
        [Slice(other, 0, 2)],
        [Slice(weight, 0, 4, owner) for weight, owner in zip(weights.values(), owners, strict=True)],
    ]


@pytest.mark.parametrize("num_bytes", [8, 10**6])
def test_gradients_go_to_their_owner_alone(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """Early or not, whichever rank has one; a weight that no rank has one for gets none."""
    monkeypatch.setattr(buckets_of, "__defaults__", (num_bytes,))

    def work(group: ThreadRank) -> Any:
        shards, weights = made(group, 5, 3, 4, 6, 2)
        training = Reduction(group, weights.items, None, shards)
        found = []
        for number in range(2):
            training.agree([], f"step {number}")
            brought = {
                weight: torch.full_like(weight, 10.0**group.rank)
                for i, weight in enumerate(weights.values())
                if i != 4 and i != group.rank
            }
            found.append(StepReduction(training, f"step {number}", {}).finish(GradientStore.of(brought)))
        names = {weight: name for name, weight in weights.items()}
        owners = {name: shards.owner_of(weight) for name, weight in weights.items()}
        return owners, [{names[w]: gradient.tolist() for w, gradient in sums.items()} for sums in found]

    expected = {"w0": [10.0] * 5, "w1": [1.0] * 3, "w2": [11.0] * 4, "w3": [11.0] * 6}
    for rank, (owners, found) in enumerate(run_ranks(2, work)):
        assert set(owners.values()) == {0, 1}
        for sums in found:
            assert sums == {name: value for name, value in expected.items() if owners[name] == rank}


# --- updates -------------------------------------------------------------------------------------------------------


def stepped(group: ThreadRank, tensors: list[Tensor], prepare: Callable[[Updates], None] = lambda updates: None) -> Any:
    """Weights after two steps of Adam, and who has state."""
    weights = {str(i): nn.Parameter(tensor) for i, tensor in enumerate(tensors)}
    shards = Shards(group, weights.items)
    shards.refresh()
    optimizer = torch.optim.Adam(weights.values(), lr=0.1, eps=1e-3)
    updates = Updates(1, shards=shards)
    for number in range(2):
        for i, weight in enumerate(weights.values()):
            # Weight 1 has no gradient at first.
            mine = shards.is_mine(weight) and (number, i) != (0, 1)
            weight.grad = torch.full_like(weight, 1.0 + i) if mine else None
        with updates.overlapping(optimizer, list):
            optimizer.step()
    updates.wait()
    state = updates.guard(optimizer)
    assert [weight in state for weight in weights.values()] == list(map(shards.is_mine, weights.values()))
    return [weight.detach().clone() for weight in weights.values()]


def tensors() -> list[Tensor]:
    return [
        torch.arange(12.0).view(3, 4).t(), torch.ones(5, dtype=torch.float64), torch.tensor(3.0),
        torch.zeros(0, 3), torch.ones(7, dtype=torch.bfloat16), torch.ones(4),
    ]  # fmt: skip


def test_all_ranks_get_the_weights_of_all_owners_whatever_their_layout() -> None:
    plain = [nn.Parameter(tensor) for tensor in tensors()]
    optimizer = torch.optim.Adam(plain, lr=0.1, eps=1e-3)
    for number in range(2):
        for i, weight in enumerate(plain):
            weight.grad = None if (number, i) == (0, 1) else torch.full_like(weight, 1.0 + i)
        optimizer.step()
    for found in run_ranks(3, lambda group: stepped(group, tensors())):
        for weight, expected in zip(found, plain, strict=True):
            torch.testing.assert_close(weight, expected.detach())


def test_every_rank_makes_its_next_block_before_it_waits_for_those_of_others() -> None:
    """Steps of both ranks are under way at the same time: each is held until the other one has begun."""
    hub = Hub(2)
    begun = [threading.Event(), threading.Event()]

    class Waits(torch.optim.SGD):
        is_separable = True

        def __init__(self, weights: Any, rank: int) -> None:
            super().__init__(weights, lr=1.0)
            self.rank = rank

        def step(self, closure: Any = None) -> None:
            begun[self.rank].set()
            assert begun[1 - self.rank].wait(TIMEOUT_S)
            super().step()

    def work(group: ThreadRank) -> Any:
        shards, weights = made(group, 4, 4)
        for weight in filter(shards.is_mine, weights.values()):
            weight.grad = torch.ones_like(weight)
        updates = Updates(1, shards=shards)
        updates.start(Waits(weights.values(), group.rank), [])
        updates.wait()
        return [weight[0].item() for weight in weights.values()]

    assert run_ranks(2, work, hub) == [[-1.0, 0.0]] * 2


def test_ranks_that_step_different_optimizers_are_told_so() -> None:
    def work(group: ThreadRank) -> None:
        shards, weights = made(group, 4, 4)
        for _ in range(1 + group.rank):
            shards.agree(weights.values(), {})
        group.exchange([], "something else")

    with pytest.raises(RankError, match="different ways"):
        run_ranks(2, work)


# --- state ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("large_bytes", [1, 10**6])
def test_the_state_of_all_ranks_becomes_one_on_the_first_and_is_divided_again(
    monkeypatch: pytest.MonkeyPatch, large_bytes: int
) -> None:
    monkeypatch.setattr("lightning_roundpipe.optimizer.sharded_state._LARGE_BYTES", large_bytes)

    def state_after(weights: list[nn.Parameter], is_mine: Callable[[nn.Parameter], bool]) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(weights, amsgrad=True)
        for i, weight in enumerate(weights):
            weight.grad = torch.full_like(weight, 1.0 + i) if is_mine(weight) else None
        optimizer.step()
        return optimizer

    def work(group: ThreadRank) -> Any:
        shards, weights = made(group, 9, 4, 5, 3)
        optimizer = state_after(list(weights.values()), shards.is_mine)
        whole = gathered_state(optimizer, shards, "the optimizer")
        mine = [index for index, weight in enumerate(weights.values()) if shards.is_mine(weight)]
        assert list(own_part(whole, optimizer, shards)["state"]) == mine
        return whole

    first, *others = run_ranks(3, work)
    expected = state_after(list(made(Alone(0, 1), 9, 4, 5, 3)[1].values()), lambda weight: True).state_dict()
    assert list(first["state"]) == list(expected["state"])
    for index, entry in expected["state"].items():
        for key, value in entry.items():
            torch.testing.assert_close(first["state"][index][key], value)
    assert first["param_groups"] == expected["param_groups"]
    assert all(len(other["state"]) < len(expected["state"]) for other in others)
