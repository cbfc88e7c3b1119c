"""Batches that may be a single sample without a batch dimension.

[Note: vectors without rows]
A vector may be as many rows as it has entries, or one sample with as many features. A data loader that makes batches of
samples tells, because then there are rows. One that does not (``DataLoader(batch_size=None)``, any other iterable)
gives entries of its data set as they are. If such a batch has nothing but vectors and numbers, nothing tells: it is run
whole, as one micro-batch, which is exact in any case.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from .engine.microbatch_containers import children_of, is_array, is_replicated


def may_be_one_row(batch: Any, module: pl.LightningModule) -> bool:
    """Whether a batch of the loop that runs is, or may be, one sample; see [Note: vectors without rows]."""
    entries = [batch] if is_array(batch) else [entry for _, entry in children_of(batch) or ()]
    dimensions = [entry.ndim for entry in entries if is_array(entry)]
    if 1 not in dimensions or max(dimensions) > 1:
        return False
    if not all(is_array(entry) or is_replicated(entry) for entry in entries):
        return False
    loop = None if module._trainer is None else module._trainer._active_loop
    loaders = getattr(loop, "_combined_loader", None)
    return loaders is not None and not all(_makes_batches(loader) for loader in loaders.flattened)


def _makes_batches(loader: Any) -> bool:
    return getattr(loader, "batch_sampler", None) is not None or getattr(loader, "batch_size", None) is not None
