"""What travels between units: containers, tensors that are changed in place, views; buffers;
weights that units take from outside, and settings that user code changes in their lists and dicts."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal
from torch.nn import functional as F

from tests.parity.driver import assert_parity, sequential
from tests.support.models import WIDTH, Block, Chain, Regression, vectors


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@dataclass
class Hidden:
    x: Tensor
    pairs: dict[str, Pair]
    level: int = 0


class DictBlock(Block):
    def forward(self, state: dict[str, Any], *, scale: float) -> dict[str, Any]:  # type: ignore[override]
        x = super().forward(state["x"])
        return {"x": x * scale, "history": [*state["history"], x.mean(-1)], "note": "kept"}


class TupleBlock(Block):
    def forward(self, state: tuple[Tensor, tuple[Tensor, None]]) -> Pair:  # type: ignore[override]
        x, (y, nothing) = state
        assert nothing is None
        return Pair(super().forward(x + y), y * 2)


class DataclassBlock(Block):
    def forward(self, state: Hidden) -> Hidden:  # type: ignore[override]
        pair = state.pairs["a"]
        x = super().forward(state.x) * pair.left
        return Hidden(x, {"a": Pair(x, pair.right), "b": pair}, state.level + 1)


class Containers(Regression):
    def __init__(self) -> None:
        super().__init__(0)
        self.dicts = nn.ModuleList(DictBlock() for _ in range(2))
        self.tuples = nn.ModuleList(TupleBlock() for _ in range(2))
        self.dataclasses = nn.ModuleList(DataclassBlock() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        state: dict[str, Any] = {"x": self.stem(x), "history": []}
        for block in self.dicts:
            state = block(state, scale=0.7)
        assert state["note"] == "kept"
        pair = Pair(state["x"], torch.stack(state["history"], -1).repeat(1, WIDTH // 2))
        for block in self.tuples:
            pair = block((pair.left, (pair.right, None)))
        hidden = Hidden(pair.left, {"a": pair})
        for block in self.dataclasses:
            hidden = block(hidden)
        assert hidden.level == 2
        return self.head(hidden.x + hidden.pairs["b"].right)


class Record(dict[str, Any]):
    """Whose attributes are its items."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


class DistributionBlock(Block):
    def forward(self, x: Tensor) -> Independent:  # type: ignore[override]
        x = super().forward(x)
        return Independent(Normal(x, F.softplus(x)), 1)


class ObjectBlock(Block):
    def forward(self, given: Any) -> Record:  # type: ignore[override]
        return Record(x=super().forward(given.mean), also=SimpleNamespace(x=given.stddev))


class Objects(Regression):
    """Distributions, namespaces and a dict of the user's own class."""

    def __init__(self) -> None:
        super().__init__(0)
        self.dense = nn.ModuleList(DistributionBlock() for _ in range(2))
        self.objects = nn.ModuleList(ObjectBlock() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x, penalty = self.stem(x), torch.zeros(len(x))
        for dense, block in zip(self.dense, self.objects, strict=True):
            drawn = dense(x)
            record = block(drawn)
            x, penalty = record.x + record["also"].x, penalty - drawn.log_prob(x.detach())
        return self.head(x) + 0.1 * penalty[:, None]


class InPlaceBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(self.outer(torch.tanh(self.inner(x.clone()))))


class ClonedInput(Block):
    """Saves a copy, so that its input may be overwritten afterwards."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clone())


class InPlaceSideEffect(Block):
    """Changes an argument and returns something else."""

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        memory.mul_(torch.sigmoid(x.detach().mean(-1, keepdim=True)))
        memory += self.inner(x)
        return self.outer(x)


class UnitsChangeTheirInputs(Regression):
    def __init__(self) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList(InPlaceBlock() for _ in range(3))
        self.writers = nn.ModuleList(InPlaceSideEffect() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        memory = torch.zeros_like(x)
        for block, writer in zip(self.blocks, self.writers, strict=True):
            x = block(x) + 0.1
            x = x + writer(x, memory)
        return self.head(x * memory)


class ReadThenOverwritten(Regression):
    """The same tensor object goes to a unit that reads it and then to one that changes it."""

    def __init__(self) -> None:
        super().__init__(0)
        self.readers = nn.ModuleList(ClonedInput() for _ in range(3))
        self.writers = nn.ModuleList(InPlaceBlock() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        total = torch.zeros_like(x)
        for reader, writer in zip(self.readers, self.writers, strict=True):
            total = total + reader(x)
            x = writer(x)
        return self.head(x + total)


class UserCodeChangesOutputs(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x += self.position
        for block in self.blocks:
            x = block(x)
            x *= 0.9
            x[:, 0] = x[:, 1] * 2
        x.relu_()
        return self.head(x)


class ViewsAndExpansions(Regression):
    """Inputs of units that share memory: slices, transposes, expanded and repeated arguments."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        wide = x[:, None, :].expand(-1, 3, -1)
        wide = self.blocks[0](wide)
        first, second = wide.transpose(0, 1)[0], wide[:, 1:].sum(1)
        return self.head(self.blocks[1](first) + self.blocks[2](second) + self.blocks[3](first.detach()))


class Rescaled(Block):
    """Keeps its factor in a buffer, which some calls assign and others only read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(WIDTH))

    def forward(self, x: Tensor, factor: float | None = None) -> Tensor:
        if factor is not None:
            self.factor = torch.full_like(self.factor, factor)
        return super().forward(x) * self.factor


class BufferThatLaterCallsRead(Regression):
    """A unit that is called again and again: a recomputation reads what the call has read, not what is there last."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Rescaled()

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(self.stem(x), 0.5)
        x = self.block(self.blocks[0](x))
        x = self.block(x, 2.0)
        for block in self.blocks[1:]:
            x = block(x)
        return self.head(x)


class Descends(Block):
    """Goes down the slope of an energy, which its forward takes by autograd."""

    def forward(self, x: Tensor) -> Tensor:
        if not x.requires_grad:
            x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(super().forward(x).square().sum(), x, create_graph=True)
        return x - 0.1 * slope


class UnitsTakeGradients(Regression):
    """Units whose forward needs a graph, also where it is run again for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0], self.blocks[1] = Descends(), Descends()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class PenaltyByTransform(UnitsTakeGradients):
    """A gradient penalty by ``torch.func``, inside which units are user code."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0], self.blocks[1] = Block(), Block()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        slope = torch.func.grad(lambda x: self(x).sum())(batch[0])
        return super().training_step(batch, batch_idx) + slope.square().sum(1).mean()


MODELS: list[type[Regression]] = [
    BufferThatLaterCallsRead,
    Containers,
    Objects,
    PenaltyByTransform,
    UnitsChangeTheirInputs,
    ReadThenOverwritten,
    UnitsTakeGradients,
    UserCodeChangesOutputs,
    ViewsAndExpansions,
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_values_between_units(pipeline: dict[str, Any], model: type[Regression]) -> None:
    assert_parity(model, vectors, **pipeline, min_calls=3)


class Late(Block):
    """Begins to add up what it sees when a buffer says so, as observers of quantization do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("is_on", torch.zeros((), dtype=torch.bool))
        self.register_buffer("total", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.is_on:
            self.total += x.detach().sum(0)
        return x + 0.1 * self.total


class BuffersWrittenLate(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Late() for _ in range(3))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            for block in self.blocks:
                block.is_on.fill_(True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_buffers_that_units_begin_to_write_later(pipeline: dict[str, Any]) -> None:
    """The step in which they begin is run again: each micro-batch finds what those before it have added."""
    reference = sequential(BuffersWrittenLate, pipeline["num_microbatches"])
    run = assert_parity(BuffersWrittenLate, vectors, **pipeline, reference=reference, steps=4)
    assert all(block.total.abs().sum() > 0 for block in run.module.blocks)


class Frozen(Chain):
    """Trained are weights alone that frozen units reach in another way than as their own or by an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.given = nn.ParameterList(torch.ones(WIDTH) for _ in self.blocks)


class ByHook(Frozen):
    def __init__(self) -> None:
        super().__init__()
        for block, weight in zip(self.blocks, self.given, strict=True):
            block.inner.register_forward_hook(lambda module, args, output, weight=weight: output * weight)


class Closed(Block):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * self.weight(), x.mean(-1, keepdim=True)


class ByClosure(Frozen):
    """Only the first of several results depends on it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Closed().requires_grad_(False) for _ in self.blocks)
        for block, weight in zip(self.blocks, self.given, strict=True):
            block.weight = lambda weight=weight: weight

    def run_block(self, block: nn.Module, x: Tensor) -> Tensor:
        x, other = block(x)
        assert not torch.is_grad_enabled() or x.requires_grad
        return x + other


class Adapter(nn.Module):
    """Takes the place of the forward of a layer that is elsewhere."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(layer.in_features, 2), nn.Linear(2, layer.out_features)
        self.original = layer.forward

    def forward(self, x: Tensor) -> Tensor:
        return self.original(x) + self.up(self.down(x))


class ByAdapters(Frozen):
    """Of which the first one sits on a unit itself."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[Any] = [self.stem, *(block.inner for block in self.blocks)]
        self.adapters = nn.ModuleList(map(Adapter, layers))
        self.adapt(layers)

    def adapt(self, layers: list[Any]) -> None:
        for layer, adapter in zip(layers, self.adapters, strict=True):
            layer.forward = adapter.forward


class ByAdaptersLater(ByAdapters):
    """When units have run without them: an adapter is trained in the last two steps."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.adapters.requires_grad_(batch_idx > 0)
        self.head.requires_grad_(batch_idx == 0)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)


class AdaptedLater(ByAdapters):
    """Units that are trained, and get their adapters after the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(True)

    def adapt(self, layers: list[Any]) -> None:
        self.layers = layers

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            super().adapt(self.layers)


@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.parametrize("model", [ByHook, ByClosure, ByAdapters, ByAdaptersLater, AdaptedLater])
def test_weights_that_units_take_from_outside(model: type[Frozen], num_microbatches: int, way_to_copy: str) -> None:
    if way_to_copy == "accelerator" and model is not ByHook:
        pytest.skip("weights of the host in a unit on a GPU")
    optimizer: dict[str, Any] = {"optimizer": None} if model is ByAdaptersLater else {}
    assert_parity(model, vectors, devices=2, num_microbatches=num_microbatches, **optimizer, min_calls=3)


class Settings(Block):
    """Reads lists and dicts that user code sets."""

    def __init__(self) -> None:
        super().__init__()
        self.scaling = {"k": 1.5}
        self.factors = [2.0, 0.5]
        self.nested: dict[str, list[float]] = {"more": [1.0]}

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x) * self.scaling["k"] * self.scaling.get("extra", 1.0)
        return x * self.factors[-1] * self.nested["more"][0]


class SetForAWhile(Chain):
    """Around each block, or all of them; the same entries come back, and the containers were taken before."""

    def __init__(self, *, sets: str, around: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Settings() for _ in self.blocks)
        self.sets, self.around = sets, around

    @contextlib.contextmanager
    def changed(self, block: Any) -> Iterator[None]:
        scaling, factors, inside = block.scaling, block.factors, block.nested["more"]
        old = scaling["k"]
        if self.sets == "a value":
            scaling["k"] = 0.5
        elif self.sets == "a key":
            assert "extra" not in scaling
            scaling["extra"] = 2.0
        elif self.sets == "a list":
            factors.append(1.25)
        else:
            inside[0] *= 2
        yield
        if self.sets == "a value":
            scaling["k"] = old
        elif self.sets == "a key":
            del scaling["extra"]
        elif self.sets == "a list":
            factors.pop()
        else:
            inside[0] /= 2

    def run_block(self, block: Any, x: Tensor) -> Tensor:
        with self.changed(block) if self.around == "each" else contextlib.nullcontext():
            x = block(x)
        return block(x) * 0.5

    def forward(self, x: Tensor) -> Tensor:
        if self.around == "each":
            return super().forward(x)
        with contextlib.ExitStack() as stack, torch.no_grad():
            for block in self.blocks:
                stack.enter_context(self.changed(block))
            reference = super().forward(x)
        return super().forward(x) + reference.tanh()


@pytest.mark.parametrize("around", ["each", "a reference"])
@pytest.mark.parametrize("sets", ["a value", "a key", "a list", "a list in a dict"])
def test_lists_and_dicts_of_units_that_are_changed_for_a_while(
    pipeline: dict[str, Any], sets: str, around: str
) -> None:
    run = assert_parity(functools.partial(SetForAWhile, sets=sets, around=around), vectors, **pipeline, min_calls=3)
    for block in run.module.blocks:
        assert (block.scaling, block.factors, block.nested) == ({"k": 1.5}, [2.0, 0.5], {"more": [1.0]})
        assert [type(value) for value in (block.scaling, block.factors, block.nested["more"])] == [dict, list, list]
