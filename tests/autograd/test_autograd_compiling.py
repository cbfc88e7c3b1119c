"""Units that are compiled: how often, what stays as it is, and what happens where it is impossible."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_roundpipe.autograd import compiling
from lightning_roundpipe.devices.pool import DevicePool
from lightning_roundpipe.devices.virtual import LazyLink
from lightning_roundpipe.engine import step as step_module
from lightning_roundpipe.engine.runner import Engine, StepRequest, StepResult
from lightning_roundpipe.planning import CostProfile, Partition, partition, partition_forward
from lightning_roundpipe.usercode.implicit_transfers import ImplicitTransfers
from lightning_roundpipe.usercode.lock import UserCodeLock
from tests.support.modelled import NOW, kept, modelled_pool, recomputed, times_of

WIDTH = 8
Parts = Sequence[Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Blocks in a row; what the first one is given requires a gradient, as it does behind an embedding."""

    def __init__(self, make: Callable[[], nn.Module] = Block, num_blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_(torch.is_grad_enabled()).clone()
        for block in self.blocks:
            x = self.call(block, x)
        return x.square().mean()

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)


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


class Graphs:
    """A backend that runs graphs as they are, and notes which operators they have and whether for a backward."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bool]] = []

    def __call__(self, graph: torch.fx.GraphModule, examples: list[Any]) -> Any:
        calls = {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
        kind = next((name for name in ("gelu", "embedding") if any(name in c for c in calls)), "linear")
        self.seen.append((kind, torch.is_grad_enabled()))
        return graph

    def count(self, kind: str) -> int:
        return sum(seen == kind for seen, _ in self.seen)


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """One thread per operator, as in virtual devices; and no warning but those that a test expects."""
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="compile_units")
        yield
    torch._dynamo.reset()


def parts_of(*sizes: int) -> list[Tensor]:
    return [torch.randn(size, 3, WIDTH) for size in sizes]


def make_engine(
    model: nn.Module, options: dict[str, Any] | None, *, num_devices: int = 2, link: LazyLink | None = None
) -> Engine:
    def plan(costs: CostProfile, num_microbatches: int, training: bool) -> Partition:
        make: Callable[..., Partition] = partition if training else partition_forward
        return make(costs, num_devices=num_devices, num_microbatches=num_microbatches)

    pool = DevicePool([torch.device("cpu")] * num_devices, link=link)
    return Engine(model, pool, plan, num_threads=1, compile_units=options)


def train(engine: Engine, model: nn.Module, parts: Parts, seed: int = 0) -> StepResult:
    total = sum(map(len, parts))
    weights = [len(part) / total for part in parts]
    return engine.run(StepRequest(model, parts, weights, "train", seed, loss_of=lambda loss: loss))


def evaluate(engine: Engine, model: nn.Module, parts: Parts) -> StepResult:
    with torch.no_grad():
        return engine.run(StepRequest(model, parts, [1.0] * len(parts), "evaluate", 0))


def results(model: nn.Module, parts: Parts, options: dict[str, Any] | None, steps: int = 2, **kwargs: Any) -> list[Any]:
    """Losses and gradients of some steps, then losses of an evaluation. A missing gradient is None."""
    engine = make_engine(model, options, **kwargs)
    found: list[Any] = []
    for step in range(steps):
        result = train(engine, model, parts, step)
        found += [*result.outputs, *(result.gradients.get(p) for p in model.parameters())]
    model.eval()
    found += evaluate(engine, model, parts).outputs
    model.train()
    return found


def assert_identical(actual: list[Any], expected: list[Any]) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


# --- how often ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("link", [None, LazyLink()], ids=["alias", "lazy"])
def test_identical_blocks_compile_once(link: LazyLink | None) -> None:
    model, graphs = Between(num_blocks=32), Graphs()
    parts = [torch.randint(0, 5, (2, 3)) for _ in range(5)]
    engine = make_engine(model, {"backend": graphs}, num_devices=4, link=link)
    for step in range(3):
        train(engine, model, parts, step)
    # Forward without a graph, and again with one in the backward. The head is only in the fused stage.
    assert Counter(graphs.seen) == {
        ("embedding", False): 1,
        ("embedding", True): 1,
        ("gelu", False): 1,
        ("gelu", True): 1,
        ("linear", True): 1,
    }


def test_other_sizes_compile_once_more() -> None:
    model, graphs = Model(), Graphs()
    engine = make_engine(model, {"backend": graphs})
    train(engine, model, parts_of(4, 4, 4, 4))
    assert Counter(graphs.seen)["gelu", True] == 1
    for sizes in [(4, 4, 3), (7, 6, 6), (9, 5), (2, 11, 3, 8)]:
        train(engine, model, parts_of(*sizes))
    assert Counter(graphs.seen)["gelu", True] == 2


def test_structures_do_not_share_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_MAX_VERSIONS", 2)
    widths = iter(range(2, 100))

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            width = next(widths)
            self.up, self.down = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(nn.functional.gelu(self.up(x)))

    model, graphs = Model(Wide, num_blocks=6), Graphs()
    engine = make_engine(model, {"backend": graphs})
    evaluate(engine, model, parts_of(2, 2, 2))
    assert graphs.count("gelu") == 6


def test_a_step_after_the_engine_was_closed_compiles_nothing() -> None:
    model, graphs, parts = Model(), Graphs(), parts_of(2, 2, 2)
    engine = make_engine(model, {"backend": graphs})
    train(engine, model, parts)
    seen = list(graphs.seen)
    engine.close()
    train(engine, model, parts)
    assert graphs.seen == seen


# --- the same results --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("link", [None, LazyLink()], ids=["alias", "lazy"])
def test_the_results_are_those_of_eager_units(link: LazyLink | None) -> None:
    """The backend's operators are those of eager mode: bit for bit."""
    model, parts = Model(), parts_of(2, 2, 2)
    expected = results(model, parts, None, link=link)
    assert_identical(results(model, parts, {"backend": "aot_eager"}, link=link), expected)


def test_inductor() -> None:
    """Fused operators round in other places."""
    model, parts = Model(num_blocks=2), parts_of(2, 2)
    # A pool of threads would outlive the test. The caches on disk keep code for another ATEN_CPU_CAPABILITY, which
    # fails or gives wrong numbers under this one.
    with torch._inductor.config.patch(compile_threads=1, force_disable_caches=True):
        found = results(model, parts, {}, steps=2)
    torch.testing.assert_close(found, results(model, parts, None, steps=2), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("link", [None, LazyLink()], ids=["alias", "lazy"])
def test_autocast(link: LazyLink | None) -> None:
    """Where weights have device copies, these are in the low dtype."""
    model, parts = Model(), parts_of(2, 2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = results(model, parts, None, link=link)
        assert_identical(results(model, parts, {"backend": "aot_eager"}, link=link), expected)


def test_kept_graphs_and_recomputed_ones_agree() -> None:
    model, parts = Model(), parts_of(2, 2, 2)
    gradients = []
    for plan in (kept, recomputed):
        engine = Engine(
            model, DevicePool([torch.device("cpu")]), plan, num_threads=1, compile_units={"backend": "aot_eager"}
        )
        train(engine, model, parts)
        gradients.append([train(engine, model, parts).gradients[p] for p in model.parameters()])
    assert_identical(gradients[0], gradients[1])


class NoisyUserCode(Model):
    """Draws between its blocks."""

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x + torch.rand_like(x))


def test_compiling_leaves_the_randomness_of_user_code_alone() -> None:
    """Torch puts the default generator back after it has compiled: what others drew meanwhile would be drawn again."""
    model = NoisyUserCode(num_blocks=6)
    # New sizes in every step: something is compiled while other micro-batches are in their user code.
    steps = [parts_of(2, 2, 2, 2), parts_of(3, 3, 4, 4), parts_of(1, 5, 2, 6)]
    outputs = []
    for options in (None, {"backend": "aot_eager", "dynamic": False}):
        engine = make_engine(model, options, num_devices=3)
        outputs.append([train(engine, model, parts, seed).outputs for seed, parts in enumerate(steps)])
    assert_identical(outputs[1], outputs[0])


def test_a_result_that_got_no_gradient_gives_none() -> None:
    """Compiled code would give zeros to the weights behind it."""

    class TwoResults(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return nn.functional.gelu(self.used(x)), self.unused(x)

    class FirstResult(Model):
        def call(self, block: nn.Module, x: Tensor) -> Tensor:
            return block(x)[0]

    class BothResults(Model):
        def call(self, block: nn.Module, x: Tensor) -> Tensor:
            return sum(block(x))

    parts = parts_of(2, 2, 2)
    for make, num_missing in ((FirstResult, 6), (BothResults, 0)):
        model, graphs = make(TwoResults), Graphs()
        expected = results(model, parts, None, steps=1)
        assert sum(x is None for x in expected) == num_missing
        assert_identical(results(model, parts, {"backend": "aot_eager"}, steps=1), expected)
        engine = Engine(model, DevicePool([torch.device("cpu")]), recomputed, compile_units={"backend": graphs})
        train(engine, model, parts)
        assert graphs.count("gelu") > 0


def test_units_that_return_what_they_were_given() -> None:
    class PassesOn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor, mask: Tensor, *, scale: float) -> dict[str, Any]:
            return {"x": self.block(x) * scale, "mask": mask, "given": x}

    class Chain(Model):
        def call(self, block: nn.Module, x: Tensor) -> Tensor:
            mask = torch.ones(WIDTH)
            result = block(x, mask, scale=0.5)
            assert result["mask"] is mask
            return result["x"] + result["given"]

    model, parts = Chain(PassesOn), parts_of(2, 2, 2)
    expected = results(model, parts, None)
    assert_identical(results(model, parts, {"backend": "aot_eager"}), expected)


def test_frozen_weights() -> None:
    model, parts = Model(), parts_of(2, 2, 2)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "up" in name
    expected = results(model, parts, None)
    assert_identical(results(model, parts, {"backend": "aot_eager"}), expected)
    for parameter in model.parameters():
        parameter.requires_grad = True


# --- units that run as they are ----------------------------------------------------------------------------------


class Dropping(Block):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


class Normalising(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        return super().forward(x - self.mean)


class Writing(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.last = x.shape[0]
        return super().forward(x)


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(0.5))


class Around(nn.Module):
    """A block with a submodule that has a forward hook."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.shown: list[Tensor] = []
        self.block.register_forward_hook(lambda module, args, output: output * 2.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


@pytest.mark.parametrize("make", [Dropping, Normalising, Writing, InPlace, Around])
def test_what_only_eager_units_can_do_is_not_compiled(make: type[nn.Module]) -> None:
    parts = parts_of(2, 2, 2)
    found = []
    for graphs in (None, Graphs()):
        torch.manual_seed(1)
        model = Model(make)
        engine = make_engine(model, None if graphs is None else {"backend": graphs})
        found.append([])
        for step in range(2):
            result = train(engine, model, parts, step)
            found[-1] += [*result.outputs, *(result.gradients[p] for p in model.parameters()), *model.buffers()]
        if graphs is not None:
            assert graphs.seen == []
    assert_identical(found[1], found[0])


def test_a_unit_that_draws_in_training_only_is_compiled_in_evaluation() -> None:
    model, parts, graphs = Model(Dropping), parts_of(2, 2, 2), Graphs()
    results(model, parts, {"backend": graphs})
    assert [grad for kind, grad in graphs.seen if kind == "gelu"] == [False]


def test_a_hook_that_comes_later_is_run() -> None:
    """Torch does not look for new hooks on modules whose code it has compiled."""
    model, parts, graphs = Model(), parts_of(2, 2, 2), Graphs()
    engine = make_engine(model, {"backend": graphs})
    train(engine, model, parts)
    assert graphs.count("gelu") > 0
    seen: list[int] = []
    handle = model.blocks[1].up.register_forward_hook(lambda module, args, output: seen.append(len(output)))
    train(engine, model, parts)
    assert seen == [2, 2, 2]
    handle.remove()
    train(engine, model, parts)
    assert len(seen) == 3


def test_an_attribute_that_user_code_sets_is_an_input() -> None:
    """Torch takes tensors that it finds on modules for weights: at the same place in memory, in every call."""

    class Scaled(Block):
        scale: Any = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    class SetsScale(Model):
        def call(self, block: nn.Module, x: Tensor) -> Tensor:
            block.scale = x.mean()
            return block(x)

    model, parts, graphs = SetsScale(Scaled), parts_of(2, 2, 2), Graphs()
    expected = results(model, parts, None)
    assert_identical(results(model, parts, {"backend": graphs}), expected)
    assert graphs.seen == []


def test_modes_of_the_user_see_the_operators() -> None:
    class Counting(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    counts: list[int] = []

    class Watched(Model):
        def call(self, block: nn.Module, x: Tensor) -> Tensor:
            with Counting() as mode:
                y = block(x)
            counts.append(mode.names.count("gelu"))
            return y

    model, parts = Watched(), parts_of(2, 2, 2)
    results(model, parts, {"backend": "aot_eager"})
    assert set(counts) == {1}


class ImplicitTransfers(ImplicitTransfers):
    """Notes what it sees."""

    def __init__(self) -> None:
        TorchFunctionMode.__init__(self)
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def test_the_mode_that_moves_operands_of_user_code_is_not_compiled_in() -> None:
    """Torch would trace it, and compile again for every mode, that is, for every micro-batch."""
    modes = []

    class OnGpus(Model):
        def call(self, block: nn.Module, x: Tensor) -> Tensor:
            with ImplicitTransfers() as mode:
                y = block(x) * 1.0
            modes.append(mode)
            return y

    model, parts, graphs = OnGpus(), parts_of(2, 2, 2), Graphs()
    expected = results(model, parts, None)
    modes.clear()
    assert_identical(results(model, parts, {"backend": graphs}), expected)
    assert Counter(graphs.seen) == {("gelu", True): 1, ("gelu", False): 1}
    assert all("mul" in mode.names for mode in modes)
    assert not all("gelu" in mode.names for mode in modes)


# --- where it is impossible --------------------------------------------------------------------------------------


class Breaking(Block):
    """Cannot be compiled whole."""

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


def test_one_warning_names_what_cannot_be_compiled() -> None:
    model, parts, graphs = Model(Breaking), parts_of(2, 2, 2), Graphs()
    expected = results(model, parts, None)
    with pytest.warns(UserWarning, match="compile_units") as caught:
        found = results(model, parts, {"backend": graphs})
    (text,) = [str(warning.message) for warning in caught if "compile_units" in str(warning.message)]
    assert "Breaking" in text
    assert "'blocks." in text
    assert "graph_break" in text
    assert_identical(found, expected)
    assert graphs.seen == []


def test_a_backend_that_fails_costs_a_warning_per_structure() -> None:
    attempts: list[int] = []

    def failing(graph: torch.fx.GraphModule, examples: list[Any]) -> Any:
        attempts.append(1)
        raise ValueError("no such instruction")

    model, parts = Model(), parts_of(2, 2, 2)
    expected = results(model, parts, None)
    with pytest.warns(UserWarning, match="compile_units") as caught:
        found = results(model, parts, {"backend": failing})
    texts = [str(warning.message) for warning in caught if "compile_units" in str(warning.message)]
    assert len(texts) == 1
    assert "ValueError: no such instruction" in texts[0]
    assert_identical(found, expected)
    assert len(attempts) == 2  # with and without a graph


@pytest.mark.skipif(
    not hasattr(torch._functorch.config, "force_non_lazy_backward_lowering"),
    reason="this version of torch compiles a backward when it runs",
)
def test_a_backward_that_cannot_be_compiled_is_noticed_in_the_forward() -> None:
    from torch._dynamo.backends.common import aot_autograd

    def fails(graph: torch.fx.GraphModule, examples: list[Any]) -> Any:
        raise ValueError("no such backward")

    backend = aot_autograd(fw_compiler=lambda graph, examples: graph, bw_compiler=fails)
    model, parts = Model(), parts_of(2, 2, 2)
    expected = results(model, parts, None)
    with pytest.warns(UserWarning, match="no such backward"):
        found = results(model, parts, {"backend": backend})
    assert_identical(found, expected)


class Choosy(Block):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 2:
            raise LookupError("not two rows")
        return super().forward(x)


def test_an_error_of_the_unit_is_the_users_own() -> None:
    model = Model(Choosy)
    engine = make_engine(model, {"backend": "aot_eager"})
    train(engine, model, parts_of(3, 3, 3))
    with pytest.raises(LookupError, match="not two rows"):  # and no warning
        train(engine, model, parts_of(2, 2, 2))
    train(engine, model, parts_of(3, 3, 3))


def test_too_many_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block computes with a number of its own, which torch compiles in."""
    monkeypatch.setattr(compiling, "_MAX_VERSIONS", 3)
    depths = iter(range(100))

    class Deep(Block):
        def __init__(self) -> None:
            super().__init__()
            self.depth = next(depths)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(self.depth):
                x = x * 0.5
            return super().forward(x)

    model, parts, graphs = Model(Deep, num_blocks=5), parts_of(2, 2, 2), Graphs()
    expected = results(model, parts, None)
    with pytest.warns(UserWarning, match="compiled 3 times") as caught:
        found = results(model, parts, {"backend": graphs})
    assert len([w for w in caught if "compile_units" in str(w.message)]) == 1
    assert_identical(found, expected)
    assert Counter(graphs.seen) == {("gelu", True): 3, ("gelu", False): 3}


def test_unknown_options_are_refused_at_once() -> None:
    with pytest.raises(RuntimeError, match="nonsense"):
        make_engine(Model(), {"backend": "nonsense"})


# --- what is left ------------------------------------------------------------------------------------------------


def test_units_compiled_by_the_user() -> None:
    model, parts = Model(), parts_of(2, 2, 2)
    expected = results(model, parts, None)
    model.blocks[1].compile(backend="eager")
    assert_identical(results(model, parts, {"backend": "aot_eager"}), expected)


def test_nothing_holds_replicas_or_the_model() -> None:
    model, parts = Model(), parts_of(2, 2, 2)
    engine = make_engine(model, {"backend": "aot_eager"}, link=LazyLink())
    train(engine, model, parts)
    replicas = list(engine._replicas._replicas.values())
    leaves = [weakref.ref(leaf) for replica in replicas for leaf in replica.leaves]
    masters = [weakref.ref(parameter) for parameter in model.parameters()]
    assert len(leaves) >= len(masters)
    del replicas
    engine.close()
    gc.collect()
    assert [ref for ref in leaves if ref() is not None] == []
    del engine, model
    gc.collect()
    assert [ref for ref in masters if ref() is not None] == []


def test_time_spent_compiling_is_no_cost_of_the_unit() -> None:
    def slow(graph: torch.fx.GraphModule, examples: list[Any]) -> Any:
        NOW.ms += 1000.0
        return graph

    model, parts = Model(), parts_of(3, 3, 3)
    engine = Engine(model, modelled_pool(1), recomputed, num_threads=1, compile_units={"backend": slow})
    train(engine, model, parts)
    train(engine, model, parts)
    assert max(max(times) for times in times_of(engine.costs("train"))) == 0.0


def test_a_unit_that_is_compiled_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    locks: list[UserCodeLock] = []
    seen: list[tuple[int, bool]] = []

    def make_lock(*args: Any) -> UserCodeLock:
        locks.append(UserCodeLock(*args))
        return locks[-1]

    def backend(graph: torch.fx.GraphModule, examples: list[Any]) -> Any:
        seen.append((locks[-1]._num_units, locks[-1]._exclusive == threading.get_ident()))
        return graph

    monkeypatch.setattr(step_module, "UserCodeLock", make_lock)
    engine = make_engine(model := Model(), {"backend": backend})
    for sizes in ((2, 2, 2), (3, 4, 5)):
        train(engine, model, parts_of(*sizes))
    assert seen == [(0, True)] * 4
