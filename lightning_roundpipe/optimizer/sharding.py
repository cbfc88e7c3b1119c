"""An optimizer whose state and updates are divided among ranks.

[Note: sharded optimizer]
Every trained weight has one *owner*, the rank that gets its gradient, keeps its state and updates it. The others have
neither; their ``.grad`` is None, so that optimizers make nothing for them. The weights themselves are on all ranks, as
every rank computes with all of them: ::

                    gradients                    update                      weights
    rank 0   a b c d ----> sums of a, c   moments of a, c: new a, c   a ->    c ->    a b c d
    rank 1   a b c d ----> sums of b, d   moments of b, d: new b, d   b ->    d ->    a b c d
                                                                     round 1  round 2

Owners get weights the largest first, each to the rank that has least: by order and sizes alone, so that all ranks agree
without a word. What has an owner keeps it; weights that an optimizer gets later are shared out then.

In an update, ranks tell each other which weights have a gradient, and then go along these in the same *rounds*. In a
round each rank updates what it owns and sends it to all others: so all ranks compute at the same time, and the network
carries something in both directions. Then the weights of the round are finished on all ranks ([Note: parameter futures]
in :mod:`weights.futures`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ..common.sizes import num_bytes_of
from ..ranks.buckets import Owners
from ..ranks.group import RankGroup
from ..weights.futures import unwaited
from . import buckets

Work = tuple[list[nn.Parameter], Callable[[], None]]


class Shards(Owners):
    """Which rank owns which weights; for the thread of the Trainer.

    Args:
        weights: gives the weights of all optimizers with their names, in the order of the module.
    """

    def __init__(self, group: RankGroup, weights: Callable[[], Iterable[tuple[str, nn.Parameter]]]) -> None:
        self.group = group
        self._num_updates = 0  # that have begun
        self._weights = weights
        self._owners: dict[nn.Parameter, int] = {}  # in an order that is the same on all ranks
        self._names: dict[nn.Parameter, str] = {}

    def refresh(self) -> None:
        """Gives weights an owner that have none."""
        fresh = {weight: name for name, weight in self._weights() if weight not in self._owners}
        if not fresh:
            return
        self._names.update(fresh)
        with unwaited():
            # Those that are frozen at first may stay so: they must not be what makes loads equal.
            for trains in (True, False):
                self._share_out([weight for weight in fresh if weight.requires_grad is trains])

    def _share_out(self, weights: Sequence[nn.Parameter]) -> None:
        loads = [0] * self.group.size
        owners = {}
        for weight in sorted(weights, key=lambda weight: -weight.nbytes):
            owners[weight] = loads.index(min(loads))
            loads[owners[weight]] += weight.nbytes
        self._owners.update({weight: owners[weight] for weight in weights})

    def owner_of(self, weight: nn.Parameter) -> int | None:
        """The rank that updates ``weight``; None for those of no optimizer."""
        return self._owners.get(weight)

    def is_mine(self, weight: nn.Parameter) -> bool:
        """Whether this rank updates ``weight``."""
        return self._owners.get(weight) == self.group.rank

    # --- an update -----------------------------------------------------------------------------------------------

    def agree(self, weights: Iterable[nn.Parameter], gradients: Mapping[nn.Parameter, Tensor]) -> list[nn.Parameter]:
        """An optimizer of ``weights`` steps: those that are updated, by any rank, in the order in which they are sent.

        Args:
            gradients: that this rank has.

        Raises:
            RankError: if other ranks do something else.
        """
        self.refresh()
        self._num_updates += 1
        known = set(weights)
        order = [weight for weight in self._owners if weight in known]
        mine = [float(weight in gradients and self.is_mine(weight)) for weight in order]
        rows = self.group.exchange(mine, f"what optimizer step {self._num_updates} updates")
        return [weight for weight, *flags in zip(order, *rows, strict=True) if any(flags)]

    def works(
        self, updated: Iterable[nn.Parameter], step_of: Callable[[list[nn.Parameter]], Callable[[], None]]
    ) -> list[Work]:
        """What the thread of an update is to do, round by round.

        Args:
            updated: see :meth:`agree`.
            step_of: gives what updates these weights, which are this rank's.
        """
        rounds: list[list[nn.Parameter]] = []
        num_bytes: dict[int, int] = {}
        for weight in updated:
            owner = self._owners[weight]
            if not rounds or (owner in num_bytes and num_bytes[owner] >= buckets.BUCKET_BYTES // self.group.size):
                rounds.append([])
                num_bytes = {}
            rounds[-1].append(weight)
            num_bytes[owner] = num_bytes.get(owner, 0) + weight.nbytes
        return [(weights, self._round(weights, step_of)) for weights in rounds]

    def _round(
        self, updated: list[nn.Parameter], step_of: Callable[[list[nn.Parameter]], Callable[[], None]]
    ) -> Callable[[], None]:
        of_ranks: list[list[Tensor]] = [[] for _ in range(self.group.size)]
        with unwaited():
            for weight in updated:
                of_ranks[self._owners[weight]].append(weight.data)
        mine = [weight for weight in updated if self.is_mine(weight)]
        what = f"the update of {self._names[updated[0]]} in optimizer step {self._num_updates}"
        return functools.partial(_take_turn, self.group, of_ranks, step_of(mine) if mine else None, what)


@torch.no_grad()
def _take_turn(
    group: RankGroup, of_ranks: Sequence[Sequence[Tensor]], step: Callable[[], None] | None, what: str
) -> None:
    """One round of an update, on its thread.

    Args:
        of_ranks: the memory of the weights that each rank owns.
        step: updates what this rank owns, if that is anything.
    """
    if step is not None:
        step()
    parts = [_bytes_of(memory.contiguous()) for memory in of_ranks[group.rank]]
    mine = torch.cat([torch.empty(0, dtype=torch.uint8), *parts])
    sizes = [num_bytes_of(theirs) for theirs in of_ranks]
    for rank, (theirs, found) in enumerate(zip(of_ranks, group.share(mine, sizes, what), strict=True)):
        if rank != group.rank:
            for memory, part in zip(theirs, torch.split(found, [memory.nbytes for memory in theirs]), strict=True):
                _fill(memory, part)


def _fill(memory: Tensor, found: Tensor) -> None:
    """Writes the bytes that have come."""
    values = memory if memory.is_contiguous() else torch.empty(memory.shape, dtype=memory.dtype)
    _bytes_of(values).copy_(found)
    if values is not memory:
        memory.copy_(values)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)
