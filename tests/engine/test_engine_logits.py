"""The logits of a micro-batch, far its largest tensors, are gone before those of the next one are made."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from lightning_roundpipe.common.dispatch import ThreadsDispatchMode
from lightning_roundpipe.planning import CostProfile, Machine, Partition
from tests.support.engine.partitions import cut_at
from tests.support.engine.steps import Steps
from tests.support.engine.taps import Tap

WIDTH = 3
VOCABULARY = 7
ROWS = 4


class Watch:
    """Who has tensors with logits in them alive, by their storages: what autograd saves counts like anything else."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._alive: list[tuple[int, StorageWeakRef]] = []
        self.seen = 0
        self.most = 0
        self.later: list[int] = []

    def note(self, owner: int, tensor: Tensor) -> None:
        """``owner`` has made a tensor."""
        if tensor.shape == (ROWS, VOCABULARY):
            with self._lock:
                self.seen += 1
                self._alive.append((owner, StorageWeakRef(tensor.untyped_storage())))
            self.most = max(self.most, len(self.owners()))

    def owners(self) -> set[int]:
        """The micro-batches that have any alive at the moment."""
        with self._lock:
            self._alive = [(owner, storage) for owner, storage in self._alive if not storage.expired()]
            return {owner for owner, _ in self._alive}


class Noting(ThreadsDispatchMode):
    """Shows every result of an operator to the watch."""

    def __init__(self, watch: Watch, owner: int) -> None:
        super().__init__()
        self._watch, self._owner = watch, owner

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(item, Tensor):
                self._watch.note(self._owner, item)
        return result


class Block(nn.Module):
    def __init__(self, told: Callable[[], None]) -> None:
        super().__init__()
        self.told = [told]
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + Tap.apply(torch.tanh(self.linear(x)), lambda: None, self.told[0])


@dataclass
class Output:
    loss: Tensor
    logits: Tensor


class Model(nn.Module):
    """Blocks, a head and the loss in user code."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = [watch]
        self.owner = threading.local()
        self.blocks = nn.ModuleList(Block(self.told) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def told(self) -> None:
        if self.owner.index in self.watch[0].owners():
            self.watch[0].later.append(self.owner.index)

    def outputs(self, batch: tuple[int, Tensor, Tensor]) -> Output:
        self.owner.index, x, y = batch
        with Noting(self.watch[0], self.owner.index):
            for block in self.blocks:
                x = block(x)
            logits = self.head(x)
            return Output(F.cross_entropy(logits, y), logits)


def scalar(model: Model, batch: Any) -> Any:
    return model.outputs(batch).loss


def dictionary(model: Model, batch: Any) -> Any:
    output = model.outputs(batch)
    return {"loss": output.loss, "accuracy": (output.logits.argmax(-1) == batch[2]).float().mean()}


def functional(model: Model, batch: Any) -> Any:
    """The weight of the head is used in user code: the logits belong to user code as well."""
    model.owner.index, x, y = batch
    with Noting(model.watch[0], model.owner.index):
        for block in model.blocks:
            x = block(x)
        return F.cross_entropy(F.linear(x, model.head.weight), y)


def stages(costs: CostProfile, machine: Machine, num_microbatches: int, training: bool) -> Partition:
    """The last block and, where it is a unit, the head are fused."""
    return cut_at(len(costs.calls), training, range(1, 2), range(1, 2), 2)


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("step", [scalar, dictionary, functional])
@pytest.mark.parametrize(("num_devices", "copies"), [(1, False), (3, True)], ids=["one device", "copies"])
def test_one_microbatch_has_logits(step: Callable[[Model, Any], Any], num_devices: int, copies: bool) -> None:
    watch = Watch()
    model = Model(watch)
    steps = Steps(model, stages, num_devices=num_devices, copies=copies)
    for seed in range(2):
        batches = [(i, torch.randn(ROWS, WIDTH), torch.arange(ROWS)) for i in range(6)]
        steps.train(
            batches,
            seed,
            lambda batch: step(model, batch),
            loss_of=lambda output: output["loss"] if isinstance(output, dict) else output,
        )
        assert watch.owners() == set()
    assert watch.seen >= 2 * 6 * 2
    assert watch.later == []
    assert watch.most == 1
