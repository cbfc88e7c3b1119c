"""What users should know of their batches: one warning per run for each, with the remedy.

[Note: whole batches]
A first batch that is a single micro-batch keeps the devices from working side by side.

Most of what couples the samples of a batch cannot be noticed: a loss that ranks them looks like any other. These can:

- **batch norms** in training mode, which take their statistics from each micro-batch,
- **a loss that is NaN in some micro-batches only**, as a mean over labels is where a micro-batch has no label.
- **a number on the LightningModule that differs between micro-batches**, or to which each has added its number of rows,
  see [Note: numbers that are left] in :mod:`usercode.outputs`, and
- **buffers that a training step changes** (codebooks, queues, centers, running statistics of a user's own): each
  micro-batch does. Looked at are samples of those that keep their shape, in modules that are not torch's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from lightning.fabric.utilities.warnings import PossibleUserWarning
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from ...common.fingerprints import sample_of
from ...devices.pool import DevicePool
from ...usercode.outputs import NumbersLeft, is_number
from ..batches.splitting import Batches
from .modules import ModuleScan
from .notices import Notices

# Steps of each kind of which the numbers that they leave are looked at.
_NUM_LOOKS = 3
Buffers = dict[str, tuple[torch.Size, Tensor]]  # by name: shape, sample
# What torch says of operands that do not fit.
_OF_SIZES = ("size", "shape", "dimension")


class BatchHints:
    """Warns once for each of these; see [Note: whole batches]."""

    def __init__(self, scan: ModuleScan, notices: Notices, pool: DevicePool, num_microbatches: int) -> None:
        self._scan = scan
        self._notices = notices
        self._pool = pool
        self._num_microbatches = num_microbatches
        self._num_looked: dict[str, int] = {}

    def look_at(self, batches: Batches, *, is_first: bool) -> None:
        """Before a training step."""
        count, rows = len(batches.microbatches), batches.batch_size
        if count > 1 and "norms" not in self._notices.given and self._scan.couples_rows:
            self._warn_of_batch_norms(count)
        wanted, num_devices = self._num_microbatches, len(self._pool)
        if count == 1 and is_first and wanted > 1 and num_devices > 1:
            why, remedy = "cannot be split", "split it yourself, with RoundPipeStrategy(split_batch=...)"
            if rows is not None:
                why, remedy = f"has {rows} row" + "s" * (rows > 1), f"give it a batch_size of {wanted} or more"
            self._notices.warn(
                "single micro-batch",
                f"the first training batch {why}, so that it is a single micro-batch, and the {num_devices} devices "
                f"work one after the other. A batch of the DataLoader is what all devices work on together: {remedy}",
                category=PossibleUserWarning,
            )

    def _warn_of_batch_norms(self, num_microbatches: int) -> None:
        found = [(name, m) for name, m in self._scan.named if isinstance(m, _BatchNorm) and m.training]
        (name, first), others = found[0], len(found) - 1
        self._notices.warn(
            "norms",
            f"the batch norm {name!r} ({type(first).__name__}{f', and {others} more' if others else ''}) is in "
            f"training mode, where it takes its statistics from each of the {num_microbatches} micro-batches, not "
            "from the whole batch, and updates its running statistics as often. num_microbatches=1 gives the "
            "results of plain Lightning, eval() keeps the statistics, and GroupNorm or LayerNorm need no batch",
        )

    def look_at_losses(self, losses: Iterable[Tensor | None], weights: Sequence[float]) -> None:
        """After a training step: the losses of its micro-batches (scalars), and what weighs them."""
        if len(weights) < 2 or "losses" in self._notices.given:
            return
        pairs = enumerate(zip(losses, weights, strict=True))
        values = {index: loss.item() for index, (loss, weight) in pairs if loss is not None and weight != 0.0}
        wrong = [index for index, value in values.items() if math.isnan(value)]
        if wrong and len(wrong) < len(values):
            self._notices.warn(
                "losses",
                f"the loss of micro-batch {wrong[0]} of {len(weights)} is NaN, and that of others is not. A mean over "
                "labels is NaN where a micro-batch has no label: RoundPipeStrategy(loss_weight='label_tokens'), "
                "'causal_label_tokens', or a function that counts what the loss is a mean over, leaves such "
                "micro-batches out; with num_microbatches=1 the step sees the whole batch",
            )

    def buffers_now(self) -> Buffers:
        """Before a training step: what :meth:`look_at_buffers` compares with."""
        if "buffers" in self._notices.given:
            return {}
        return {
            name: (tensor.shape, sample_of(tensor).view(torch.uint8))
            for name, module, _, tensor in self._scan.buffers()
            if tensor.layout is torch.strided and not (tensor.is_meta or is_lazy(tensor))
            if not (isinstance(module, _BatchNorm) or type(module).__module__.startswith("torch.nn."))
        }

    def look_at_buffers(self, before: Buffers, num_microbatches: int) -> None:
        """After a training step of several micro-batches."""
        now = self.buffers_now() if before else {}
        changed = [name for name, (shape, sample) in now.items() if name in before and before[name][0] == shape]
        changed = [name for name in changed if not torch.equal(now[name][1], before[name][1])]
        if changed:
            others = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
            self._notices.warn(
                "buffers",
                f"training_step, or code that it calls, changes the buffer {changed[0]!r}{others}: once in each of the "
                f"{num_microbatches} micro-batches, from its rows alone, where plain Lightning changes it once per "
                "batch. With num_microbatches=1 that is so here, too; or change it in on_train_batch_end, by what the "
                "step returns",
            )

    def look_at_numbers(self, kind: str, numbers: Iterable[NumbersLeft], sizes: Sequence[int]) -> None:
        """After a step: what its micro-batches have left. Looks at the first steps only, as a GPU is waited for."""
        looked = self._num_looked.get(kind, 0)
        self._num_looked[kind] = looked + 1
        if looked >= _NUM_LOOKS:
            return
        roots = {id(module) for _, module in self._scan.lightning_modules}
        for module, name, before, values in numbers:
            shown = [float(value) for value in values] if id(module) in roots else []
            if any(value != shown[0] for value in shown) or (shown and _counts_rows(before, shown, sizes)):
                self._notices.warn(
                    "numbers",
                    f"{kind} leaves a number in self.{name} that depends on the micro-batch ("
                    f"{', '.join(f'{value:g}' for value in shown)}), and such numbers are not added up. For sums "
                    "and counts over the batch use self.log(..., reduce_fx='sum') or a metric object of torchmetrics.",
                )


def _counts_rows(before: Any, values: Sequence[float], sizes: Sequence[int]) -> bool:
    """Whether each micro-batch has added its number of rows, if that is not 1: steps are counted like this as well."""
    if not is_number(before) or min(sizes) == 1:
        return False
    return all(value - float(before) == size for value, size in zip(values, sizes, strict=True))


def note_sizes(error: Exception, batches: Batches) -> None:
    """Code that needs several rows (batch statistics, ranking), or knows how many a batch has, raises anything: the way
    out is said beside it."""
    rows, count = batches.batch_size, len(batches.microbatches)
    if count < 2 or rows is None or not hasattr(error, "add_note"):  # since Python 3.11
        return
    if min(batches.sizes) == 1:
        error.add_note(
            f"The batch of {rows} rows was split into {count} micro-batches, some of a single row. If the code that "
            f"failed needs several rows, use a num_microbatches of {rows // 2} or less."
        )
    elif type(error) in (RuntimeError, ValueError, IndexError) and any(word in str(error) for word in _OF_SIZES):
        error.add_note(
            f"The batch of {rows} rows was split into {count} micro-batches of {min(batches.sizes)} or more. If the "
            "code that failed counts on the rows of the whole batch, take the number of its input, or use "
            "num_microbatches=1."
        )
