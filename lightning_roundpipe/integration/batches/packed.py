"""Packed text: several sequences one after the other in a single row, cut between sequences.

::

    input_ids     [[a a a a | b b | c c c]]          two micro-batches   [[a a a a]]   [[b b c c c]]
    position_ids  [[0 1 2 3 | 0 1 | 0 1 2]]                              [[0 1 2 3]]   [[0 1 0 1 2]]
    cu_seq_lens    [0,        4,    6,     9]                            [0, 4]        [0, 2, 5]
    labels        [[- a a a | - b | - c c]]                              [[- a a a]]   [[- b - c c]]

Such a row, as ``DataCollatorWithFlattening`` of transformers makes it, is recognised by ``cu_seq_lens_*`` (or
``cu_seqlens*``), by ``position_ids`` that restart, or by ``seq_idx``. A cut is exact if no loss and no attention
crosses it: the label of the first token of a sequence must be -100 where the model predicts the next token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ...common.trees import rebuild
from .loss_weight import IGNORED_LABEL
from .microbatches import MicrobatchSplit
from .nodes import is_array, is_replicated, is_sequence
from .reading import BatchSplitError

_TOKENS = ("input_ids", "inputs_embeds")
_BOUNDARIES = ("cu_seq_len", "cu_seqlen")
_LONGEST = ("max_length", "max_seqlen", "max_seq_len")


@dataclass(frozen=True)
class Packed:
    """A row of packed sequences.

    Attributes:
        bounds: where the sequences begin, and the length of the row; in tokens.
    """

    bounds: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Length of the row."""
        return self.bounds[-1]

    @property
    def num_sequences(self) -> int:
        """Number of sequences in the row."""
        return len(self.bounds) - 1


def find_packed(batch: Any) -> Packed | None:
    """The sequences of ``batch``, if it is one row of several of them."""
    if not isinstance(batch, Mapping):
        return None
    tokens = next((batch[key] for key in _TOKENS if isinstance(batch.get(key), Tensor)), None)
    if tokens is None or tokens.ndim < 2 or tokens.shape[0] != 1:
        return None
    length = int(tokens.shape[1])
    for key, value in batch.items():
        bounds = _bounds_in(str(key), value, length)
        if len(bounds) > 2:
            return Packed(bounds)
    return None


def packs_sequences(batch: Any) -> bool:
    """Whether rows of ``batch`` hold several sequences that only a model without a key-value cache keeps apart: it
    looks for them in the positions, where it is given no mask."""
    if not isinstance(batch, Mapping) or batch.get("attention_mask") is not None:
        return False
    positions = batch.get("position_ids")
    is_restarted = isinstance(positions, Tensor) and positions.ndim == 2 and bool((positions[:, 1:] == 0).any())
    return is_restarted or find_packed(batch) is not None


def _bounds_in(key: str, value: Any, length: int) -> tuple[int, ...]:
    """The boundaries that an entry tells of, none if it does not."""
    if key.startswith(_BOUNDARIES):
        found = _numbers(value)
        return found if found[:1] == (0,) and found[-1:] == (length,) else ()
    if key not in ("position_ids", "seq_idx") or not isinstance(value, Tensor) or tuple(value.shape) != (1, length):
        return ()
    step = 1 if key == "position_ids" else 0
    starts = [0, *(torch.nonzero(torch.diff(value[0]) != step).flatten() + 1).tolist()]
    if key == "position_ids" and bool(value[0, starts].any()):
        return ()  # positions that do not begin at 0: padding, not sequences
    return (*starts, length)


def _numbers(value: Any) -> tuple[int, ...]:
    """The integers in a list, or in an array with at most one dimension of more than 1; none in anything else."""
    if is_array(value) and value.ndim and max(value.shape) == math.prod(value.shape):
        value = value.reshape(-1).tolist()
    is_list = isinstance(value, (list, tuple)) and all(type(entry) is int for entry in value)
    return tuple(value) if is_list else ()


def split_packed(
    batch: Mapping[Any, Any], packed: Packed, num_microbatches: int, *, predicts_next: bool, in_tokens: bool
) -> MicrobatchSplit:
    """Cuts a row between sequences, into at most ``num_microbatches`` rows of nearly as many tokens.

    Args:
        predicts_next: whether the loss compares a token with the label of the next one.
        in_tokens: whether the size of a part is its number of tokens; otherwise that of its sequences.

    Raises:
        BatchSplitError: for an entry that cannot be cut in this way, and for a label that belongs to two sequences.
    """
    cuts = _cuts(packed, min(num_microbatches, packed.num_sequences))
    labels = batch.get("labels")
    if predicts_next and isinstance(labels, Tensor) and tuple(labels.shape) == (1, packed.num_tokens):
        for first in cuts[1:-1]:
            if int(labels[0, packed.bounds[first]]) != IGNORED_LABEL:
                raise BatchSplitError(
                    f"split_batch='packed': batch['labels'] at position {packed.bounds[first]}, where a sequence "
                    f"begins, is not {IGNORED_LABEL}: the loss would predict it from the sequence before. Set the "
                    "label of the first token of each sequence to -100, as DataCollatorWithFlattening does, or leave "
                    "split_batch out to run the row whole"
                )
    parts, sizes = [], []
    for first, last in pairwise(cuts):
        parts.append(rebuild(batch, [_cut(str(key), value, packed, first, last) for key, value in batch.items()]))
        sizes.append(packed.bounds[last] - packed.bounds[first] if in_tokens else last - first)
    return MicrobatchSplit(tuple(parts), tuple(sizes), 1)


def _cuts(packed: Packed, count: int) -> list[int]:
    """Indices of the sequences with which the parts begin, and the number of sequences."""
    cuts = [0]
    for part in range(1, count):
        allowed = range(cuts[-1] + 1, packed.num_sequences - (count - part) + 1)
        wanted = packed.num_tokens * part / count
        cuts.append(min(allowed, key=lambda index: abs(packed.bounds[index] - wanted)))
    return [*cuts, packed.num_sequences]


def _cut(key: str, value: Any, packed: Packed, first: int, last: int) -> Any:
    """What a part with the sequences from ``first`` up to ``last`` has of an entry."""
    start, end, length = packed.bounds[first], packed.bounds[last], packed.num_tokens
    if key.startswith(_BOUNDARIES):
        if is_array(value):
            return value[..., first : last + 1] - packed.bounds[first]
        return rebuild(value, [bound - packed.bounds[first] for bound in value[first : last + 1]])
    if key.startswith(_LONGEST):
        bounds = packed.bounds[first : last + 1]
        longest = max(after - before for before, after in pairwise(bounds))
        return torch.full_like(value, longest) if isinstance(value, Tensor) else type(value)(longest)
    if is_array(value) and value.ndim:
        if value.ndim > 1 and value.shape[0] == 1 and value.shape[1] == length:
            part = value[:, start:end]
            return part - part[:, :1] if key == "seq_idx" else part
        if value.ndim == 4 and value.shape[0] == 1 and tuple(value.shape[2:]) == (length, length):
            return value[:, :, start:end, start:end]
        if value.shape[0] == packed.num_sequences:
            return value[first:last]
        if value.shape[0] == 1 and length not in value.shape:
            return value
    elif is_sequence(value) and len(value) == packed.num_sequences:
        return rebuild(value, value[first:last])
    elif is_replicated(value) or is_array(value):
        return value
    shape = f" of shape {tuple(value.shape)}" if is_array(value) else f" of type {type(value).__name__}"
    raise BatchSplitError(
        f"split_batch='packed': batch[{key!r}]{shape} fits neither the {length} tokens nor the {packed.num_sequences} "
        "sequences of the row: split such batches yourself with a function as split_batch, or leave it out to run the "
        "row whole"
    )
