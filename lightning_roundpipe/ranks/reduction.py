"""Gradients of all ranks added up while the backward of each goes on.

[Note: reduction]
The gradients of a step travel in buckets (:mod:`ranks.buckets`), in the reverse order of the weights in the module,
which is about that of the backward, and the same on all ranks whatever the plan of each. A thread goes along them::

    backward of this rank     unit 5 | unit 4 | unit 3 | unit 2 | unit 1 | end
    reducing thread                    bucket 0 | bucket 1 ........ | bucket 2 |
    thread of the step                                                         | what there is | rests

It waits until what the plan of this rank foresees for the bucket has come, takes that out of the sums of this rank, and
adds it up over ranks. Sums are linear: what comes for these weights besides (calls off the plan, uses in user code) is
a *rest*, which follows at the end. So a plan that was not followed costs time and no exactness; and as what goes when
does not depend on timing, sums have the same bits in every run.

At the end the ranks tell each other which weights they have gradients and rests for. Rests are added up then, and so is
whatever was not sent *early*. A weight goes early if in the step before it had a gradient on a rank and a rest on none:
all ranks know that alike. So nothing goes early in the first step, weights that user code uses go once, at the end, and
what no rank has a gradient for (frozen weights, branches that were not taken) does not travel at all and gets none.

A weight may have an owner, which alone gets the sum: see :mod:`ranks.buckets`.

In steps that only accumulate, ``.grad`` holds the sum of this rank: it is *local*, and goes with the gradients of the
next step that adds up.
"""

from __future__ import annotations

import functools
import hashlib
import operator
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from ..common.threads import InterruptibleEvent, Worker
from .buckets import EACH_FOR_ITSELF, Bucket, Owners, Sender, buckets_of, zeros_for
from .failures import RankError
from .group import RankGroup

# What a rank has of a weight: a gradient, one that was not sent, one that no plan foresees; whether it is trained.
_HAS, _REST, _UNPLANNED, _TRAINED = 1, 2, 4, 8
_PATIENCE_S = 5.0

Gradients = dict[nn.Parameter, Tensor]


class Arrivals(Protocol):
    """The gradients of this rank, as their sum over ranks takes them: while they come, or when all have come."""

    def await_planned(self, masters: Iterable[nn.Parameter]) -> None:
        """Blocks until all that the plan foresees for ``masters`` has come, or nothing comes any more."""

    def take_planned(self, master: nn.Parameter) -> Tensor | None:
        """The sum of what has come by plan, which the caller owns; None for nothing."""

    def settle(self) -> None:
        """The backward has ended: blocks until everything has come.

        Raises:
            BaseException: what went wrong on its way.
        """

    def unplanned(self) -> set[nn.Parameter]:
        """Weights that something has come for besides, and has not been taken."""

    def take(self) -> Gradients:
        """All that has not been taken."""


class Reduction:
    """The gradients of one training over ranks; see [Note: reduction]. For the thread of the Trainer.

    Args:
        parameters: gives the weights with their names, in the order of the module.
        wire: dtype in which gradients travel, see :class:`Sender`.
        owners: which rank gets the gradients of which weights.

    Attributes:
        weights: name -> weight, from the last one of the module to the first.
        early_buckets: what goes early in the next step.
    """

    def __init__(
        self,
        group: RankGroup,
        parameters: Callable[[], Iterable[tuple[str, nn.Parameter]]],
        wire: torch.dtype | None = None,
        owners: Owners = EACH_FOR_ITSELF,
    ) -> None:
        self.group = group
        self._parameters = parameters
        self.owners = owners
        self.sender = Sender(group, wire)
        self._worker = Worker(1)
        self.weights: dict[str, nn.Parameter] = {}
        self._known: list[tuple[int, int | None]] = []
        self._names: dict[nn.Parameter, str] = {}
        self._digest = -1.0
        self._early: frozenset[str] = frozenset()
        self.early_buckets: list[Bucket] = []
        self._local: dict[nn.Parameter, None] = {}
        self._sending: InterruptibleEvent | None = None

    def agree(self, facts: Sequence[float], what: str) -> list[list[float]]:
        """A step begins: what each rank knows about it, by rank.

        Raises:
            RankError: if ranks make different steps, or their modules have different weights.
        """
        self._look()
        rows = self.group.exchange([self._digest, *facts], what)
        if any(row[0] != self._digest for row in rows):
            self._refuse_modules(what)
        return [row[1:] for row in rows]

    def _look(self) -> None:
        """Notices that weights are other objects now, or that the module has others, or that they have other owners."""
        named = list(self._parameters())
        self.owners.refresh()
        known = [(id(weight), self.owners.owner_of(weight)) for _, weight in named]
        if known == self._known:
            return
        self._known = known
        self.weights = dict(reversed(named))
        self._names = {weight: name for name, weight in named}
        text = "\n".join(self._described(name, weight) for name, weight in named)
        digest = float(int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big"))
        early = self._early if digest == self._digest else frozenset[str]()
        self._digest, self._early = digest, frozenset()
        self.let_go_early(early)

    def _refuse_modules(self, what: str) -> None:
        """All ranks come here.

        Raises:
            RankError: always.
        """
        mine = [self._described(name, weight) for name, weight in self.weights.items()]
        first, *others = self.group.gather(mine, f"the weights of {what}")
        for rank, other in enumerate(others, start=1):
            only = [(0, text) for text in first if text not in other] + [(rank, t) for t in other if t not in first]
            if only:
                owner, text = only[0]
                raise RankError(
                    f"the modules of rank 0 and rank {rank} have different weights: rank {owner} alone has {text}. All "
                    "ranks must train the same module: look for code that depends on the rank"
                )
        raise RankError("the modules of the ranks have their weights in different orders")

    def _described(self, name: str, weight: nn.Parameter) -> str:
        dtype, owner = str(weight.dtype).removeprefix("torch."), self.owners.owner_of(weight)
        return f"{name!r} of shape {tuple(weight.shape)} in {dtype}" + ("" if owner is None else f", of rank {owner}")

    def let_go_early(self, names: frozenset[str]) -> None:
        """What goes early in the next step: the same on all ranks."""
        if names != self._early or not names:
            self._early = names
            weights = [weight for name, weight in self.weights.items() if name in names]
            self.early_buckets = buckets_of(weights, owners=self.owners)

    def name_of(self, weight: nn.Parameter) -> str:
        """As users know it."""
        return self._names.get(weight, "a weight that is no part of the module")

    # --- local gradients -----------------------------------------------------------------------------------------

    def note_local(self, masters: Iterable[nn.Parameter]) -> None:
        """Gradients of this rank alone are about to be added to those of ``masters``.

        What is there of all ranks is shared out among them, so that the sum over ranks is right.
        """
        for master in masters:
            is_whole = self.owners.owner_of(master) is None  # otherwise no other rank has it
            if is_whole and master.grad is not None and master not in self._local:
                master.grad.div_(self.group.size)
            self._local[master] = None

    def take_local(self) -> Gradients:
        """The local gradients; those of the weights are None afterwards."""
        found = {master: master.grad for master in self._local if master.grad is not None}
        self._local.clear()
        for master in found:
            master.grad = None
        return found

    def put_back(self, local: Mapping[nn.Parameter, Tensor]) -> None:
        """The step that has taken them has failed."""
        for master, gradient in local.items():
            if master.grad is None:
                master.grad = gradient
                self._local[master] = None

    def in_background(self, work: Callable[[], None]) -> InterruptibleEvent:
        """Lets the reducing thread call ``work``, which raises nothing; set when it has."""
        self._worker.begin(work, "roundpipe-reduction")
        self._sending = self._worker.done()
        return self._sending

    def close(self) -> None:
        """Ends the thread. After an error it may wait for another rank, until it notices that the group is closed; a
        daemon that does not is left to the end of the process."""
        if self._sending is None or self._sending.wait(_PATIENCE_S):
            self._worker.close()


class StepReduction:
    """The gradients of one backward over ranks.

    Args:
        what: the step, for messages; the same text on all ranks.
        local: gradients of steps before, which go with those of this one and are taken out of here.
    """

    def __init__(self, training: Reduction, what: str, local: Gradients) -> None:
        self._training = training
        self._what = what
        self._local = local
        self._lock = threading.Lock()
        self._is_stopped = False
        self._has_sent = False
        self._sums: Gradients = {}
        self._brought: set[nn.Parameter] = set()
        self._done: InterruptibleEvent | None = None
        self._error: BaseException | None = None

    def begin(self, arrivals: Arrivals, fail: Callable[[BaseException], None]) -> None:
        """The plan is known, and the micro-batches are about to begin.

        Args:
            fail: makes them stop, because of an error on the reducing thread.
        """

        def send() -> None:
            try:
                self._send_early(arrivals)
            except BaseException as error:  # must reach the thread of the step
                self._error = error
                fail(error)

        if self._training.early_buckets:
            self._done = self._training.in_background(send)

    def stop(self) -> bool:
        """The step ends, well or not: nothing more is sent; whether anything was."""
        with self._lock:
            self._is_stopped = True
            return self._has_sent

    def _may_send(self) -> bool:
        with self._lock:
            self._has_sent |= not self._is_stopped
            return not self._is_stopped

    def _send_early(self, arrivals: Arrivals) -> None:
        """On the reducing thread, or where the backward has had no plan on that of the step."""
        taken: set[nn.Parameter] = set()
        for bucket in self._training.early_buckets:
            masters = [piece.master for piece in bucket if piece.master not in taken]
            arrivals.await_planned(masters)
            if not self._may_send():
                return
            taken.update(masters)
            for master in masters:
                self._put(self._sums, master, arrivals.take_planned(master))
            self._send(bucket, self._sums)

    def _put(self, sums: Gradients, master: nn.Parameter, gradient: Tensor | None) -> None:
        """What this rank has for ``master``, with what it has from steps before."""
        local = self._local.pop(master, None)
        if gradient is None or local is None:
            gradient = local if gradient is None else gradient
        else:
            gradient = gradient.add_(local)
        if gradient is not None:
            if gradient.layout is not torch.strided:
                raise TypeError(
                    f"the gradient of {self._training.name_of(master)!r} is sparse, and ranks add up dense ones: use "
                    "sparse=False"
                )
            # What travels is memory, which a lazily conjugated or negated tensor shares with what it is a view of.
            sums[master] = gradient.contiguous().resolve_conj().resolve_neg()
            self._brought.add(master)

    def _send(self, bucket: Bucket, sums: Gradients) -> None:
        self._training.sender.send(
            bucket, sums, f"gradients of {self._training.name_of(bucket[0].master)} in {self._what}"
        )

    def finish(self, arrivals: Arrivals) -> Gradients:
        """The backward has ended: the sums over ranks, of all weights that any rank has a gradient of, as far as this
        rank gets them.

        Raises:
            RankError: if another rank has failed, does not come, or trains other weights.
        """
        arrivals.settle()
        if self._done is None:
            self._send_early(arrivals)
        else:
            self._done.wait()
        if self._error is not None:
            raise self._error
        self._may_send()
        unplanned, rests = arrivals.unplanned(), Gradients()
        come = arrivals.take()
        for master in dict.fromkeys((*come, *self._local)):
            self._put(rests, master, come.pop(master, None))
        found = self._tell(rests, unplanned)
        weights, owners = self._training.weights, self._training.owners
        with_rests = [weight for name, weight in weights.items() if found[name] & _REST]
        for bucket in buckets_of(with_rests, owners=owners):
            self._send(bucket, rests)
        sums = {
            weight: _added(self._sums.pop(weight, None), rests.pop(weight, None), weight)
            for name, weight in weights.items()
            if found[name] & _HAS and owners.owner_of(weight) in (None, self._training.group.rank)
        }
        self._training.let_go_early(
            frozenset(name for name, flags in found.items() if flags & _HAS and not flags & _UNPLANNED)
        )
        return sums

    def _tell(self, rests: Gradients, unplanned: set[nn.Parameter]) -> dict[str, int]:
        """What any rank has of each weight, by name.

        Raises:
            RankError: if a rank trains a weight that another one does not.
        """
        weights = self._training.weights
        if strangers := set(rests).difference(weights.values()):
            shapes = ", ".join(str(tuple(stranger.shape)) for stranger in strangers)
            raise RuntimeError(
                f"parameters that are no part of the LightningModule have gradients (of shape {shapes}): ranks add up "
                "those of its parameters(). Make them attributes of the module"
            )
        mine: list[float] = [
            _HAS * (weight in self._sums or weight in self._brought)
            + _REST * (weight in rests)
            + _UNPLANNED * (weight in unplanned)
            + _TRAINED * weight.requires_grad
            for weight in weights.values()
        ]
        rows = self._training.group.exchange(mine, f"what has a gradient in {self._what}")
        columns = dict(zip(weights, zip(*(map(int, row) for row in rows), strict=True), strict=True))
        for name, flags in columns.items():
            trained = [rank for rank, flag in enumerate(flags) if flag & _TRAINED]
            if 0 < len(trained) < len(flags):
                frozen = next(rank for rank in range(len(flags)) if rank not in trained)
                raise RankError(
                    f"ranks train different weights in {self._what}: {name!r} requires a gradient on rank {trained[0]} "
                    f"and none on rank {frozen}. Freeze the same weights on all ranks, whatever their data"
                )
        return {name: functools.reduce(operator.or_, flags) for name, flags in columns.items()}


def _added(one: Tensor | None, other: Tensor | None, master: nn.Parameter) -> Tensor:
    if one is None or other is None:
        found = other if one is None else one
        return zeros_for(master) if found is None else found
    return one.add_(other)
