"""Tells the user what a training run needs on the host: once, and before it is missing. See [Note: host memory]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from ..common.pages import available_bytes
from ..common.sizes import num_bytes_of
from ..lightning_packages import rank_zero_info, rank_zero_warn
from ..optimizer.stale import StaleWeights
from ..planning.costs import CostProfile
from ..planning.plan import StepPlan
from ..planning.quantities import format_bytes
from .host_memory import allocated_bytes, model_memory, trained_by

# The first plan is made from guesses, and the next one after the second step.
_REPORTED_STEP = 3
# Of weights whose update takes about a tenth of a second without fused=True.
_NOTED_BYTES = 2**28


class HostReport:
    """What one ``fit`` needs on the host.

    Args:
        stale: the snapshots that are taken of weights; None if there are none.
        is_mine: whether this process, one of several, updates a weight.
        num_here: processes of the run on this host.

    Attributes:
        memory: what is needed, as far as it is known.
        room_for_activations: bytes that they may take in rounds of any size: half of what is left when the ``fit``
            begins, besides what else it is going to need; half of the weights for working copies.
    """

    def __init__(
        self,
        root: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        stale: StaleWeights | None = None,
        is_mine: Callable[[nn.Parameter], bool] = lambda weight: True,
        num_here: int = 1,
    ) -> None:
        self._root = root
        self._optimizers = optimizers
        self._has_warned = False
        self._num_steps = 0
        self._stale = stale
        self.memory = model_memory(root, optimizers, 0 if stale is None else stale.NUM_SNAPSHOTS, is_mine)
        self._held = 0  # activations that the steps until now have had, whose memory may be kept for the next ones
        needed = self._missing() + self.memory.weights // 2
        self.room_for_activations = max(0, (available_bytes() or 0) // num_here - needed) // 2

    def _missing(self) -> int:
        """What is still to be allocated."""
        allocated = allocated_bytes(self._root, self._optimizers) + self._held
        return self.memory.total - allocated - (0 if self._stale is None else self._stale.host_bytes)

    def check(self) -> None:
        """Warns, once, if what is still to be allocated is more than what is left."""
        left, missing = available_bytes(), self._missing()
        if self._has_warned or left is None or missing <= left:
            return
        self._has_warned = True
        rank_zero_warn(
            f"this run may need {self.memory.describe()} on the host. {format_bytes(missing)} of that are still to be "
            f"allocated, and {format_bytes(left)} are available: the process may be killed. Fewer rows per batch or a "
            "smaller round_size take less for activations, fewer weights to train or an optimizer with less state for "
            "the rest."
        )

    def note_plan(self, plan: StepPlan, costs: CostProfile, num_microbatches: int) -> None:
        """The calls are known, and so are the sizes of their inputs, but most of them are not there yet."""
        self.memory = replace(self.memory, activations=plan.host_activation_bytes(costs, num_microbatches))
        self.check()

    def note_step(self, working_copies: int, plan: StepPlan | None = None) -> None:
        """A training step has ended, which ran by a plan, if it was made for several stages: reports once; on the plan
        when it may have been made from measured costs."""
        self._num_steps += 1
        self._held = max(self._held, self.memory.activations)
        if self._num_steps == 1:
            self.memory = replace(self.memory, working_copies=working_copies)
            rank_zero_info(f"this run needs up to {self.memory.describe()} on the host")
            self._note_slow_optimizers()
        elif self._num_steps == _REPORTED_STEP and plan is not None and plan.reason:
            rank_zero_info(f"dispatch of training steps: {plan.reason}")

    def _note_slow_optimizers(self) -> None:
        """Tells of fused=True, which users seldom know to work on the host as well. It is theirs to choose: results
        may differ by rounding."""
        for optimizer in self._optimizers:
            name, num_bytes = type(optimizer).__name__, num_bytes_of(trained_by(optimizer))
            if num_bytes >= _NOTED_BYTES and not any(group.get("fused", True) for group in optimizer.param_groups):
                rank_zero_info(
                    f"{name} updates {format_bytes(num_bytes)} of weights on the host. {name}(..., fused=True) is "
                    "several times faster there."
                )
