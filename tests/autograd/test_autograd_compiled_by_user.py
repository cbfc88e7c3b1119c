"""What the user has compiled: in units it runs compiled, elsewhere a warning says that it does not.

The backend counts how often what it has been given runs, and runs it as it is.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import lightning as L
import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_roundpipe.engine import step as step_module
from lightning_roundpipe.usercode.lock import UserCodeLock
from tests.parity.driver import assert_same, plain, train
from tests.support.models import WIDTH, Block, Chain, vectors
from tests.support.parity import Run

_STEPS = 4
_WITHOUT_EFFECT = "torch.compile has no effect on"


class Counter:
    """A backend."""

    def __init__(self) -> None:
        self.num_compiled = self.num_calls = 0
        self.threads: set[int] = set()

    def __call__(self, graph: torch.fx.GraphModule, examples: list[Any]) -> Any:
        self.num_compiled += 1

        def run(*args: Any) -> Any:
            self.num_calls += 1
            self.threads.add(threading.get_ident())
            return graph(*args)

        return run


COUNTER = Counter()


def backend(graph: torch.fx.GraphModule, examples: list[Any]) -> Any:
    return COUNTER(graph, examples)


class _AsInductor:
    """Has its settings as torch's own backend has them for ``mode="reduce-overhead"``."""

    config = {"triton.cudagraphs": True}  # noqa: RUF012

    def __call__(self, graph: torch.fx.GraphModule, examples: list[Any]) -> Any:
        return COUNTER(graph, examples)


CUDA_GRAPHS = _AsInductor()


def scaled(x: Tensor) -> Tensor:
    return F.gelu(x) * 1.5


class Mlp(Block):
    pass


class Holds(nn.Module):
    """A unit around another module and a function."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp: nn.Module = Mlp()
        self.function = scaled
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x + self.function(self.mlp(x)))


class Draws(Holds):
    """All that is dropped is put back, so that random numbers do not show."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.0 * torch.rand_like(x)


class CountsCalls(Holds):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_calls", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 0
        return super().forward(x)


class Model(Chain):
    """``how`` compiles something of it."""

    def __init__(self, how: Callable[[Model], None], unit: type[Holds] = Holds) -> None:
        super().__init__(depth=0)
        self.blocks = nn.ModuleList(unit() for _ in range(3))
        self.body: nn.Module = nn.Sequential(*self.blocks)
        self.between = scaled
        how(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.between(self.body(self.stem(x))))


def _function(model: Model) -> None:
    for block in model.blocks:
        block.function = torch.compile(scaled, backend=backend, fullgraph=True)


def _in_place(model: Model) -> None:
    for block in model.blocks:
        block.mlp.compile(backend=backend)


def _wrapped(model: Model) -> None:
    for block in model.blocks:
        block.mlp = torch.compile(block.mlp, backend=backend)


def _units_in_place(model: Model) -> None:
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)


def _units_wrapped(model: Model) -> None:
    model.blocks = nn.ModuleList(torch.compile(block, backend=backend) for block in model.blocks)
    model.body = nn.Sequential(*model.blocks)


def _between(model: Model) -> None:
    model.between = torch.compile(scaled, backend=backend, fullgraph=True)


def _around(model: Model) -> None:
    model.body = torch.compile(model.body, backend=backend)


def _around_in_place(model: Model) -> None:
    model.body.compile(backend=backend)


def _both(model: Model) -> None:
    _in_place(model)
    _between(model)


def _with_cuda_graphs(model: Model) -> None:
    for block in model.blocks:
        block.function = torch.compile(scaled, fullgraph=True, backend=CUDA_GRAPHS)


@pytest.fixture(autouse=True)
def counter() -> Counter:
    COUNTER.__init__()  # type: ignore[misc]
    return COUNTER


def _data() -> list[tuple[Tensor, Tensor]]:
    return vectors(*[8] * _STEPS)


def _run(make: Callable[[], L.LightningModule], *, copies: bool = True, **options: Any) -> tuple[Run, list[str]]:
    """The pipelined run, and what it says about compiling."""
    options["virtual_copies"] = copies
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        run = train(make, _data, devices=2, num_microbatches=4, steps=_STEPS, strategy_options=options)
    return run, [str(one.message) for one in given if "compile" in str(one.message)]


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("how", [_function, _in_place, _wrapped, _units_in_place, _units_wrapped])
def test_what_is_compiled_in_units_runs_compiled(how: Callable[[Model], None], copies: bool, counter: Counter) -> None:
    def make() -> Model:
        return Model(how)

    expected = plain(make, _data, steps=_STEPS)
    assert counter.num_calls == 3 * _STEPS
    counter.num_calls = counter.num_compiled = 0
    torch._dynamo.reset()
    calls: list[int] = []
    run, said = _run(_noting(make, lambda: calls.append(counter.num_calls)), copies=copies)
    assert_same(run, expected)
    assert said == []
    # The first micro-batch is recorded. Behind the first step every one calls each of three units, and all that is not
    # kept runs again for its backward.
    in_steps = [after - before for before, after in pairwise(calls)]
    assert all(3 * 4 <= number <= 2 * 3 * 4 for number in in_steps), in_steps
    # Replicas of a structure share it: with gradients, and without. Two devices may want the same at a time.
    assert counter.num_compiled <= 2 * 2
    assert len(counter.threads) > 1


def _noting(make: Callable[[], Model], note: Callable[[], None]) -> Callable[[], Model]:
    def made() -> Model:
        model = make()
        model.on_train_batch_end = lambda *args: note()  # type: ignore[method-assign]
        return model

    return made


@pytest.mark.parametrize(
    ("how", "unit", "name"),
    [
        (_between, Holds, "scaled"),
        (_around, Holds, "Sequential"),
        (_around_in_place, Holds, "Sequential"),
        (_function, Draws, "scaled"),
        (_in_place, CountsCalls, "Mlp"),
        (_with_cuda_graphs, Holds, "scaled"),
        (_both, Holds, "scaled"),
        (_both, Draws, "scaled, Mlp"),
    ],
)
def test_what_does_not_run_compiled_is_said_once(
    how: Callable[[Model], None], unit: type[Holds], name: str, counter: Counter
) -> None:
    expected = plain(lambda: Model(how, unit), _data, steps=_STEPS)
    counter.num_calls = 0
    torch._dynamo.reset()
    run, said = _run(lambda: Model(how, unit))
    assert_same(run, expected)
    assert len(said) == 1, said
    assert said[0].startswith(f"{_WITHOUT_EFFECT} {name}: ")
    assert "compile_units=True" in said[0]
    assert (counter.num_calls > 0) == ((how, unit) == (_both, Holds))


def test_compiled_units_take_what_is_compiled_in_them_along(counter: Counter) -> None:
    """They are one graph with it, and nothing is said."""
    expected = plain(lambda: Model(_wrapped), _data, steps=_STEPS)
    counter.num_calls = 0
    torch._dynamo.reset()
    run, said = _run(lambda: Model(_wrapped), compile_units={"backend": backend})
    assert_same(run, expected)
    assert said == []
    assert counter.num_calls > 0


def test_something_compiled_in_a_unit_that_is_not_compiled_itself_runs_compiled(counter: Counter) -> None:
    class Breaks(Holds):
        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return super().forward(x)

    expected = plain(lambda: Model(lambda model: None, Breaks), _data, steps=_STEPS)
    run, said = _run(lambda: Model(_function, Breaks), compile_units={"backend": "eager"})
    assert_same(run, expected)
    assert [one.split(":")[0] for one in said] == ["compile_units"]
    assert counter.num_calls > 0


def test_what_is_compiled_in_a_unit_is_compiled_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As units are: it changes the whole process."""
    locks: list[UserCodeLock] = []
    seen: list[tuple[int, bool]] = []

    def make_lock(*args: Any) -> UserCodeLock:
        locks.append(UserCodeLock(*args))
        return locks[-1]

    def noting(graph: torch.fx.GraphModule, examples: list[Any]) -> Any:
        seen.append((locks[-1]._units._number, locks[-1]._exclusive == threading.get_ident()))
        return graph

    def compile_blocks(model: Model) -> None:
        for block in model.blocks:
            block.function = torch.compile(scaled, backend=noting)

    monkeypatch.setattr(step_module, "UserCodeLock", make_lock)
    _run(lambda: Model(compile_blocks))
    assert seen
    assert set(seen) == {(0, True)}


def test_outside_of_steps_torch_compiles_as_ever(counter: Counter) -> None:
    between = torch.compile(scaled, backend=backend)

    class Hooked(Model):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            between(torch.ones(WIDTH))

    run, said = _run(lambda: Hooked(lambda model: None))
    assert counter.num_calls == _STEPS
    assert said == []
    assert min(run.watch.num_calls) > 0
