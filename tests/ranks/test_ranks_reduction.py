"""Gradients over ranks: what goes when, in which order, what comes after, and what errors become."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe.devices.transfer import Done
from lightning_roundpipe.ranks.buckets import Slice, buckets_of
from lightning_roundpipe.ranks.failures import RankError
from lightning_roundpipe.ranks.group import RankGroup
from lightning_roundpipe.ranks.reduction import Reduction, StepReduction
from lightning_roundpipe.weights.gradients import LOOSE, GradientStore
from tests.support.rank_threads import TIMEOUT_S, Hub, ThreadRank, run_ranks

NAMES = ("a", "b", "c")
# One unit per weight, whose backward runs in one stage, once.
SOURCES = {name: (index, 5 - index, False) for index, name in enumerate(NAMES)}
OFF_PLAN = (1, 1 << 60, False, 0)
MADE: list[Reduction] = []


class Rank:
    """A rank with three weights of four elements, and its steps.

    Args:
        trained: names of those that require a gradient.
    """

    def __init__(self, group: RankGroup, trained: Iterable[str] = NAMES) -> None:
        self.weights = {name: nn.Parameter(torch.zeros(4), requires_grad=name in trained) for name in NAMES}
        self.group = group
        self.training = Reduction(group, self.weights.items)
        MADE.append(self.training)
        self.errors: list[BaseException] = []
        self.local: dict[nn.Parameter, Tensor] = {}
        self.run: StepReduction

    def step(
        self, bring: Callable[[GradientStore], None] = lambda store: None, number: int = 0
    ) -> dict[str, list[float]]:
        """A step whose backward is ``bring``; the gradients, by name."""
        self.training.agree([], f"step {number}")
        store = GradientStore()
        self.run = StepReduction(self.training, f"step {number}", self.local)
        store.foresee({self.weights[name]: {source: 1} for name, source in SOURCES.items()})
        self.run.begin(store, self.errors.append)
        bring(store)
        found = self.run.finish(store)
        names = {weight: name for name, weight in self.weights.items()}
        return {names[weight]: gradient.tolist() for weight, gradient in found.items()}

    def bring(self, store: GradientStore, *values: tuple[str, float], source: tuple[int, ...] | None = None) -> None:
        for name, value in values:
            gradient = Done([torch.full((4,), value)])
            store.add_later([self.weights[name]], gradient, source or SOURCES[name], 0)

    def brings(self, *values: tuple[str, float]) -> Callable[[GradientStore], None]:
        return lambda store: self.bring(store, *values)


@pytest.fixture(autouse=True)
def one_weight_per_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets_of, "__defaults__", (16,))


@pytest.fixture(autouse=True)
def threads_end() -> Iterator[None]:
    yield
    while MADE:
        MADE.pop().close()


def full(**values: float) -> dict[str, list[float]]:
    return {name: [value] * 4 for name, value in values.items()}


def sent(group: RankGroup) -> list[str]:
    assert isinstance(group, ThreadRank)
    return [what.removeprefix("gradients of ") for what, _, _ in group.sent]


# --- buckets -------------------------------------------------------------------------------------------------------


def test_buckets_hold_gradients_of_one_dtype_in_their_order_and_split_large_ones() -> None:
    a, b, c = (nn.Parameter(torch.zeros(size)) for size in (3, 6, 0))
    d = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    low = nn.Parameter(torch.zeros(9, dtype=torch.bfloat16))
    assert buckets_of([a, b, c, low, d], 16) == [
        [Slice(a, 0, 3)],
        [Slice(b, 0, 4)],
        [Slice(b, 4, 6)],
        [Slice(low, 0, 8)],
        [Slice(low, 8, 9)],
        [Slice(d, 0, 4)],
    ]


@pytest.mark.parametrize("num_bytes", [4, 20, 10**6])
def test_gradients_of_all_shapes_and_dtypes_are_summed(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets_of, "__defaults__", (num_bytes,))
    shapes: list[tuple[tuple[int, ...], torch.dtype]] = [
        ((), torch.float32), ((3, 2), torch.float64), ((0, 4), torch.float32), ((7,), torch.complex64),
        ((2, 5), torch.float32), ((4,), torch.bfloat16),
    ]  # fmt: skip

    def gradients(rank: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(rank)
        made = [torch.randn(shape, generator=generator, dtype=dtype) for shape, dtype in shapes]
        made[3] = made[3].conj()  # lazily
        made[4] = made[4].t().contiguous().t()  # not in the order of its elements
        return made

    def work(group: ThreadRank) -> list[Tensor]:
        weights = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape, dtype in shapes]
        training = Reduction(group, lambda: ((str(i), weight) for i, weight in enumerate(weights)))
        training.agree([], "step")
        brought = dict(zip(weights, gradients(group.rank), strict=True))
        found = StepReduction(training, "step", {}).finish(GradientStore.of(brought))
        return [found[weight] for weight in weights]

    for found in run_ranks(3, work):
        for total, parts in zip(found, zip(*map(gradients, range(3)), strict=True), strict=True):
            torch.testing.assert_close(total, parts[0] + parts[1] + parts[2])


# --- what goes when ------------------------------------------------------------------------------------------------


def test_what_all_ranks_know_goes_early_from_the_second_step_on_by_the_reducing_thread() -> None:
    def work(group: ThreadRank) -> Any:
        rank = Rank(group)
        brings = rank.brings(("c", 1.0 + group.rank), ("b", 2.0), ("a", 4.0))
        found = [rank.step(brings, number) for number in range(2)]
        return found, sent(group), [name for _, _, name in group.sent]

    for found, order, threads in run_ranks(2, work):
        assert found == [full(c=3.0, b=4.0, a=8.0)] * 2
        assert order == [f"{name!s} in step {number}" for number in range(2) for name in "cba"]
        assert threads[3:] == ["roundpipe-reduction"] * 3
        assert "roundpipe-reduction" not in threads[:3]


def test_buckets_go_in_one_order_whatever_the_plans_of_ranks_are() -> None:
    def work(group: ThreadRank) -> Any:
        rank = Rank(group)
        brings = rank.brings(*((name, 1.0 + group.rank) for name in ("bac", "abc")[group.rank]))
        found = [rank.step(brings, number) for number in range(2)]
        return found, sent(group)[3:]

    for found, order in run_ranks(2, work):
        assert found == [full(c=3.0, b=3.0, a=3.0)] * 2
        assert order == ["c in step 1", "b in step 1", "a in step 1"]


def test_a_bucket_goes_when_what_is_foreseen_has_come_and_not_before() -> None:
    """Rank 0 brings the next gradient when the one before has gone: it would wait for ever if that went at the end."""
    gone = {name: threading.Event() for name in NAMES}
    come: list[str] = []

    def before(rank: int, what: str) -> None:
        for name in NAMES:
            if rank == 0 and what == f"gradients of {name} in step 1":
                assert name in come, "sent before it has come"
                gone[name].set()

    def work(group: ThreadRank) -> Any:
        rank = Rank(group)
        rank.step(rank.brings(*((name, 1.0) for name in NAMES)))

        def bring(store: GradientStore) -> None:
            for name in reversed(NAMES):
                if group.rank == 0:
                    come.append(name)
                rank.bring(store, (name, 1.0))
                assert gone[name].wait(TIMEOUT_S)

        return rank.step(bring, 1)

    hub = Hub(2)
    hub.before = before
    assert run_ranks(2, work, hub) == [full(c=2.0, b=2.0, a=2.0)] * 2


def test_what_comes_after_its_bucket_was_sent_follows_and_is_not_early_in_the_next_step() -> None:
    has_gone = threading.Event()

    def before(rank: int, what: str) -> None:
        if what == "gradients of a in step 1":
            has_gone.set()

    def work(group: ThreadRank) -> Any:
        rank = Rank(group)
        values = [(name, 1.0 + group.rank) for name in reversed(NAMES)]
        rank.step(rank.brings(*values))

        def bring(store: GradientStore) -> None:
            rank.bring(store, *values)
            if group.rank == 0:
                assert has_gone.wait(TIMEOUT_S)
                rank.bring(store, ("b", 100.0), source=OFF_PLAN)

        found = [rank.step(bring, 1), rank.step(rank.brings(*values), 2), rank.step(rank.brings(*values), 3)]
        return found, sent(group)[3:]

    hub = Hub(2)
    hub.before = before
    for found, order in run_ranks(2, work, hub):
        assert found == [full(c=3.0, b=103.0, a=3.0), *[full(c=3.0, b=3.0, a=3.0)] * 2]
        assert order == [
            "c in step 1", "b in step 1", "a in step 1", "b in step 1",  # and the rest of b
            "c in step 2", "a in step 2", "b in step 2",  # once, at the end
            "c in step 3", "b in step 3", "a in step 3",
        ]  # fmt: skip


def test_a_backward_that_does_not_follow_its_plan_is_summed_all_the_same() -> None:
    """Rank 1 skips units, and makes calls off the plan."""

    def work(group: ThreadRank) -> Any:
        rank = Rank(group)
        values = [(name, 1.0) for name in reversed(NAMES)]
        rank.step(rank.brings(*values))

        def bring(store: GradientStore) -> None:
            if group.rank == 0:
                rank.bring(store, *values)
            else:
                rank.bring(store, ("b", 10.0), source=OFF_PLAN)

        return rank.step(bring, 1)

    assert run_ranks(2, work) == [full(c=1.0, b=11.0, a=1.0)] * 2


def test_ranks_without_a_gradient_send_zeros_and_what_no_rank_has_does_not_travel() -> None:
    def work(group: ThreadRank) -> Any:
        rank = Rank(group)
        own = {0: [("a", 1.0), ("b", 2.0)], 1: [("a", 1.0)], 2: []}[group.rank]
        found = [rank.step(rank.brings(*own), number) for number in range(2)]
        found.append(rank.step(rank.brings(("a", 1.0)), 2))
        found.append(rank.step(rank.brings(("a", 1.0)), 3))
        return found, sent(group)

    for found, order in run_ranks(3, work):
        assert found == [full(b=2.0, a=2.0)] * 2 + [full(a=3.0)] * 2
        assert [what for what in order if what.startswith("c")] == []
        assert [what for what in order if what.startswith("b")] == [f"b in step {number}" for number in range(3)]


def test_a_gradient_of_zeros_on_one_rank_is_there_on_all() -> None:
    def work(group: ThreadRank) -> Any:
        rank = Rank(group)
        return [rank.step(rank.brings(*[("a", 0.0)] * (group.rank == 1)), number) for number in range(2)]

    assert run_ranks(2, work) == [[full(a=0.0)] * 2] * 2


def test_a_step_without_a_plan_sends_what_the_others_send_early() -> None:
    """As where a plan is made anew: its calls are recorded first."""

    def work(group: ThreadRank) -> Any:
        rank = Rank(group)
        values = [(name, 1.0) for name in reversed(NAMES)]
        rank.step(rank.brings(*values))
        if group.rank == 0:
            return rank.step(rank.brings(*values), 1)
        rank.training.agree([], "step 1")
        store = GradientStore()
        for name, value in values:
            store.add([rank.weights[name]], Done([torch.full((4,), value)]), SOURCES[name][:1])
        found = StepReduction(rank.training, "step 1", {}).finish(store)
        return {name: found[weight].tolist() for name, weight in reversed(rank.weights.items())}

    assert run_ranks(2, work) == [full(c=2.0, b=2.0, a=2.0)] * 2


def test_sums_have_the_same_bits_whatever_comes_first() -> None:
    """Three stage runs and two forms of a unit bring parts, in any order."""
    sources = [(0, 5, False), (0, 5, True), (0, 6, False)]
    generator = torch.Generator().manual_seed(0)
    parts = {source: torch.randn(4, generator=generator) * 10.0**i for i, source in enumerate(sources)}
    uses = torch.randn(4, generator=generator)

    def total(order: list[int], use_at: int) -> Tensor:
        def work(group: ThreadRank) -> Tensor:
            rank = Rank(group)
            weight = rank.weights["a"]
            rank.step(rank.brings(("a", 1.0)))
            rank.training.agree([], "step 1")
            store = GradientStore()
            run = StepReduction(rank.training, "step 1", {})
            store.foresee({weight: dict.fromkeys(sources, 1)})
            run.begin(store, rank.errors.append)
            for place, index in enumerate(order):
                if place == use_at:
                    store.add_later([weight], Done([uses]), LOOSE, 0)
                store.add_later([weight], Done([parts[sources[index]].clone()]), sources[index], 0)
            if use_at == len(order):
                store.add_later([weight], Done([uses]), LOOSE, 0)
            return run.finish(store)[weight]

        first, second = run_ranks(2, work)
        assert torch.equal(first, second)
        return first

    wanted = total([0, 1, 2], 0)
    for order, use_at in (([2, 1, 0], 1), ([1, 0, 2], 3), ([1, 2, 0], 2)):
        assert torch.equal(total(order, use_at), wanted)


# --- gradients that were accumulated -------------------------------------------------------------------------------


def test_gradients_that_were_set_to_none_are_not_local_any_more() -> None:
    rank = Rank(RankGroup())
    weight = rank.weights["a"]
    rank.training.note_local([weight])
    weight.grad = None
    assert rank.training.take_local() == {}
    local = {weight: torch.ones(4)}
    rank.training.put_back(local)
    assert rank.training.take_local() == local


# --- errors --------------------------------------------------------------------------------------------------------


def test_ranks_that_train_different_weights_are_told_which() -> None:
    def work(group: ThreadRank) -> Any:
        return Rank(group, trained="ab" if group.rank == 2 else NAMES).step(number=7)

    message = "ranks train different weights in step 7: 'c' requires a gradient on rank 0 and none on rank 2"
    with pytest.raises(RankError, match=message):
        run_ranks(3, work)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("b"), r"rank 0 alone has 'b' of shape \(4,\) in float32"),
        (lambda weights: weights.update(d=nn.Parameter(torch.zeros(2))), r"rank 1 alone has 'd' of shape \(2,\)"),
        (lambda weights: weights.update(b=nn.Parameter(torch.zeros(5))), r"rank 0 alone has 'b' of shape \(4,\)"),
        (lambda weights: weights.update(a=weights.pop("a")), "their weights in different orders"),
    ],
)
def test_ranks_with_different_modules_are_told_what_differs(
    change: Callable[[Mapping[str, nn.Parameter]], Any], message: str
) -> None:
    def work(group: ThreadRank) -> Any:
        rank = Rank(group)
        if group.rank == 1:
            change(rank.weights)
        return rank.step()

    with pytest.raises(RankError, match=message):
        run_ranks(2, work)


def test_a_weight_that_is_another_object_of_the_same_name_goes_early_as_before() -> None:
    def work(group: ThreadRank) -> Any:
        rank = Rank(group)
        rank.step(rank.brings(("a", 1.0)))
        if group.rank == 0:
            rank.weights["a"] = nn.Parameter(torch.zeros(4))
        return rank.step(rank.brings(("a", 2.0)), 1)

    assert run_ranks(2, work) == [full(a=4.0)] * 2


def test_an_error_on_the_reducing_thread_stops_the_step_and_is_raised() -> None:
    class Broken(RankGroup):
        size = 2

        def exchange(self, values: Any, what: str) -> list[list[float]]:
            return [list(values)] * 2

        def add_up(self, tensor: Tensor, what: str, wire: torch.dtype | None = None) -> None:
            if "step 1" in what:
                raise RankError(f"rank 1 has gone, and does not send {what}")

    rank = Rank(Broken())
    rank.step(rank.brings(("a", 1.0)))
    with pytest.raises(RankError, match="does not send gradients of a in step 1") as caught:
        rank.step(rank.brings(("a", 1.0)), 1)
    assert rank.errors == [caught.value]
    assert rank.run.stop(), "others may have it"


def test_a_step_that_fails_before_a_gradient_was_sent_has_sent_none() -> None:
    group = ThreadRank(Hub(1), 0)
    rank = Rank(group)
    rank.step(rank.brings(("c", 1.0), ("a", 1.0)))
    before = len(group.sent)

    def fail(store: GradientStore) -> None:
        rank.bring(store, ("a", 1.0))  # c goes first, and does not come
        assert not rank.run.stop()
        store.close()
        raise ValueError("user code")

    with pytest.raises(ValueError, match="user code"):
        rank.step(fail, 1)
    rank.training.close()
    assert len(group.sent) == before
    assert rank.errors == []


def test_sparse_gradients_are_refused_by_name() -> None:
    rank = Rank(ThreadRank(Hub(1), 0))
    rank.training.agree([], "step")
    sparse = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1), (4,), check_invariants=True)
    with pytest.raises(TypeError, match=r"the gradient of 'b' is sparse.*sparse=False"):
        StepReduction(rank.training, "step", {}).finish(GradientStore.of({rank.weights["b"]: sparse}))


def test_gradients_of_weights_outside_of_the_module_are_refused() -> None:
    rank = Rank(ThreadRank(Hub(1), 0))
    rank.training.agree([], "step")
    with pytest.raises(RuntimeError, match=r"no part of the LightningModule .*\(3,\).*attributes of the module"):
        StepReduction(rank.training, "step", {}).finish(GradientStore.of({nn.Parameter(torch.zeros(3)): torch.ones(3)}))
