"""Training steps of this rank as a part of those of all ranks.

[Note: steps over ranks]
A step of all ranks gives what one device would give for the batches of all of them together::

    rank 0    4 rows: loss, weighted by 4/6 --> backward --+-- gradients added up --> .grad, the same on all ranks
    rank 1    2 rows: loss, weighted by 2/6 --> backward --+

Before a step the ranks tell each other what weighs in their losses: rows, label tokens or what else the loss is a mean
over (:mod:`integration.batches.loss_weight`). Only gradients have the share in them: the loss that ``training_step``
returns and what it logs are the rank's own, as with DDP.

- Gradients are added up at once, behind the backward ([Note: reduction] in :mod:`ranks.reduction`); with manual
  optimization at each ``manual_backward``.
- Not so while Lightning blocks it (``accumulate_grad_batches``, ``toggle_model(sync_grad=False)``): then ``.grad`` is
  local, and what is there goes with the next gradients that are added up. These are scaled from the start as Lightning
  is going to scale them, since what is in ``.grad`` has been already.
- A rank whose step has no loss sends zeros, and gets the gradients of the others.
- A step that has sent gradients is not run again after an error of a device: others have them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from ...lightning_packages import pl
from ...ranks.buckets import EACH_FOR_ITSELF, Owners
from ...ranks.group import RankGroup
from ...ranks.reduction import Gradients, Reduction, StepReduction
from ...weights.gradients import GradientStore
from ..batches.rank_shares import NUM_FACTS, share_of
from ..batches.splitting import Batches, BatchSplitter
from .modules import ModuleScan

# What gradients travel in, by the option of the strategy.
WIRES = {None: None, "bf16": torch.bfloat16}


class RankSteps:
    """See [Note: steps over ranks]. For the thread of the Trainer, but for :meth:`blocked` and :attr:`is_blocked`.

    Attributes:
        has_data: whether the batch of the next step is one of the rank's own; otherwise it has no weight.
        has_local: whether what was added up last has gradients of earlier steps in it.
    """

    def __init__(
        self,
        group: RankGroup,
        scan: ModuleScan,
        splitter: BatchSplitter,
        wire: torch.dtype | None = None,
        owners: Owners = EACH_FOR_ITSELF,
    ) -> None:
        self.group = group
        self._scan = scan
        self._splitter = splitter
        self._reduction = Reduction(group, scan.parameters, wire, owners)
        self._blocks = threading.local()
        self._what = ""
        self._share: float | None = None
        self._local: Gradients = {}
        self._handed_out: list[nn.Parameter] = []
        self._num_backwards = 0
        self.has_data = True
        self.has_local = False

    @contextlib.contextmanager
    def blocked(self) -> Iterator[None]:
        """While open, gradients that the calling thread asks for are of this rank alone."""
        self._blocks.depth = getattr(self._blocks, "depth", 0) + 1
        try:
            yield
        finally:
            self._blocks.depth -= 1

    @property
    def is_blocked(self) -> bool:
        """Whether :meth:`blocked` is open on the calling thread."""
        return getattr(self._blocks, "depth", 0) > 0

    @contextlib.contextmanager
    def training_step(self, module: pl.LightningModule) -> Iterator[None]:
        """Around a training step."""
        if self.group.size == 1:
            yield
            return
        trainer = module.trainer
        self._what = f"training step {trainer.fit_loop.batch_idx} of epoch {trainer.current_epoch}"
        self._share, self._num_backwards, self._handed_out = None, 0, []
        self.has_local = False
        adds_up = module.automatic_optimization and not self.is_blocked
        self._local = self._take_local() if adds_up else {}
        try:
            yield
            if not module.automatic_optimization:  # ranks may have called manual_backward more or less often
                self.group.barrier(f"the end of {self._what}")
        except BaseException:
            self._reduction.put_back(self._local)
            raise
        finally:
            self._local = {}

    def share_of(self, batches: Batches) -> float:
        """Of the batch of this rank in the gradients; asks the others once per step.

        Raises:
            RankError: if they make other steps, or train another module.
        """
        if self.group.size == 1:
            return 1.0
        if self._share is None:
            kind = " without a sum over ranks" if self.is_blocked else ""
            weights = self._splitter.weights
            mine = weights.facts(batches.microbatches, batches.sizes) if self.has_data else [0.0] * NUM_FACTS
            facts = self._reduction.agree(mine, self._what + kind)
            self._share = share_of(self.group.rank, facts) if self.has_data else 0.0
        return self._share

    def begin(self, module: pl.LightningModule) -> StepReduction | None:
        """What adds up the gradients of a step that is about to run; None if they stay on this rank for now."""
        if self.group.size == 1 or not module.automatic_optimization or self.is_blocked:
            return None
        return StepReduction(self._reduction, self._what, self._local)

    def note_gradients(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        """The step has made them."""
        self._handed_out = list(gradients) if self.group.size > 1 and self.is_blocked else []

    def before_hand_out(self) -> None:
        """The gradients of the last step are about to be added to ``.grad``."""
        self._reduction.note_local(self._handed_out)
        self._handed_out = []

    def add_up(self, gradients: dict[nn.Parameter, Tensor], *, is_blocked: bool) -> dict[nn.Parameter, Tensor]:
        """Those of ``manual_backward``, which are about to be added to ``.grad``; no update runs.

        Args:
            is_blocked: whether they are to stay on this rank for now.

        Raises:
            RankError: if another rank has failed or does something else.
        """
        if self.group.size == 1:
            return gradients
        if is_blocked:
            self._reduction.note_local(gradients)
            return gradients
        self._num_backwards += 1
        what = f"manual_backward {self._num_backwards} of {self._what}"
        return StepReduction(self._reduction, what, self._take_local()).finish(GradientStore.of(gradients))

    def _take_local(self) -> Gradients:
        local = self._reduction.take_local()
        self.has_local = bool(local)
        return local

    def close(self) -> None:
        """The run has ended, and the group is closed."""
        self._reduction.close()
