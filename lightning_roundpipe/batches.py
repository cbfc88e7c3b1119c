"""From a batch to weighted micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch.nn.modules.batchnorm import _BatchNorm

from .engine.microbatch import batch_rows, merge_outputs, split_batch
from .engine.outputs import brought_home
from .options import RoundPipeOptions
from .single_rows import may_be_one_row

_IGNORED_LABEL = -100


@dataclass(frozen=True)
class Batches:
    """Micro-batches of one batch.

    Attributes:
        microbatches: in order.
        sizes: rows of each; 1 where rows are unknown.
        weights: share of each in means over the batch; they sum to 1.
        loss_weights: factor of each micro-batch's loss: its share, or 1 where losses are sums.
        batch_size: rows of the whole batch, None if it was not split.
    """

    microbatches: tuple[Any, ...]
    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    loss_weights: tuple[float, ...]
    batch_size: int | None
    _entries: tuple[dict[Any, Any] | None, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        entries = tuple(dict(m) if isinstance(m, MutableMapping) else None for m in self.microbatches)
        object.__setattr__(self, "_entries", entries)

    def bring_back(self, batch: Any) -> None:
        """Does to the whole batch what the step has done to its micro-batches, where these are dicts.

        Hooks that come after the step may look for it: an entry that the step has put into every micro-batch
        (``batch["predictions"] = ...``) is merged, one that it has taken out of all of them goes.
        """
        if not isinstance(batch, MutableMapping) or any(microbatch is batch for microbatch in self.microbatches):
            return
        before = [entries for entries in self._entries if entries is not None]
        if len(before) < len(self.microbatches):
            return
        missing = object()
        for key in dict.fromkeys(key for entries in (*before, *self.microbatches) for key in entries):
            values = [microbatch.get(key, missing) for microbatch in self.microbatches]
            if all(value is entries.get(key, missing) for value, entries in zip(values, before, strict=True)):
                continue
            if all(value is missing for value in values):
                batch.pop(key, None)
            elif not any(value is missing for value in values):
                batch[key] = merge_outputs([brought_home(value) for value in values], self.sizes, self.weights)


def microbatches_for(module: LightningModule, options: RoundPipeOptions, batch: Any, num_microbatches: int) -> Batches:
    """Splits ``batch`` as ``module`` and ``options`` want it; batch norm refuses a single row, so it gets two at least.

    Raises:
        BatchSplitError, ValueError: as :func:`microbatches_of`.
    """
    split = options.split_batch or getattr(module, "roundpipe_split_batch", None)
    if split is None and may_be_one_row(batch, module):
        return Batches((batch,), (1,), (1.0,), (1.0,), None)
    norms = any(isinstance(m, _BatchNorm) and m.training for m in module.modules())
    return microbatches_of(
        batch,
        num_microbatches,
        min_rows=2 if norms else 1,
        loss_weight=options.loss_weight,
        split=split,
    )


def microbatches_of(
    batch: Any,
    num_microbatches: int,
    *,
    min_rows: int,
    loss_weight: str | Callable[[Any], float],
    split: Callable[[Any, int], Sequence[Any]] | None,
) -> Batches:
    """Splits ``batch``; arguments as in :class:`RoundPipeOptions`.

    Raises:
        BatchSplitError: if the layout of the batch is ambiguous, naming the leaf.
        ValueError: if ``split`` gives nothing, or a weight is negative or not a number.
    """
    if split is None:
        done = split_batch(batch, num_microbatches, min_rows=min_rows)
        microbatches, sizes, batch_size = done.microbatches, done.sizes, done.batch_size
    else:
        microbatches = tuple(split(batch, num_microbatches))
        if not microbatches:
            raise ValueError(f"{split!r} returned no micro-batch for a batch of type {type(batch).__name__}")
        rows = [batch_rows(microbatch) for microbatch in microbatches]
        known = [n for n in rows if n is not None]
        sizes = tuple(known) if len(known) == len(rows) else (1,) * len(rows)
        batch_size = sum(sizes) if len(known) == len(rows) else None
    if len(microbatches) == 1:
        return Batches(microbatches, sizes, (1.0,), (1.0,), batch_size)
    counts = [_weight(m, size, loss_weight) for m, size in zip(microbatches, sizes, strict=True)]
    total = sum(counts)
    if total <= 0.0:  # no label at all: the loss is what it is, every micro-batch counts by its rows
        counts, total = [float(size) for size in sizes], float(sum(sizes))
    weights = tuple(count / total for count in counts)
    return Batches(microbatches, sizes, weights, (1.0,) * len(sizes) if loss_weight == "sum" else weights, batch_size)


def _weight(microbatch: Any, size: int, loss_weight: str | Callable[[Any], float]) -> float:
    if loss_weight in ("samples", "sum"):
        return float(size)
    if callable(loss_weight):
        weight = float(loss_weight(microbatch))
        if not weight >= 0.0:
            raise ValueError(f"loss_weight gave {weight} for a micro-batch: weights must be numbers >= 0")
        return weight
    labels = microbatch.get("labels") if isinstance(microbatch, Mapping) else getattr(microbatch, "labels", None)
    if not isinstance(labels, torch.Tensor):
        raise ValueError(
            f"loss_weight={loss_weight!r} needs a tensor 'labels' in the batch, which is a {type(microbatch).__name__} "
            "without one: use loss_weight='samples', or a function from a micro-batch to its weight"
        )
    counted = labels[..., 1:] if loss_weight == "causal_label_tokens" else labels
    return float((counted != _IGNORED_LABEL).sum())


def first_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[str | None, Any], tuple[Any, ...]]:
    """The batch among the arguments of a step: the first positional argument, or the first keyword."""
    if args:
        return (None, args[0]), args[1:]
    key = next(iter(kwargs), None)
    return (key, None if key is None else kwargs[key]), ()
