"""An optimizer whose state and updates are divided among ranks.

[Note: sharded optimizer]
Every trained weight has one *owner*, the rank that gets its gradient, keeps its state and updates it. The others have
neither; their ``.grad`` is None, so that optimizers make nothing for them. The weights themselves are on all ranks, as
every rank computes with all of them, but may be kept there in low precision ([Note: divided masters] in
:mod:`optimizer.masters`): ::

                    gradients                    update                       weights
    rank 0   a b c d ----> sums of a, c   moments of a, c: new a, c   a ->    c ->       a b c d
    rank 1   a b c d ----> sums of b, d   moments of b, d: new b, d      b ->    d ->    a b c d

Owners get weights in *blocks* of the module's order, the largest blocks first, each to the rank that has least: by the
order and the sizes alone, so that all ranks agree without a word. What has an owner keeps it; weights that an optimizer
gets later are shared out then.

In an update, ranks tell each other which weights have a gradient, and then go along the blocks in one order. Each block
is handed out by its owner, and is finished then on all ranks ([Note: parameter futures] in :mod:`weights.futures`). An
owner makes its next block before it waits for those of others: so all ranks compute at the same time.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from ..common.sizes import num_bytes_of
from ..ranks.group import RankGroup
from ..weights.futures import unwaited
from ..weights.kept_low import low_of
from . import buckets
from .stale import StaleWeights

# Blocks are so small that each rank gets about so many, if there are enough weights.
_BLOCKS_PER_RANK = 4

Work = tuple[list[nn.Parameter], Callable[[], None]]


class Keeping(Protocol):
    """What ranks keep of the weights of others."""

    def kept(self, weights: Sequence[nn.Parameter]) -> list[float]:
        """By this rank, of each weight; something that others can be told."""

    def told(self, weight: nn.Parameter, kept: Sequence[float]) -> torch.dtype | None:
        """What all ranks keep of a weight that is about to be updated: in which dtype its owner hands it out, None for
        its own."""


class Shards:
    """Which rank owns which weights; for the thread of the Trainer.

    Args:
        weights: gives the weights of all optimizers with their names, in the order of the module.

    Attributes:
        version: is another one when more weights have an owner.
        num_updates: that have begun.
        keeping: what ranks keep of the weights of others; None for all.
    """

    def __init__(self, group: RankGroup, weights: Callable[[], Iterable[tuple[str, nn.Parameter]]]) -> None:
        self.group = group
        self.version = 0
        self.num_updates = 0
        self.keeping: Keeping | None = None
        self._weights = weights
        self._owners: dict[nn.Parameter, int] = {}  # in an order that is the same on all ranks
        self._names: dict[nn.Parameter, str] = {}

    def refresh(self) -> None:
        """Gives weights an owner that have none."""
        fresh = {weight: name for name, weight in self._weights() if weight not in self._owners}
        if not fresh:
            return
        self.version += 1
        self._names.update(fresh)
        with unwaited():
            # Those that are frozen at first may stay so: they must not be what makes loads equal.
            for trains in (True, False):
                self._share_out([weight for weight in fresh if weight.requires_grad is trains])

    def _share_out(self, weights: Sequence[nn.Parameter]) -> None:
        num_bytes = min(buckets.BUCKET_BYTES, num_bytes_of(weights) // (_BLOCKS_PER_RANK * self.group.size))
        blocks: list[list[nn.Parameter]] = []
        room = 0
        ties = buckets.tied(weights)
        left = dict.fromkeys(weights)
        for weight in weights:
            together = [tie for tie in ties.get(weight, (weight,)) if tie in left]
            size = num_bytes_of(together)
            if together and (not blocks or size > room):
                blocks.append([])
                room = num_bytes
            for tie in together:
                blocks[-1].append(tie)
                del left[tie]
            room -= size
        loads = [0] * self.group.size
        owners = {}
        for block in sorted(blocks, key=lambda block: -num_bytes_of(block)):
            owner = loads.index(min(loads))
            loads[owner] += num_bytes_of(block)
            owners.update(dict.fromkeys(block, owner))
        self._owners.update({weight: owners[weight] for weight in weights})

    @property
    def weights(self) -> list[nn.Parameter]:
        """All that have an owner, in the same order on all ranks."""
        return list(self._owners)

    def name_of(self, weight: nn.Parameter) -> str:
        """In the module."""
        return self._names[weight]

    def owner_of(self, weight: nn.Parameter) -> int | None:
        """The rank that updates ``weight``; None for those of no optimizer."""
        return self._owners.get(weight)

    def is_mine(self, weight: nn.Parameter) -> bool:
        """Whether this rank updates ``weight``."""
        return self._owners.get(weight) == self.group.rank

    # --- an update -----------------------------------------------------------------------------------------------

    def agree(
        self, weights: Iterable[nn.Parameter], gradients: Mapping[nn.Parameter, Tensor]
    ) -> dict[nn.Parameter, torch.dtype | None]:
        """An optimizer of ``weights`` steps: those that are updated, by any rank, in the order in which they are sent,
        and in which dtype; None for their own.

        Args:
            gradients: that this rank has.

        Raises:
            RankError: if other ranks do something else.
        """
        self.refresh()
        self.num_updates += 1
        known = set(weights)
        order = [weight for weight in self._owners if weight in known]
        mine = [float(weight in gradients and self.is_mine(weight)) for weight in order]
        kept = [] if self.keeping is None else self.keeping.kept(order)
        rows = self.group.exchange([*mine, *kept], f"what optimizer step {self.num_updates} updates")
        columns = list(zip(*rows, strict=True))
        updated = {weight: i for i, weight in enumerate(order) if any(columns[i])}
        if self.keeping is None:
            return dict.fromkeys(updated)
        return {weight: self.keeping.told(weight, columns[len(order) + i]) for weight, i in updated.items()}

    def works(
        self,
        updated: Mapping[nn.Parameter, torch.dtype | None],
        step_of: Callable[[list[nn.Parameter]], Callable[[], None]],
        stale: StaleWeights | None,
    ) -> list[Work]:
        """What the thread of an update is to do, block by block.

        Args:
            updated: see :meth:`agree`.
            step_of: gives what updates these weights, which are this rank's.
            stale: takes snapshots of the updated weights.
        """
        blocks: list[list[nn.Parameter]] = []
        num_bytes = 0
        for weight in updated:
            if not blocks or num_bytes >= buckets.BUCKET_BYTES or self._owners[blocks[-1][0]] != self._owners[weight]:
                blocks.append([])
                num_bytes = 0
            blocks[-1].append(weight)
            num_bytes += weight.nbytes
        turns = _Turns(self.group, [step_of(block) for block in blocks if self.is_mine(block[0])])
        return [(block, self._turn(turns, {weight: updated[weight] for weight in block}, stale)) for block in blocks]

    def _turn(
        self, turns: _Turns, block: Mapping[nn.Parameter, torch.dtype | None], stale: StaleWeights | None
    ) -> Callable[[], None]:
        with unwaited():
            parts = [_Part(weight, _memory_of(weight), dtype or weight.dtype) for weight, dtype in block.items()]
        first = next(iter(block))
        what = f"the update of {self._names[first]} in optimizer step {self.num_updates}"
        return functools.partial(turns.take, parts, self._owners[first], what, stale)


@dataclass(frozen=True)
class _Part:
    """A weight of a block.

    Attributes:
        memory: what this rank keeps of it.
        wire: the dtype in which it travels.
    """

    weight: nn.Parameter
    memory: Tensor
    wire: torch.dtype


def _memory_of(weight: nn.Parameter) -> Tensor:
    low = low_of(weight)
    return weight.data if low is None else low


class _Turns:
    """The blocks of one update in their order; for its thread.

    Args:
        steps: of the blocks that this rank owns.
    """

    def __init__(self, group: RankGroup, steps: Iterable[Callable[[], None]]) -> None:
        self._group = group
        self._steps = deque(steps)
        self._is_ahead = False

    def take(self, parts: Sequence[_Part], owner: int, what: str, stale: StaleWeights | None) -> None:
        """Makes the next block of this rank, if that has not been done, and sends or gets ``parts``."""
        if self._steps and not self._is_ahead:
            self._steps.popleft()()  # and with it its gradients
            self._is_ahead = True
        is_mine = owner == self._group.rank
        sent = [_on_wire(part, has_values=is_mine) for part in parts]
        _hand_out(self._group, sent, what, owner)
        if is_mine:
            self._is_ahead = False
            return
        for part, values in zip(parts, sent, strict=True):
            if values is not part.memory:
                part.memory.copy_(values)
            if stale is not None:
                stale.refill(part.weight, part.memory)


def _on_wire(part: _Part, *, has_values: bool) -> Tensor:
    if part.memory.dtype == part.wire:
        return part.memory
    return part.memory.to(part.wire) if has_values else torch.empty_like(part.memory, dtype=part.wire)


@torch.no_grad()
def _hand_out(group: RankGroup, tensors: Sequence[Tensor], what: str, source: int) -> None:
    """Fills ``tensors`` with those of rank ``source``; as bytes, whatever they are."""
    if len(tensors) == 1 and tensors[0].is_contiguous() and tensors[0].numel():
        group.hand_out(_bytes_of(tensors[0]), what, source)
        return
    dense = [tensor.contiguous() for tensor in tensors]
    buffer = torch.cat([_bytes_of(tensor) for tensor in dense])
    if buffer.numel():
        group.hand_out(buffer, what, source)
    if group.rank == source:
        return
    parts = torch.split(buffer, [tensor.nbytes for tensor in dense])
    for tensor, copy, part in zip(tensors, dense, parts, strict=True):
        _bytes_of(copy).copy_(part)
        if copy is not tensor:
            tensor.copy_(copy)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)
