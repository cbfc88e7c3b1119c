"""Tells the user what a training run needs on the host: once, and before it is missing. See [Note: host memory]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn

from ..optimizer.stale import StaleWeights
from ..planning.costs import CostProfile
from ..planning.partition import Partition
from ..planning.quantities import format_bytes
from .host_memory import activation_bytes, allocated_bytes, available_bytes, model_memory


class HostReport:
    """What one ``fit`` needs on the host.

    Args:
        available: gives the bytes that can still be allocated on the host, None if unknown.
        stale: the snapshots that are taken of weights; None if there are none.

    Attributes:
        memory: what is needed, as far as it is known.
    """

    def __init__(
        self,
        root: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        available: Callable[[], int | None] | None = None,
        stale: StaleWeights | None = None,
    ) -> None:
        self._root = root
        self._optimizers = optimizers
        self._available = available or available_bytes
        self._has_warned = False
        self._has_reported = False
        self._stale = stale
        self.memory = model_memory(root, optimizers, 0 if stale is None else stale.NUM_SNAPSHOTS)

    def check(self) -> None:
        """Warns, once, if what is still to be allocated is more than what is left."""
        left = self._available()
        allocated = allocated_bytes(self._root, self._optimizers)
        missing = self.memory.total - allocated - (0 if self._stale is None else self._stale.host_bytes)
        if self._has_warned or left is None or missing <= left:
            return
        self._has_warned = True
        rank_zero_warn(
            f"this run may need {self.memory.describe()} on the host. {format_bytes(missing)} of that are still to be "
            f"allocated, and {format_bytes(left)} are available: the process may be killed. Fewer rows per batch or a "
            "smaller round_size take less for activations, fewer weights to train or an optimizer with less state for "
            "the rest."
        )

    def note_plan(self, partition: Partition, costs: CostProfile, num_microbatches: int, round_size: int) -> None:
        """The calls are known, and so are the sizes of their inputs, but most of them are not there yet."""
        num_in_flight = min(num_microbatches, 2 * round_size)  # the backward of two rounds may be awaited at a time
        self.memory = replace(self.memory, activations=activation_bytes(partition, costs, num_in_flight))
        self.check()

    def note_step(self, working_copies: int) -> None:
        """A training step has ended: reports once."""
        if self._has_reported:
            return
        self._has_reported = True
        self.memory = replace(self.memory, working_copies=working_copies)
        rank_zero_info(f"this run needs up to {self.memory.describe()} on the host")
