"""Gradients in buckets of about equal size, which are what travels between ranks.

::

    weights     |  a  | b |          c            |d|    e     |      in one order on all ranks
    buckets     |    0    |      1       |     2    |    3     |

A bucket is a list of slices. One that is a part of a single gradient travels in place; the slices of any other are
copied into a buffer, and back. What a rank has no gradient for is zero there.

Weights may have an *owner*, the rank that updates them ([Note: sharded optimizer] in :mod:`optimizer.sharding`). Then
the slices travel to their owners, who add them up, and the others forget them. In the buffer they are in the order of
their owners.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from .group import RankGroup

# Of a bucket: large enough for the network to be busy, small enough to leave while the backward goes on.
BUCKET_BYTES = 25 * 2**20
_HALF = 2  # bytes


class Slice(NamedTuple):
    """Elements ``start`` to ``stop`` of a gradient, complex ones as two each, for rank ``owner`` or, if None, all."""

    master: nn.Parameter
    start: int
    stop: int
    owner: int | None = None


Bucket = list[Slice]


class Owners:
    """Which rank updates which weights: all ranks all of them. The interface of all others."""

    def refresh(self) -> None:
        """A step begins: weights that are trained from now on get an owner."""

    def owner_of(self, weight: nn.Parameter) -> int | None:
        """None for all ranks."""
        return None


EACH_FOR_ITSELF = Owners()


def buckets_of(
    masters: Iterable[nn.Parameter], num_bytes: int = BUCKET_BYTES, *, owners: Owners = EACH_FOR_ITSELF
) -> list[Bucket]:
    """The gradients of ``masters``, in this order, in buckets of at most ``num_bytes`` of one dtype each, with and
    without owners.

    A bucket waits for all of its gradients: so only one that is larger than a bucket is in several.
    """
    buckets: list[Bucket] = []
    room, kind = 0, None
    for master in masters:
        start, size, owner = 0, _size_of(master), owners.owner_of(master)
        most = max(1, num_bytes // master.dtype.to_real().itemsize)
        while start < size:
            if kind != (master.dtype, owner is None) or room < min(size - start, most):
                buckets.append([])
                kind, room = (master.dtype, owner is None), most
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
        if bucket[0].owner is not None:
            self._send_to_owners(sorted(bucket, key=lambda piece: cast(int, piece.owner)), sums, what)
            return
        tensor, is_buffer = self._filled(bucket, sums)
        self._group.add_up(tensor, what, self._wire_of(tensor))
        if is_buffer:
            _take_back(bucket, tensor, sums)

    def _send_to_owners(self, bucket: Bucket, sums: dict[nn.Parameter, Tensor], what: str) -> None:
        tensor, _ = self._filled(bucket, sums)
        sizes = [sum(_length(piece) for piece in bucket if piece.owner == rank) for rank in range(self._group.size)]
        total = self._group.add_up_parts(tensor, sizes, what, self._wire_of(tensor))
        _take_back([piece for piece in bucket if piece.owner == self._group.rank], total, sums)
        for piece in bucket:
            if piece.owner != self._group.rank and piece.stop == _size_of(piece.master):
                sums.pop(piece.master, None)

    def _filled(self, bucket: Bucket, sums: Mapping[nn.Parameter, Tensor]) -> tuple[Tensor, bool]:
        """What this rank has of ``bucket``, in a row, and whether that is in the buffer."""
        first = bucket[0]
        if len(bucket) == 1 and first.master in sums:
            return flat(sums[first.master])[first.start : first.stop], False
        buffer = self._buffer(bucket)
        for piece, part in zip(bucket, torch.split(buffer, list(map(_length, bucket))), strict=True):
            if (known := sums.get(piece.master)) is None:
                part.zero_()
            else:
                part.copy_(flat(known)[piece.start : piece.stop])
        return buffer, True

    def _wire_of(self, tensor: Tensor) -> torch.dtype | None:
        return tensor.dtype if tensor.dtype.itemsize == _HALF else self._wire if tensor.dtype == torch.float32 else None

    def _buffer(self, bucket: Bucket) -> Tensor:
        dtype = bucket[0].master.dtype.to_real()
        size = sum(map(_length, bucket))
        known = self._buffers.get(dtype)
        if known is None or known.numel() < size:
            known = self._buffers[dtype] = torch.empty(size, dtype=dtype)
        return known[:size]


def _take_back(bucket: Bucket, total: Tensor, sums: dict[nn.Parameter, Tensor]) -> None:
    for piece, part in zip(bucket, torch.split(total, list(map(_length, bucket))), strict=True):
        known = sums.get(piece.master)
        if known is None:
            if not part.any():
                continue
            known = sums[piece.master] = zeros_for(piece.master)
        flat(known)[piece.start : piece.stop].copy_(part)


def _length(piece: Slice) -> int:
    return piece.stop - piece.start


def flat(gradient: Tensor) -> Tensor:
    """The elements of a contiguous gradient, real and in a row, in its memory."""
    return (torch.view_as_real(gradient) if gradient.is_complex() else gradient).view(-1)


def zeros_for(master: nn.Parameter) -> Tensor:
    """What a rank without a gradient has."""
    return torch.zeros(master.shape, dtype=master.dtype)


def _size_of(master: nn.Parameter) -> int:
    """Elements of its gradient."""
    return master.numel() * (2 if master.is_complex() else 1)
