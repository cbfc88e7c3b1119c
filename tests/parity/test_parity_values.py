"""What travels between units: containers, attributes, tensors that are changed in place, views."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal
from torch.nn import functional as F

from tests.parity.driver import assert_parity, sequential, train
from tests.support.models import WIDTH, Block, Chain, Regression, vectors
from tests.support.parity import assert_alike


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


class StateOnSelf(Chain):
    """User code keeps the batch and a hidden state on the module and reads them in other methods."""

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.stem(x)
        for block in self.blocks:
            self.advance(block)
        return self.head(self.hidden)

    def advance(self, block: nn.Module) -> None:
        self.hidden = block(self.hidden) * self.current[1].mean(-1, keepdim=True)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.current = batch
        out = self(batch[0])
        return F.mse_loss(out, self.current[1])


class ConditionedBlock(Block):
    condition: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x * self.condition
        return super().forward(self.seen)


class ConditionOnTheBlock(Regression):
    """User code sets an attribute on a block, which reads it, and the other way round; both with gradients."""

    def __init__(self) -> None:
        super().__init__(0)
        self.condition = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(ConditionedBlock() for _ in range(4))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        condition = self.condition(x)
        x = self.stem(x)
        for block in self.blocks:
            block.condition = condition
            x = block(x)
            condition = condition + 0.1 * x
        return F.mse_loss(self.head(x), y) + 0.1 * sum(block.seen.square().mean() for block in self.blocks)


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


MODELS: list[type[Regression]] = [
    BufferThatLaterCallsRead,
    Containers,
    Objects,
    StateOnSelf,
    ConditionOnTheBlock,
    UnitsChangeTheirInputs,
    ReadThenOverwritten,
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


class KeepsFeatures(Block):
    """Keeps what it has computed in an attribute."""

    def keep(self, h: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inner(x))
        return x + self.outer(self.keep(h))


class AssignsAList(KeepsFeatures):
    def keep(self, h: Tensor) -> Tensor:
        self.kept = [h, h * 2]
        return h


class AssignsADict(KeepsFeatures):
    def keep(self, h: Tensor) -> Tensor:
        self.kept = {0: h, 1: h * 2, "more": (h.detach(), None)}
        return h


class FillsAList(KeepsFeatures):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def keep(self, h: Tensor) -> Tensor:
        self.kept.clear()
        for i in range(4):
            self.kept.append(h * (i + 1))
        return self.kept[0] + self.kept[-1]


class FillsADict(KeepsFeatures):
    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, Tensor] = {}

    def keep(self, h: Tensor) -> Tensor:
        for i in range(3):
            self.kept[i] = h * (i + 1)
        return self.kept[0] + self.kept[2]


class EmptiesAStack(KeepsFeatures):
    """Fills a list and takes everything out again, as a U-Net does."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[Tensor] = []

    def keep(self, h: Tensor) -> Tensor:
        self.stack += [h, h * 2]
        self.kept = [self.stack.pop() * self.stack.pop(), h]
        return self.kept[0]


class PartsFill(KeepsFeatures):
    """The lists are those of modules inside, one of which is filled by the block."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(FillsAList() for _ in range(2))

    def keep(self, h: Tensor) -> Tensor:
        for part in self.parts:
            h = part(h)
            part.kept.append(h)
        self.kept = [self.parts[0].kept[-1], self.parts[1].kept[0]]
        return h


KEEPERS: list[type[KeepsFeatures]] = [AssignsAList, AssignsADict, FillsAList, FillsADict, EmptiesAStack, PartsFill]


class LossOverFeatures(Chain):
    """Its last block is called twice."""

    block: type[KeepsFeatures]

    def __init__(self) -> None:
        super().__init__()
        blocks = [self.block() for _ in range(4)]
        self.blocks = nn.ModuleList([*blocks, blocks[-1]])

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss + sum(block.kept[0].square().mean() + block.kept[1].mean() for block in self.blocks)


@pytest.mark.parametrize("is_used", [False, True], ids=["unused", "used"])
@pytest.mark.parametrize("block", KEEPERS, ids=lambda block: block.__name__)
def test_lists_and_dicts_in_attributes_of_units(
    pipeline: dict[str, Any], block: type[KeepsFeatures], is_used: bool
) -> None:
    """Every micro-batch has its own, on whatever device; gradients pass what user code takes out of them."""
    model = type(f"Model{block.__name__}", (LossOverFeatures,), {"block": block})
    if not is_used:
        model.training_step = Chain.training_step  # type: ignore[attr-defined]
    assert_parity(model, vectors, **pipeline, min_calls=3)


class Counts(Block):
    """Fills lists and a dict with what is there for every sample, and for every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.means: list[Tensor] = []
        self.ones: list[Tensor] = []
        self.latest: dict[str, Tensor] = {}
        self.window = [0.0, 0.0]

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.means.append(x.detach().mean(-1))
        self.ones.append(torch.ones(()))
        self.latest["rows"] = x.detach()
        self.window.pop(0)
        self.window.append(float(len(self.means)))
        return x


class ReadsWhatUnitsCount(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Counts() for _ in range(3))
        self.found: list[Any] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.found += [([*block.means, *block.ones], {**block.latest}, [*block.window]) for block in self.blocks]  # type: ignore[union-attr]


def test_what_units_fill_is_merged_when_the_step_ends(pipeline: dict[str, Any]) -> None:
    run = assert_parity(ReadsWhatUnitsCount, vectors, **pipeline, min_calls=3)
    plain = train(ReadsWhatUnitsCount, vectors)
    assert len(plain.module.found) == 9
    assert_alike(run.module.found, plain.module.found, rtol=1e-4, atol=1e-6)


class OneStepFillsMore(Chain):
    """The last block is not called for two rows; and the lists of the module are deleted in the second step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Counts() for _ in range(3))
        self.notes: list[int] = [1]
        self.table: dict[str, int] = {"a": 1}

    def run_block(self, block: nn.Module, x: Tensor) -> Tensor:
        if block is self.blocks[-1] and len(x) == 2:
            return x
        return super().run_block(block, x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 1 and hasattr(self, "notes"):  # each micro-batch has it once more
            del self.notes, self.table
        return super().training_step(batch, batch_idx)  # type: ignore[no-any-return]


def test_lists_that_some_micro_batches_fill_or_that_a_step_deletes(pipeline: dict[str, Any]) -> None:
    run = assert_parity(
        OneStepFillsMore,
        vectors,
        **pipeline,
        reference=sequential(OneStepFillsMore, pipeline["num_microbatches"]),
        steps=2,
    )
    assert 0 < len(run.module.blocks[-1].means) < len(run.module.blocks[0].means) * pipeline["num_microbatches"]
    assert not {"notes", "table"} & vars(run.module).keys()
