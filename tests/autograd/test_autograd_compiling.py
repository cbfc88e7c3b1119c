"""Units that are compiled: how often, with which results, and which units run as they are."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch.overrides import TorchFunctionMode

from lightning_roundpipe.engine import step as step_module
from lightning_roundpipe.engine.runner import Engine
from lightning_roundpipe.usercode.implicit_transfers import ImplicitTransfers
from lightning_roundpipe.usercode.lock import UserCodeLock
from tests.autograd.compiled import EAGER_KERNELS, WIDTH, Block, Graphs, Model, expect, parts_of, results, steps_of
from tests.support.engine.modelled import NOW, modelled_pool, recomputed, times_of
from tests.support.engine.steps import Steps

# --- how often ---------------------------------------------------------------------------------------------------


class Between(Model):
    """Blocks between an embedding and a head."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks=num_blocks)
        self.embedding, self.head = nn.Embedding(5, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


@pytest.mark.parametrize("copies", [False, True], ids=["alias", "lazy"])
def test_identical_blocks_compile_once(copies: bool, graphs: Graphs) -> None:
    steps = steps_of(Between(num_blocks=6), {"backend": graphs}, num_devices=4, copies=copies)
    for seed in range(2):
        steps.train([torch.randint(0, 5, (2, 3)) for _ in range(5)], seed)
    # Forward without a graph, and again with one in the backward. The head is only in the fused stage.
    wanted = {("embedding", False): 1, ("embedding", True): 1, ("gelu", False): 1, ("gelu", True): 1}
    assert Counter(graphs.seen) == {**wanted, ("linear", True): 1}


def test_other_sizes_compile_once_more_and_a_closed_engine_not_again(graphs: Graphs) -> None:
    steps = steps_of(Model(), {"backend": graphs})
    steps.train(parts_of(4, 4, 4, 4))
    assert Counter(graphs.seen)["gelu", True] == 1
    for sizes in [(4, 4, 3), (7, 6, 6), (9, 5), (2, 11, 3, 8)]:
        steps.train(parts_of(*sizes))
    assert Counter(graphs.seen)["gelu", True] == 2
    seen = list(graphs.seen)
    steps.engine.close()
    steps.train(parts_of(9, 5))
    assert graphs.seen == seen


# --- the same results --------------------------------------------------------------------------------------------


class NamedResults(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor, mask: Tensor, *, scale: float) -> dict[str, Any]:
        return {"x": self.block(x) * scale, "mask": mask, "given": x}


class PassesOn(Model):
    """Units return what they were given."""

    def __init__(self) -> None:
        super().__init__(NamedResults)

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        mask = torch.ones(WIDTH)
        result = block(x, mask, scale=0.5)
        assert result["mask"] is mask
        return result["x"] + result["given"]


class PartlyFrozen(Model):
    def __init__(self) -> None:
        super().__init__()
        for name, parameter in self.named_parameters():
            parameter.requires_grad = "up" in name


class PartlyCompiled(Model):
    """The user has compiled a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].compile(backend="eager")


@pytest.mark.parametrize("make", [PassesOn, PartlyFrozen, PartlyCompiled])
def test_the_results_are_those_of_eager_units(make: Callable[[], Model]) -> None:
    """The backend's operators are those of eager mode: bit for bit."""
    expect(make, EAGER_KERNELS)


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.tanh(x).exp(), torch.sigmoid(x)


def _loss(x: Tensor, scale: Tensor) -> Tensor:
    return (x.tanh().exp() * scale).square().mean()


class CompiledBetween(Model):
    """User code has compiled what runs between its units; gradients of the halves come one after the other."""

    def __init__(self, backend: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.halves, self.loss = (torch.compile(function, backend=backend) for function in (_halves, _loss))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.halves(self.blocks[0](x))
        return self.loss(self.blocks[2](self.blocks[1](first) + x) + second, self.scale)


@pytest.mark.parametrize(
    ("copies", "is_known"),
    [(False, True), (True, False), (True, True)],
    ids=["alias-compiled before", "lazy-new", "lazy-compiled before"],
)
def test_what_user_code_has_compiled_runs_as_it_is(copies: bool, is_known: bool) -> None:
    """Also where it was compiled for a graph that is walked once."""
    compiled: list[Any] = []

    def backend(graph: torch.fx.GraphModule, examples: list[Any]) -> Any:
        compiled.append(graph)
        return lookup_backend("aot_eager")(graph, examples)

    model, parts = CompiledBetween(backend), parts_of(2, 2, 2)
    if is_known:
        model(parts[0]).backward()
    num_compiled = len(compiled)
    steps = steps_of(model, None, num_devices=3, copies=copies)
    found = [(steps.train(parts, seed).outputs, steps.gradients(parts)) for seed in range(2)]
    assert len(compiled) == num_compiled
    losses = [model(part) for part in parts]
    expected = torch.stack(losses), torch.autograd.grad(torch.stack(losses).mean(), list(model.parameters()))
    for outputs, gradients in found:
        torch.testing.assert_close((torch.stack(outputs), gradients), (expected[0], list(expected[1])))


class Fusible(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(super().forward(x))


def test_inductor_gives_the_results_of_eager_units_up_to_rounding() -> None:
    """Fused operators round in other places."""
    model, parts = Model(Fusible, num_blocks=2), parts_of(2, 2)
    # A pool of threads would outlive the test. The caches on disk keep code for another ATEN_CPU_CAPABILITY, which
    # fails or gives wrong numbers under this one. Trying out what the compiler can do takes longer than compiling.
    wanted = {"compile_threads": 1, "force_disable_caches": True, "cpp.vec_isa_ok": True, "cpp.simdlen": 256}
    with torch._inductor.config.patch(wanted):
        found = results(model, parts, {}, num_steps=1)
    torch.testing.assert_close(found, results(model, parts, None, num_steps=1), rtol=1e-4, atol=1e-6)


class TwoResults(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return nn.functional.gelu(self.used(x)), self.unused(x)


class Pairs(Model):
    num_used = 2

    def __init__(self) -> None:
        super().__init__(TwoResults)

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return sum(block(x)[: self.num_used])


class FirstOfPairs(Pairs):
    num_used = 1


@pytest.mark.parametrize(("make", "num_missing"), [(FirstOfPairs, 6), (Pairs, 0)])
def test_a_result_that_got_no_gradient_gives_none(make: Callable[[], Model], num_missing: int, graphs: Graphs) -> None:
    """Compiled code would give zeros to the weights behind it."""
    expected = expect(make, EAGER_KERNELS, num_steps=1)
    assert sum(x is None for x in expected) == num_missing
    Steps(make(), compile_units={"backend": graphs}).train(parts_of(2, 2, 2))
    assert Counter(kind for kind, _ in graphs.seen)["gelu"] > 0


# --- units that run as they are ----------------------------------------------------------------------------------


class Dropping(Block):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


class Normalising(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        return super().forward(x - self.mean)


class Writing(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.last = x.shape[0]
        return super().forward(x)


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(0.5))


class Hooked(nn.Module):
    """A block with a submodule that has a forward hook."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.block.register_forward_hook(lambda module, args, output: output * 2.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


class Scaled(Block):
    scale: Any = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class SetsScale(Model):
    """Torch takes tensors that it finds on modules for weights: at the same place in memory, in every call."""

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        block.scale = x.mean()
        return block(x)


EAGER = {make.__name__: (Model, make) for make in (Normalising, Writing, InPlace, Hooked)}


@pytest.mark.parametrize(("make", "make_block"), [*EAGER.values(), (SetsScale, Scaled)], ids=[*EAGER, "SetsScale"])
def test_what_only_eager_units_can_do_is_not_compiled(make: Any, make_block: Any, graphs: Graphs) -> None:
    expect(lambda: make(make_block), {"backend": graphs})
    assert graphs.seen == []


def test_a_unit_that_draws_in_training_only_is_compiled_in_evaluation(graphs: Graphs) -> None:
    expect(lambda: Model(Dropping), {"backend": graphs})
    assert graphs.seen == [("gelu", False)]


def test_a_hook_that_comes_later_is_run(graphs: Graphs) -> None:
    """Torch does not look for new hooks on modules whose code it has compiled."""
    model, parts = Model(), parts_of(2, 2, 2)
    steps = steps_of(model, {"backend": graphs})
    steps.train(parts)
    assert graphs.seen
    seen: deque[int] = deque()  # of which micro-batches have no copies
    handle = model.blocks[1].up.register_forward_hook(lambda module, args, output: seen.append(len(output)))
    steps.train(parts)
    assert list(seen) == [2, 2, 2]
    handle.remove()
    steps.train(parts)
    assert len(seen) == 3


class Seeing:
    """A mode that notes the functions that it sees."""

    def __init__(self, *args: Any) -> None:
        TorchFunctionMode.__init__(self)  # type: ignore[arg-type]
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


class ModeOfTheUser(Seeing, TorchFunctionMode):
    pass


class ModeOfTheEngine(Seeing, ImplicitTransfers):
    pass


@pytest.mark.parametrize("mode", [ModeOfTheUser, ModeOfTheEngine])
def test_units_are_seen_by_modes_of_the_user_and_not_by_that_of_the_engine(mode: Any, graphs: Graphs) -> None:
    """Torch would trace a mode, and compile again for every one, that is, for every micro-batch."""
    modes: list[Seeing] = []

    class Watched(Model):
        def call(self, block: nn.Module, x: Tensor) -> Tensor:
            with mode() as watching:
                modes.append(watching)
                return block(x) * 1.0

    expect(Watched, {"backend": graphs})
    is_engine = mode is ModeOfTheEngine
    assert {(watching.names.count("gelu"), watching.names.count("mul")) for watching in modes} == {(not is_engine, 1)}
    # Forwards are in the mode, recomputations are not.
    assert Counter(graphs.seen) == {("gelu", True): 1, **({("gelu", False): 1} if is_engine else {})}


# --- what is left ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("few_objects")
def test_nothing_holds_replicas_or_the_model() -> None:
    model = Model()
    steps = steps_of(model, EAGER_KERNELS, copies=True)
    steps.train(parts_of(2, 2, 2))
    leaves = [weakref.ref(leaf) for replica in steps.engine._replicas._all() for leaf in replica.leaves]
    masters = [weakref.ref(parameter) for parameter in model.parameters()]
    assert len(leaves) >= len(masters)
    steps.engine.close()
    gc.collect()
    assert [ref for ref in leaves if ref() is not None] == []
    del steps, model
    gc.collect()
    assert [ref for ref in masters if ref() is not None] == []


def test_time_spent_compiling_is_no_cost_of_the_unit() -> None:
    def slow(graph: torch.fx.GraphModule, examples: list[Any]) -> Any:
        NOW.ms += 1000.0
        return graph

    steps = Steps(model := Model())
    steps.engine = Engine(model, modelled_pool(1), recomputed, num_threads=1, compile_units={"backend": slow})
    for _ in range(2):
        steps.train(parts_of(3, 3, 3))
    assert max(max(times) for times in times_of(steps.engine.costs("train"))) < 1.0


def test_a_unit_that_is_compiled_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch puts the default generator back after it has compiled: what user code drew meanwhile would be drawn again.
    And it changes the whole process, in which other units would compute."""
    locks: list[UserCodeLock] = []
    seen: list[tuple[int, bool]] = []

    def make_lock(*args: Any) -> UserCodeLock:
        locks.append(UserCodeLock(*args))
        return locks[-1]

    def backend(graph: torch.fx.GraphModule, examples: list[Any]) -> Any:
        seen.append((locks[-1]._units._number, locks[-1]._exclusive == threading.get_ident()))
        return graph

    monkeypatch.setattr(step_module, "UserCodeLock", make_lock)
    steps = steps_of(Model(), {"backend": backend})
    for sizes in ((2, 2, 2), (3, 4, 5)):
        steps.train(parts_of(*sizes))
    assert seen == [(0, True)] * 4
