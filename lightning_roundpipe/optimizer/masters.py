"""Masters that their owners alone keep, where weights travel to devices in low precision only.

[Note: divided masters]
With a sharded optimizer ([Note: sharded optimizer] in :mod:`optimizer.sharding`) a rank needs the master of a weight of
another one for nothing but its low-precision copy. So it keeps that copy alone ([Note: weights kept low] in
:mod:`weights.kept_low`), and what the owner hands out after an update is in the low dtype::

    owner          master, moments, gradient --> new master --> low copy --+
    other ranks                                                            +--> low copy

It begins when a training step does, with the weights that

- some rank else owns, and that have been updated since they are watched,
- every step so far, of training and evaluation, has needed in one low dtype alone,
- no code has looked at from before that update until now, neither in a step nor in what callbacks do around it,
- nothing else holds the memory of.

What a rank keeps is its own affair: before an update they tell each other, and a weight is handed out in the low dtype
if that is all that every other rank wants. Code that looks at a weight later finds rounded values, with a warning; from
the next update on it is whole on that rank for the rest of the fit. A checkpoint, the end of the fit and an evaluation
that is the first one of a unit get the masters from their owners, weight by weight.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from ..weights.futures import replaced, unwaited
from ..weights.kept_low import is_alone, keep_low, low_of, make_whole, watch
from ..weights.low_precision import WorkingCopies
from .sharding import Shards

_LOW = (torch.bfloat16, torch.float16)
_WHOLE = 0.0  # as ranks tell it each other; otherwise the position in these and one


class Masters:
    """Of one ``fit``; see [Note: divided masters]. For the thread of the Trainer, but for what a look calls.

    Args:
        copies: gives the low-precision copies of the engine.
        wait: blocks until no update is under way.
    """

    def __init__(self, shards: Shards, copies: Callable[[], WorkingCopies], wait: Callable[[], None]) -> None:
        self._shards = shards
        self._copies = copies
        self._wait = wait
        self._known = -1  # version of the shards
        self._watched: dict[nn.Parameter, int] = {}  # number of updates before
        self._stays: dict[nn.Parameter, None] = {}  # whole
        self._low: dict[nn.Parameter, None] = {}
        self._rounded: dict[nn.Parameter, None] = {}
        self._needed: Mapping[nn.Parameter, torch.dtype] = {}
        self._has_warned = False

    def begin(self) -> None:
        """From now on weights of other ranks are watched, as far as they are not yet."""
        self._known = self._shards.version
        for weight in self._shards.weights:
            if not (self._shards.is_mine(weight) or weight in self._stays or weight in self._low):
                self._watch(weight)

    def _watch(self, weight: nn.Parameter) -> None:
        self._watched.setdefault(weight, self._shards.num_updates)
        watch(weight, self._note_look)

    def _note_look(self, weight: nn.Parameter, was_low: bool) -> None:
        """On any thread."""
        self._stays[weight] = None
        self._watched.pop(weight, None)
        if was_low:
            self._rounded[weight] = None
            self._low.pop(weight, None)
            self._warn(weight, "code looks at it")

    def _warn(self, weight: nn.Parameter, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"rank {self._shards.group.rank} keeps {self._shards.name_of(weight)!r}, which another rank updates, "
                f"in low precision, and {why}: until its next update it has rounded values on this rank, and is whole "
                "from then on. Use shard_optimizer=False if that matters; checkpoints have exact values",
                stacklevel=2,
            )

    # --- a training step -----------------------------------------------------------------------------------------

    def begin_step(self) -> int:
        """Gives up masters of other ranks, as far as that can be now; how many."""
        if self._known != self._shards.version:
            self.begin()
        since = [weight for weight, number in list(self._watched.items()) if number < self._shards.num_updates]
        if not since:
            return 0
        needed = self._copies().needed()
        if any(needed.get(weight) in _LOW for weight in since):
            self._wait()
        return sum(self._give_up(weight, needed.get(weight)) for weight in since)

    def _let_stay(self, weight: nn.Parameter) -> None:
        self._stays[weight] = None
        self._watched.pop(weight, None)
        make_whole(weight)

    def _give_up(self, weight: nn.Parameter, dtype: torch.dtype | None) -> bool:
        if weight not in self._watched:
            return False
        if dtype not in _LOW or not is_alone(weight):
            self._let_stay(weight)
            return False
        keep_low(weight, self._copies().surrender(weight, dtype))
        self._low[weight] = None
        del self._watched[weight]
        return True

    # --- an update -----------------------------------------------------------------------------------------------

    def kept(self, weights: Sequence[nn.Parameter]) -> list[float]:
        """What this rank keeps of each weight, for :meth:`told`."""
        needed = self._copies().needed()
        if needed is not self._needed:
            self._needed = needed
            for weight in [weight for weight in self._low if needed.get(weight) == weight.dtype]:
                make_whole(weight)
                del self._low[weight]
                self._stays[weight] = self._rounded[weight] = None
                self._warn(weight, "a step has needed it in full precision")
        lows = [low_of(weight) for weight in weights]
        return [_WHOLE if low is None else 1.0 + _LOW.index(low.dtype) for low in lows]

    def told(self, weight: nn.Parameter, kept: Sequence[float]) -> torch.dtype | None:
        """In which dtype ``weight``, which is going to be updated, is handed out; None for its own.

        Args:
            kept: by all ranks.
        """
        others = {one for rank, one in enumerate(kept) if rank != self._shards.owner_of(weight)}
        if len(others) == 1 and _WHOLE not in others:
            return _LOW[int(others.pop()) - 1]
        self._rounded.pop(weight, None)
        return None

    # --- masters from their owners -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def whole_on_rank_0(self) -> Iterator[None]:
        """While open, the parameters of rank 0 have the values of the masters, and those of others what there is; a
        look is none. A collective."""
        self._wait()
        values = {weight: _data_of(weight) for weight in (*self._watched, *self._low)}
        values.update(self._from_owners("a checkpoint", self._shards.weights, of_rank_0=True))
        with replaced(values):
            yield

    def before_evaluation(self) -> None:
        """Brings the masters of units that have not been evaluated yet: these may need them. A collective."""
        unknown = self._copies().unevaluated() if self._low else set()
        for weight in self._bring("an evaluation", unknown):
            self._watch(weight)

    def give_back(self) -> None:
        """The last step has been made: all masters come to all ranks. A collective."""
        self._bring("the end of training", self._shards.weights)
        self.release()

    def _bring(self, what: str, weights: Collection[nn.Parameter]) -> list[nn.Parameter]:
        self._wait()
        brought = []
        for weight, value in self._from_owners(what, weights):
            if weight in self._rounded:
                with torch.no_grad():
                    weight.copy_(value)
            else:
                make_whole(weight, value)
                brought.append(weight)
            self._low.pop(weight, None)
            self._rounded.pop(weight, None)
        return brought

    def _from_owners(
        self, what: str, weights: Collection[nn.Parameter], *, of_rank_0: bool = False
    ) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """The masters of ``weights`` that this rank has not, one after the other.

        Args:
            of_rank_0: whether those travel only that rank 0 has not.
        """
        group, every, known = self._shards.group, self._shards.weights, set(weights)
        mine = [weight in known and (weight in self._low or weight in self._rounded) for weight in every]
        rows = group.exchange(list(map(float, mine)), f"the masters that ranks need for {what}")
        for index, weight in enumerate(every):
            if not any(row[index] for row in rows[: 1 if of_rank_0 else None]):
                continue
            owner = self._shards.owner_of(weight)
            assert owner is not None
            value = _data_of(weight) if owner == group.rank else torch.empty(weight.shape, dtype=weight.dtype)
            group.copy_from([value], f"{self._shards.name_of(weight)!r} for {what}", owner)
            if mine[index] and (group.rank == 0 or not of_rank_0):
                yield weight, value

    def release(self) -> list[nn.Parameter]:
        """Nothing is kept low any more, or watched, until the next step begins; the weights that are rounded."""
        for weight in (*self._watched, *self._low):
            make_whole(weight)
        self._rounded.update(self._low)
        self._watched.clear()
        self._low.clear()
        self._known = -1
        return list(self._rounded)


def _data_of(weight: nn.Parameter) -> Tensor:
    with unwaited():
        return weight.data
