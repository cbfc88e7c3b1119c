"""Steps with several segments, between which micro-batches meet: see [Note: barriers] in ``engine/barrier.py``."""

from __future__ import annotations

import copy
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_roundpipe.engine.barrier import Barrier, BarrierError, Collective, Segment, meet
from lightning_roundpipe.engine.requests import StepRequest, StepResult
from lightning_roundpipe.engine.runner import Engine, Planner
from tests.support.engine.lazy_link import cpu_pool
from tests.support.engine.partitions import everything_kept, everything_recomputed, planner
from tests.support.engine.random_graphs import (
    KINDS,
    NUM_UNITS,
    WIDTH,
    Graph,
    Instruction,
    make_steps,
)

# What a step asks for: a backward from a loss, whether its graph is retained; or an update of all weights.
Ask = tuple[str, Tensor | None, bool]


class Meeter(Graph):
    """A graph of units whose program also runs backwards and updates weights."""

    def walk(self, x: Tensor) -> Iterator[Ask]:
        values = [x, self.stem(x)]
        for instruction in self.program:
            if instruction.kind == "backward":
                chosen = values[instruction.a % len(values)] + values[-1]
                loss = self.head(chosen).square().mean()
                if loss.requires_grad:
                    yield "backward", loss, True
            elif instruction.kind == "update":
                yield "update", None, False
                values = [x, self.stem(x)]  # nothing from before may be differentiated any more
            else:
                values.extend(self.execute(instruction, values))
        yield "backward", self.head(values[-1]).square().mean(), False


def changed(master: nn.Parameter, gradient: Tensor) -> None:
    master.grad = gradient if master.grad is None else master.grad + gradient


def update(parameters: Sequence[nn.Parameter]) -> None:
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
                parameter.grad = None


def plain(graph: Meeter, parts: Sequence[Tensor], weights: Sequence[float]) -> list[dict[str, Tensor]]:
    """The gradients after every backward, with all micro-batches in one thread, in lock step."""
    found = []
    for asks in zip(*(graph.walk(part) for part in parts), strict=True):
        if asks[0][0] == "update":
            update(list(graph.parameters()))
            continue
        for (_, loss, retain), weight in zip(asks, weights, strict=True):
            (loss * weight).backward(retain_graph=retain)
        found.append({name: p.grad.clone() for name, p in graph.named_parameters() if p.grad is not None})
    return found


def piped(engine: Engine, graph: Meeter, parts: Sequence[Tensor], weights: Sequence[float], seed: int = 0) -> Any:
    """As :func:`plain`, by the engine; and the result of the step."""
    found: list[dict[str, Tensor]] = []

    def backward(barrier: Barrier) -> None:
        for master, gradient in barrier.gradients.items():
            changed(master, gradient)
        found.append({name: p.grad.clone() for name, p in graph.named_parameters() if p.grad is not None})

    def step(numbered: tuple[int, Tensor]) -> None:
        index, part = numbered
        for kind, loss, retain in graph.walk(part):
            if kind == "update":
                meet(Collective("update", "update", lambda barrier: update(list(graph.parameters()))))
            else:
                meet(Collective("backward", "backward", backward), [(loss, weights[index])], retain_graph=retain)

    result = engine.run(StepRequest(step, list(enumerate(parts)), weights, "train", seed, meets=True))
    return found, result


instructions = st.builds(
    Instruction,
    st.sampled_from((*KINDS, "backward", "backward", "update")),
    st.integers(0, NUM_UNITS - 1),
    st.integers(0, 30),
    st.integers(0, 30),
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    program=st.lists(instructions, max_size=8),
    frozen=st.frozensets(st.integers(0, NUM_UNITS - 1), max_size=2),
    devices=st.integers(1, 3),
    num_microbatches=st.integers(1, 4),
    round_size=st.sampled_from([None, 2]),
    seed=st.integers(0, 50),
    copies=st.booleans(),
)
def test_gradients_at_every_barrier(
    program: list[Instruction],
    frozen: frozenset[int],
    devices: int,
    num_microbatches: int,
    round_size: int | None,
    seed: int,
    copies: bool,
) -> None:
    torch.manual_seed(seed)
    graph = Meeter(program, frozen, 0.0)
    rows = torch.randn(5, WIDTH)
    parts = rows.tensor_split(num_microbatches)
    weights = [len(part) / len(rows) for part in parts]
    engine = make_steps(graph, planner(seed), num_devices=devices, round_size=round_size, copies=copies).engine
    start = copy.deepcopy(graph.state_dict())
    for _ in range(2):  # recorded, then planned
        graph.load_state_dict(start)
        graph.zero_grad()
        expected = plain(graph, parts, weights)
        graph.load_state_dict(start)
        graph.zero_grad()
        actual, _ = piped(engine, graph, parts, weights)
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert one.keys() == other.keys()
            for name in other:
                torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-6)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.second = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def run_first(self, x: Tensor) -> Tensor:
        for layer in self.first:
            x = torch.tanh(layer(x))
        return x

    def run_second(self, x: Tensor) -> Tensor:
        for layer in self.second:
            x = torch.tanh(layer(x))
        return x


def engine_of(chain: Chain, *, devices: int = 2, copies: bool = False, plan: Planner = everything_recomputed) -> Engine:
    return Engine(chain, cpu_pool(devices, copies=copies), plan, num_threads=1)


def ask(name: str, perform: Callable[[Barrier], Any] = lambda barrier: None, **kwargs: Any) -> Collective:
    return Collective(name, name, perform, **kwargs)


def run(engine: Engine, step: Callable[[Any], Any], count: int = 3, seed: int = 0) -> StepResult:
    batches = list(enumerate(torch.randn(count, 2, WIDTH, generator=torch.Generator().manual_seed(seed))))
    return engine.run(StepRequest(step, batches, [1 / count] * count, "train", 0, meets=True, merge=list))


def test_results_go_to_all_and_values_come_from_all() -> None:
    seen: list[Any] = []

    def perform(barrier: Barrier) -> str:
        seen.append((barrier.values, threading.current_thread() is threading.main_thread()))
        return "result"

    def step(numbered: Any) -> Any:
        return meet(ask("ask", perform, value=numbered[0]))

    result = run(engine_of(Chain()), step)
    assert result.outputs == [(True, "result")] * 3
    assert seen == [([0, 1, 2], True)]
    assert meet(ask("ask", perform)) == (False, None)  # no step runs


def test_deferred_calls_come_first_at_the_next_barrier_and_at_the_end() -> None:
    order: list[str] = []

    def noting(name: str) -> Callable[[Barrier], None]:
        return lambda barrier: order.append(name)

    def step(numbered: Any) -> None:
        meet(ask("zero", noting("zero"), is_deferred=True))
        order.append("user code")
        meet(ask("backward", noting("backward")))
        meet(ask("zero", noting("last zero"), is_deferred=True))

    run(engine_of(Chain()), step)
    assert order == ["user code"] * 3 + ["zero", "backward", "last zero"]


def test_a_carried_backward_runs_where_the_plan_says() -> None:
    chain = Chain()
    engine = engine_of(chain, devices=3)

    def step(numbered: Any) -> None:
        middle = chain.run_first(numbered[1])
        meet(ask("critic"), [(chain.run_second(middle.detach()).mean(), 1 / 3)])
        meet(ask("generator"), [(chain.run_second(middle).mean(), 1 / 3)])

    run(engine, step)
    result = run(engine, step)
    assert result.num_off_plan == 0
    # Its three calls are positions of the second segment's plan as well.
    plan = engine.plan_of(Segment("train", ("critic", 1)))
    assert plan is not None
    assert plan.carried == (0, 1, 2)
    assert [unit.name for unit in plan.sequence] == [f"{part}.{i}" for part in ("first", "second") for i in range(3)]
    devices = {span.label: span.device for span in result.timeline.spans if span.label in ("B first.0", "B first.2")}
    assert len(set(devices.values())) == 2, "their backward stages are on different devices"


def test_segments_of_closures_share_a_plan() -> None:
    chain = Chain()
    engine = engine_of(chain)
    calls: list[list[Any]] = []

    def step(numbered: Any) -> Any:
        def closure() -> int:
            meet(ask("backward"), [(chain.run_first(numbered[1]).mean(), 1 / 3)])
            return numbered[0]

        def perform(barrier: Barrier) -> int:
            calls.extend(barrier.call_closures() for _ in range(4))
            return 7

        return meet(ask("step", perform, closure=closure))[1]

    assert run(engine, step).outputs == [7, 7, 7]
    assert calls == [[0, 1, 2]] * 4
    assert engine.plan_of(Segment("train", ("step", None, 0))) is not None
    known = [key for key in engine._plans._known if isinstance(key, Segment)]
    assert len(known) == 3  # the closure, what follows its backward, and what follows the step
    engine.forget("train")
    assert engine.plan_of(Segment("train", ("step", None, 0))) is None


def test_rounds_of_a_loop_share_a_plan_as_long_as_they_are_alike() -> None:
    chain = Chain()
    made: list[int] = []

    def plan(costs: Any, machine: Any, count: int, training: bool) -> Any:
        made.append(len(costs.calls))
        return everything_recomputed(costs, machine, count, training)

    engine = engine_of(chain, plan=plan)

    def step(numbered: Any) -> None:
        x = numbered[1]
        for index in range(10):
            x = chain.run_first(x) if index < 7 or not odd else chain.run_second(chain.run_first(x))
            meet(ask("backward"), [(x.mean(), 1 / 3)])
            x = x.detach()

    odd = False
    run(engine, step)
    # The first segment, the rounds after it (again after 2, 4 and 8 of them), and the end, which has no units.
    assert made == [3] * 5
    assert run(engine, step).num_off_plan == 0
    del made[:]
    odd = True
    run(engine, step)
    results = [run(engine, step) for _ in range(3)]
    assert [result.num_off_plan for result in results[1:]] == [0, 0]
    places = [engine.plan_of(Segment("train", ("backward", count))) for count in range(1, 11)]
    assert [len(one.sequence) for one in places] == [3] * 6 + [6] * 3 + [0]


def test_different_ways_are_an_error() -> None:
    chain = Chain()
    engine = engine_of(chain)

    def step(numbered: Any) -> None:
        index, x = numbered
        loss = chain.run_first(x).mean()
        if index == 1:
            meet(ask("zero_grad", is_deferred=True))
        if index != 2:
            meet(ask("manual_backward"), [(loss, 1.0)])

    with pytest.raises(BarrierError, match=r"0 to manual_backward, micro-batch 1 to zero_grad, then manual_backward"):
        run(engine, step)
    with pytest.raises(BarrierError, match=r"0 to manual_backward, micro-batch 1 to the end of the step"):
        run(engine, lambda numbered: step((2 * numbered[0], numbered[1])), count=2)
    assert run(engine, lambda numbered: numbered[0]).outputs == [0, 1, 2]


@pytest.mark.parametrize("where", ["perform", "closure", "user code", "unit", "other"])
def test_errors_end_the_step_and_leave_the_engine_usable(where: str) -> None:
    chain = Chain()
    engine = engine_of(chain, copies=True)
    told = 0

    def fail(here: str, index: int = 0) -> None:
        nonlocal told
        if armed and here == where and index == 0:
            told += 1
            raise KeyError(f"in {here}")

    def step(numbered: Any) -> None:
        index, x = numbered

        def closure() -> None:
            fail("closure", index)
            meet(ask("backward"), [(chain.run_first(x).mean(), 1.0)])

        def perform(barrier: Barrier) -> None:
            barrier.call_closures()
            fail("perform")

        meet(ask("step", perform, closure=closure))
        fail("user code", index)
        fail("other", 2 - index)
        meet(ask("backward"), [(chain.run_second(x).mean(), 1.0)])

    hook = chain.second[1].register_forward_pre_hook(lambda module, args: fail("unit"))
    before = threading.active_count()
    for armed in (False, True, False):
        if armed:
            with pytest.raises(KeyError, match=f"in {where}"):
                run(engine, step)
            assert told > 0
        else:
            run(engine, step)
        assert threading.active_count() == before
        assert "forward" not in vars(chain.first[0])
    hook.remove()


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_error_of_a_call_is_raised_in_all(error: type[BaseException]) -> None:
    """They may catch one that is an Exception; any other one ends the step."""
    unwound: list[int] = []

    def perform(barrier: Barrier) -> None:
        raise error("once")

    def step(numbered: Any) -> str:
        try:
            meet(ask("step", perform))
        except Exception as caught:
            return str(caught)
        finally:
            unwound.append(numbered[0])
        return "nothing"

    before = threading.active_count()
    if error is ZeroDivisionError:
        assert run(engine_of(Chain()), step).outputs == ["once"] * 3
    else:
        with pytest.raises(error):
            run(engine_of(Chain()), step)
    assert threading.active_count() == before
    assert sorted(unwound) == [0, 1, 2]


@pytest.mark.parametrize("plan", [everything_kept, everything_recomputed])
def test_a_second_backward_needs_retain_graph_and_unchanged_weights(plan: Planner) -> None:
    chain = Chain()

    def change(barrier: Barrier) -> None:
        with torch.no_grad():
            chain.first[1].weight.mul_(0.5)

    def twice(numbered: Any) -> None:
        loss = chain.run_first(numbered[1]).mean()
        for _ in range(2):
            meet(ask("backward"), [(loss, 1.0)], retain_graph=False)

    def changes(numbered: Any) -> None:
        loss = chain.run_first(numbered[1]).mean()
        meet(ask("step", change))
        meet(ask("backward"), [(loss, 1.0)])

    engine = engine_of(chain, plan=plan)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"unit 'first\.2'.*retain_graph=True"):
            run(engine, twice)
    with pytest.raises(RuntimeError, match=r"the weights of unit 'first\.1' have changed between its forward and its"):
        run(engine_of(chain, plan=plan), changes)


def test_attributes_written_at_a_barrier_are_seen_by_all() -> None:
    chain = Chain()
    chain.names = []
    seen: list[Any] = []

    def perform(barrier: Barrier) -> None:
        seen.append((chain.mine, list(chain.names)))
        chain.told = "told"
        chain.mine = "overwritten"
        chain.names.append("met")

    def step(numbered: Any) -> Any:
        chain.mine = numbered[0]
        chain.names.append("before")
        meet(ask("step", perform))
        seen.append((chain.mine, chain.told))
        chain.names.append("after")

    run(engine_of(chain), step)
    assert seen == [(2, ["before"]), *[("overwritten", "told")] * 3]
    assert chain.mine == "overwritten"


def test_random_numbers_of_user_code_do_not_depend_on_barriers() -> None:
    engine = engine_of(Chain())
    start = torch.get_rng_state()

    def drawn(meets: bool) -> dict[int, list[float]]:
        found: dict[int, list[float]] = {}

        def step(numbered: Any) -> None:
            found[numbered[0]] = [torch.rand(()).item()]
            if meets:
                meet(ask("step", lambda barrier: torch.rand(100)))
            found[numbered[0]].append(torch.rand(()).item())

        torch.set_rng_state(start)
        run(engine, step)
        return found

    assert drawn(True) == drawn(False)
    assert len(set(itertools.chain(*drawn(True).values()))) == 6
    # The caller's generator has moved by what was drawn at the barrier, and by nothing else.
    here = torch.rand(3)
    torch.set_rng_state(start)
    torch.rand(100)
    assert torch.equal(torch.rand(3), here)


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.usefixtures("without_collector")
def test_no_tensor_survives_without_the_garbage_collector(copies: bool) -> None:
    chain = Chain()
    engine = engine_of(chain, copies=copies)
    alive: list[weakref.ref[Tensor]] = []

    def step(numbered: Any) -> None:
        middle = chain.run_first(numbered[1])
        unused = chain.run_second(middle)
        loss = chain.run_second(middle).mean()
        alive.extend(weakref.ref(x) for x in (middle, unused, loss))
        meet(ask("backward"), [(loss, 1.0)], retain_graph=True)
        meet(ask("backward"), [(middle.mean(), 1.0)])

    run(engine, step)
    alive.clear()
    run(engine, step)
    assert [ref() for ref in alive if ref() is not None] == []
