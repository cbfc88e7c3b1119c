"""Attributes of modules: what user code writes on itself and on units, and what units write, fill and leave there."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_roundpipe.engine import execution
from tests.parity.driver import assert_parity, plain, sequential, train
from tests.support.models import WIDTH, Block, Chain, Regression, vectors
from tests.support.parity import assert_alike


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


@pytest.mark.parametrize("model", [StateOnSelf, ConditionOnTheBlock], ids=lambda model: model.__name__)
@pytest.mark.ways("lazy")
def test_attributes_that_user_code_writes(pipeline: dict[str, Any], model: type[Regression]) -> None:
    assert_parity(model, vectors, **pipeline, min_calls=3)


class KeepsFeatures(Block):
    """Keeps what it has computed in an attribute."""

    def keep(self, h: Tensor) -> Tensor:
        raise NotImplementedError

    def have_been_read(self) -> None:
        """Called when the loss is there."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inner(x))
        return x + self.outer(self.keep(h))


class AssignsAList(KeepsFeatures):
    def keep(self, h: Tensor) -> Tensor:
        self.kept = [h, h * 2]
        return h


class MakesAListOnce(KeepsFeatures):
    """The user of the list empties it."""

    def keep(self, h: Tensor) -> Tensor:
        if not hasattr(self, "kept"):
            self.kept: list[Tensor] = []
        self.kept += [h, h * 2]
        return self.kept[0]

    def have_been_read(self) -> None:
        self.kept.clear()


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
        return (self.kept[0] + self.kept[-1]) / 5  # or four blocks would make rounding errors larger


class FillsADict(KeepsFeatures):
    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, Tensor] = {}

    def keep(self, h: Tensor) -> Tensor:
        for i in range(3):
            self.kept[i] = h * (i + 1)
        return self.kept[0] + self.kept[2]


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


KEEPERS: list[type[KeepsFeatures]] = [
    AssignsAList,
    MakesAListOnce,
    AssignsADict,
    FillsAList,
    FillsADict,
    PartsFill,
]


class LossOverFeatures(Chain):
    """Its last block is called twice."""

    block: type[KeepsFeatures]

    def __init__(self) -> None:
        super().__init__()
        blocks = [self.block() for _ in range(4)]
        self.blocks = nn.ModuleList([*blocks, blocks[-1]])

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        loss = loss + sum(block.kept[0].square().mean() + block.kept[1].mean() for block in self.blocks)
        for block in self.blocks:
            block.have_been_read()
        return loss


@pytest.mark.parametrize(("block", "is_used"), [*((block, True) for block in KEEPERS), (FillsAList, False)])
@pytest.mark.ways("lazy")
def test_lists_and_dicts_in_attributes_of_units(
    pipeline: dict[str, Any], block: type[KeepsFeatures], is_used: bool
) -> None:
    """Every micro-batch has its own, on whatever device; gradients pass what user code takes out of them."""
    model = type(f"Model{block.__name__}", (LossOverFeatures,), {"block": block})
    if not is_used:
        model.training_step = Chain.training_step  # type: ignore[attr-defined]
    assert_parity(model, vectors, **pipeline, min_calls=3)


class Adds(Block):
    """Adds to a list that it is given, and reads what other blocks have added."""

    shared: Any

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inner(x))
        self.add(h.square().mean(-1))
        return x + self.outer(h) * self.last().unsqueeze(-1)

    def add(self, value: Tensor) -> None:
        self.shared.append(value)

    def last(self) -> Tensor:
        last: Tensor = self.shared[-2] if len(self.shared) > 1 else self.shared[-1]
        return last


class AddsToADict(Adds):
    def add(self, value: Tensor) -> None:
        self.shared[len(self.shared)] = value

    def last(self) -> Tensor:
        return sum(self.shared.values())  # type: ignore[return-value]


class AddsInside(Adds):
    def add(self, value: Tensor) -> None:
        self.shared.setdefault("values", []).append(value)

    def last(self) -> Tensor:
        return self.shared["values"][0]  # type: ignore[no-any-return]


SHARED: dict[str, tuple[type[Adds], Callable[[], Any], bool]] = {
    "list": (Adds, list, False),
    "list of a step": (Adds, list, True),
    "ordered dict of a step": (AddsToADict, OrderedDict, True),
    "list in a dict": (AddsInside, dict, False),
}


@pytest.mark.parametrize("kind", SHARED)
@pytest.mark.ways("lazy")
def test_a_list_or_dict_that_units_and_user_code_share(pipeline: dict[str, Any], kind: str) -> None:
    """As routers add their losses to a list, whose sum is part of the loss."""
    block, make, is_of_a_step = SHARED[kind]

    class Shares(Chain):
        def __init__(self) -> None:
            super().__init__()
            blocks = [block() for _ in range(4)]
            self.blocks = nn.ModuleList(blocks)
            self.shared = make()
            for each in blocks:
                each.shared = self.shared

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            shared = make() if is_of_a_step else self.shared
            for each in self.blocks if is_of_a_step else ():
                each.shared = shared
            shared.clear()
            loss: Tensor = super().training_step(batch, batch_idx)
            found = list(shared.values()) if isinstance(shared, dict) else shared
            values = found[0] if block is AddsInside else found
            assert len(values) == 4
            return loss + torch.stack(values).mean()

    assert_parity(Shares, vectors, **pipeline, min_calls=3)


@pytest.mark.parametrize("make", [deque, SimpleNamespace], ids=["deque", "namespace"])
@pytest.mark.ways("lazy")
def test_a_unit_that_fills_another_container_of_the_step_is_refused(make: Callable[[], Any]) -> None:
    class Fills(Adds):
        def forward(self, x: Tensor) -> Tensor:
            x = Block.forward(self, x)
            if isinstance(self.shared, deque):
                self.shared.append(x)
            else:
                self.shared.x = x
            return x

    class Shares(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Fills() for _ in range(2))

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            for each in self.blocks:
                each.shared = make()
            return super().training_step(batch, batch_idx)  # type: ignore[no-any-return]

    with pytest.raises(RuntimeError, match=r"unit 'blocks.0' changes an object .* or a container in an attribute"):
        train(Shares, vectors, devices=2, num_microbatches=3)


class KeepsByHook(Block):
    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Any] = {"all": []}
        self.inner.register_forward_hook(self.keep)

    def keep(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.kept["last"] = output
        self.kept["all"].append(output.detach().mean(-1))


class UsersFillUnits(Chain):
    """Hooks and the step fill lists and dicts of units, which do not read them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(KeepsByHook() for _ in range(4))
        for block in self.blocks:
            block.outputs = []

    def run_block(self, block: Any, x: Tensor) -> Tensor:
        x = block(x)
        block.outputs.append(x)
        return x

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        blocks: Any = self.blocks
        for block in blocks:
            block.outputs.clear()
        loss: Tensor = super().training_step(batch, batch_idx)
        for block in blocks:
            loss = loss + block.kept["last"].square().mean() + block.outputs[0].mean()
            assert len(block.outputs) == 1
        return loss


def test_lists_and_dicts_of_units_that_user_code_fills(pipeline: dict[str, Any]) -> None:
    run = assert_parity(UsersFillUnits, vectors, **pipeline, min_calls=3)
    expected = plain(UsersFillUnits, vectors)
    for ours, theirs in zip(run.module.blocks, expected.module.blocks, strict=True):
        assert_alike(ours.kept["all"], theirs.kept["all"], rtol=1e-4, atol=1e-6)


def test_a_first_step_that_fails_leaves_lists_of_units_as_they_were() -> None:
    class Fails(UsersFillUnits):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            super().training_step(batch, batch_idx)
            raise ZeroDivisionError

    module = Fails()
    with pytest.raises(ZeroDivisionError):
        train(lambda: module, vectors, devices=2, num_microbatches=3)
    for block in module.blocks:
        assert block.kept == {"all": []}
        assert block.outputs == []


class ReturnsItsList(FillsAList):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.kept, {"nested": self.kept}


def test_lists_that_a_unit_returns_are_plain_ones(pipeline: dict[str, Any]) -> None:
    class Takes(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(ReturnsItsList() for _ in range(4))
            self.kinds: set[type] = set()

        def run_block(self, block: nn.Module, x: Tensor) -> Tensor:
            x, kept, more = block(x)
            self.kinds |= {type(kept), type(more["nested"])}
            return x + kept[1] + more["nested"][2]

    run = assert_parity(Takes, vectors, **pipeline, min_calls=3)
    assert run.module.kinds == {list}


class PassesBy(nn.Module):
    """Half of a U-Net: keeps what it is given in a list, or takes it out of it."""

    def __init__(self, stack: list[Tensor], pushes: bool) -> None:
        super().__init__()
        self.stack, self.pushes = stack, pushes
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.pushes:
                self.stack.append(x)
            x = torch.tanh(layer(x if self.pushes else x + self.stack.pop()))
        return x


class UNet(Block):
    def __init__(self) -> None:
        super().__init__()
        stack: list[Tensor] = []
        self.down, self.up = PassesBy(stack, True), PassesBy(stack, False)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(super().forward(x)))  # type: ignore[no-any-return]


class OfUNets(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(UNet() for _ in range(4))


def test_a_stack_that_parts_of_a_unit_share(pipeline: dict[str, Any]) -> None:
    run = assert_parity(OfUNets, vectors, **pipeline, min_calls=3)
    assert run.module.blocks[0].down.stack == []


class Counts(Block):
    """Fills lists and a dict with what is there for every sample, and for every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.means: list[Tensor] = []
        self.notes: list[str] = []
        self.ones: list[Tensor] = []
        self.latest: dict[str, Tensor] = {}
        self.window = [0.0, 0.0]

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.means.append(x.detach().mean(-1))
        self.notes.append("called")
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


def test_what_units_fill_is_merged_when_the_step_ends_and_learned_once(
    pipeline: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in every step, in which the unit would run with its graph, and with copies of its buffers."""
    learned: list[int] = []  # in which steps
    modules: list[ReadsWhatUnitsCount] = []
    learn = execution._learn

    def noted(replica: Any, *args: Any) -> Any:
        learned.append(modules[0].global_step)
        return learn(replica, *args)

    def make() -> ReadsWhatUnitsCount:
        modules.append(ReadsWhatUnitsCount())
        return modules[0]

    monkeypatch.setattr(execution, "_learn", noted)
    run = assert_parity(make, vectors, **pipeline, reference=ReadsWhatUnitsCount, steps=5, min_calls=3)
    expected = plain(ReadsWhatUnitsCount, vectors, steps=5)
    assert len(expected.module.found) == 3 * 5
    assert_alike(run.module.found, expected.module.found, rtol=1e-4, atol=1e-6)
    assert learned
    assert max(learned) < 3


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
