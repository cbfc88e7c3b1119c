"""Gradients cut into buckets of equal size, which are what travels between ranks.

::

    weights     |  a  | b |          c            |d|   e    |      in one order on all ranks
    buckets     |   0       |   1       |   2       |   3    |

A bucket is a list of slices. One that is a part of a single gradient travels in place; the slices of any other are
copied into a buffer, and back. What a rank has no gradient for is zero there.

Weights may have an *owner*, the rank that updates them ([Note: sharded optimizer] in :mod:`optimizer.sharding`). Those
in a bucket have the same. Their sums are made for the owner alone, and the others forget their part of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from .group import RankGroup

# Of a bucket: large enough for the network to be busy, small enough to leave while the backward goes on.
BUCKET_BYTES = 25 * 2**20
_HALF = 2  # bytes


@dataclass(frozen=True)
class Slice:
    """Elements ``start`` to ``stop`` of a gradient, complex ones as two each, for rank ``owner`` or, if None, all."""

    master: nn.Parameter
    start: int
    stop: int
    owner: int | None = None


Bucket = list[Slice]


class Owners(Protocol):
    """Which rank updates which weights.

    Attributes:
        version: is another one when more is known.
    """

    version: int

    def refresh(self) -> None:
        """A step begins: weights that are trained from now on get an owner."""

    def owner_of(self, weight: nn.Parameter) -> int | None:
        """None for all ranks."""


class EachForItself:
    """All ranks update all weights (:class:`Owners`)."""

    version = 0

    def refresh(self) -> None:
        pass

    def owner_of(self, weight: nn.Parameter) -> int | None:
        return None


EACH_FOR_ITSELF = EachForItself()


def buckets_of(
    masters: Iterable[nn.Parameter], num_bytes: int = BUCKET_BYTES, *, owners: Owners = EACH_FOR_ITSELF
) -> list[Bucket]:
    """The gradients of ``masters``, in this order, in buckets of ``num_bytes`` of one dtype and one owner each."""
    buckets: list[Bucket] = []
    room, kind = 0, None
    for master in masters:
        start, size, owner = 0, _size_of(master), owners.owner_of(master)
        while start < size:
            if not room or kind != (master.dtype, owner):
                buckets.append([])
                kind = master.dtype, owner
                room = max(1, num_bytes // _real(master.dtype).itemsize)
            stop = min(size, start + room)
            buckets[-1].append(Slice(master, start, stop, owner))
            room -= stop - start
            start = stop
    return buckets


class Sender:
    """Adds buckets up over ranks; used by one thread at a time.

    Args:
        wire: dtype in which gradients in float32 travel; None for their own. Lower ones travel in theirs, and are added
            up in float32 all the same.
    """

    def __init__(self, group: RankGroup, wire: torch.dtype | None = None) -> None:
        self._group = group
        self._wire = wire
        self._buffers: dict[torch.dtype, Tensor] = {}

    def send(self, bucket: Bucket, sums: dict[nn.Parameter, Tensor], what: str) -> None:
        """Makes the slices of ``bucket`` in ``sums``, which are contiguous, those of all ranks.

        Gradients that this rank has not, and others have, are put there; those that another rank owns are taken out.
        """
        first = bucket[0]
        if len(bucket) == 1 and first.master in sums:
            self._add_up(flat(sums[first.master])[first.start : first.stop], first.owner, what)
        else:
            parts = torch.split(self._buffer(bucket), [piece.stop - piece.start for piece in bucket])
            for piece, part in zip(bucket, parts, strict=True):
                if (known := sums.get(piece.master)) is None:
                    part.zero_()
                else:
                    part.copy_(flat(known)[piece.start : piece.stop])
            self._add_up(self._buffer(bucket), first.owner, what)
            if first.owner in (None, self._group.rank):
                _take_back(bucket, parts, sums)
        if first.owner not in (None, self._group.rank):
            for piece in bucket:
                if piece.stop == _size_of(piece.master):
                    sums.pop(piece.master, None)

    def _add_up(self, flat: Tensor, owner: int | None, what: str) -> None:
        wire = flat.dtype if flat.dtype.itemsize == _HALF else self._wire if flat.dtype == torch.float32 else None
        if owner is None:
            self._group.add_up(flat, what, wire)
        else:
            self._group.add_up_at(owner, flat, what, wire)

    def _buffer(self, bucket: Bucket) -> Tensor:
        dtype = _real(bucket[0].master.dtype)
        size = sum(piece.stop - piece.start for piece in bucket)
        known = self._buffers.get(dtype)
        if known is None or known.numel() < size:
            known = self._buffers[dtype] = torch.empty(size, dtype=dtype)
        return known[:size]


def _take_back(bucket: Bucket, parts: Sequence[Tensor], sums: dict[nn.Parameter, Tensor]) -> None:
    for piece, part in zip(bucket, parts, strict=True):
        known = sums.get(piece.master)
        if known is None:
            if not part.any():
                continue
            known = sums[piece.master] = zeros_for(piece.master)
        flat(known)[piece.start : piece.stop].copy_(part)


def flat(gradient: Tensor) -> Tensor:
    """The elements of a contiguous gradient, real and in a row, in its memory."""
    return (torch.view_as_real(gradient) if gradient.is_complex() else gradient).view(-1)


def zeros_for(master: nn.Parameter) -> Tensor:
    """What a rank without a gradient has."""
    return torch.zeros(master.shape, dtype=master.dtype)


def _size_of(master: nn.Parameter) -> int:
    """Elements of its gradient."""
    return master.numel() * (2 if master.is_complex() else 1)


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real()
