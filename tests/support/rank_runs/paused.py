"""A training whose gradients travel one by one, with a pause in its backward in which tests do something."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from lightning_roundpipe.devices.pool import DevicePool
from lightning_roundpipe.engine.runner import Engine
from lightning_roundpipe.integration.steps import run
from lightning_roundpipe.ranks.buckets import buckets_of
from tests.support.engine.partitions import everything_recomputed
from tests.support.engine.taps import Tap
from tests.support.small import Small


class Paused(Small):
    """Does something in each step: in the forward, and in the backward between the first block and the others."""

    def __init__(self) -> None:
        super().__init__()
        self.in_forward: Callable[[int], None] = lambda index: None
        self.in_backward: Callable[[int, Tensor], None] = lambda index, x: None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = Tap.apply(self.body[0](x), lambda: None, lambda: self.in_backward(batch_idx, x))
        for block in self.body[1:]:
            hidden = block(hidden)
        self.in_forward(batch_idx)
        return F.cross_entropy(self.head(hidden), y)


def one_by_one(set_attribute: Callable[[Any, str, Any], None]) -> None:
    """A weight per bucket, and a unit per stage: its gradients go home when the last micro-batch goes on to the next.

    Args:
        set_attribute: ``setattr``, or that of a ``MonkeyPatch``.
    """

    def engine(root: nn.Module, pool: DevicePool, *others: Any) -> Engine:
        return Engine(root, pool, everything_recomputed, num_threads=1, adding_threads=1)

    set_attribute(buckets_of, "__defaults__", (16,))
    set_attribute(run, "make_engine", engine)
