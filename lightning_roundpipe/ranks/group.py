"""The ranks of this run: what they tell each other, and what they add up.

::

    Trainer's thread      exchange, gather, copy_from -----> control group   --+
    reducing thread       add_up, add_up_parts ------------> :mod:`sums`     --+--> gloo, on memory of the host
    thread of updates     share ---------------------------> update group    --+
    user code, Lightning  all_gather, reduce, metrics -----> default group     (backend as chosen)

Each group has an order of its own, so what one thread sends cannot meet what another one does. Nothing waits without
an end: a wait is cut into pieces, after each of which a rank looks for an interrupt, for the failure of another rank
(see :mod:`ranks.failures`), and at the time limit.

What is exchanged on the control group carries the name of what it is for. Ranks that have gone different ways meet for
different things: that is an error on all of them, which says who is where.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .failures import Failure, Mailbox, RankError, failure_of, place_of_this_process
from .sums import Sums

# Numbers that ranks tell each other in one message; more take a second one.
_RECORD = 32
_HEADER = 2
_RECHECK = timedelta(seconds=0.2)
# A rank that has waited for so long tells it, so that those who are missing can be named.
_TOLD_AFTER_S = 1.0
_LATE_S = 0.5
# The longest time after which it looks after the next rank again.
_LOOKED_AFTER_S = 30.0


class RankGroup:
    """The ranks of a run of one process: nothing to tell, nothing to add. The interface of all groups.

    Attributes:
        rank: of this process.
        size: number of ranks.
    """

    rank = 0
    size = 1

    def exchange(self, values: Sequence[float], what: str) -> list[list[float]]:
        """The numbers of all ranks, by rank, to float64 precision; the Trainer's thread alone.

        Args:
            values: as many on all ranks.
            what: what for; the same text on all ranks.

        Raises:
            RankError: if another rank has failed, does not come in time, or has come for something else.
        """
        return [list(map(float, values))]

    def gather(self, value: Any, what: str) -> list[Any]:
        """An object of each rank, by rank; otherwise as :meth:`exchange`."""
        return [value]

    def copy_from(self, tensors: Iterable[Tensor], what: str, source: int = 0) -> None:
        """Fills tensors on the host with the values of those of rank ``source``; otherwise as :meth:`exchange`.

        Args:
            tensors: of the same shapes and dtypes, in the same order, on all ranks.
        """

    def barrier(self, what: str) -> None:
        """Returns when all ranks have come here; otherwise as :meth:`exchange`."""
        self.exchange([], what)

    def add_up(self, tensor: Tensor, what: str, wire: torch.dtype | None = None) -> None:
        """Makes a tensor on the host the sum of those of all ranks, to the same bits on all; one thread at a time.

        Args:
            tensor: flat and contiguous, of the same size on all ranks.
            what: for messages.
            wire: lower dtype to travel in, the sum as well as its parts, which are added up in float32; None for that
                of the tensor, in which they are added up then.

        Raises:
            RankError: if another rank has failed, or does not come in time.
        """

    def add_up_parts(self, tensor: Tensor, sizes: Sequence[int], what: str, wire: torch.dtype | None = None) -> Tensor:
        """This rank's part of the sum of the tensors of all ranks; otherwise as :meth:`add_up`.

        Args:
            tensor: flat and contiguous, the parts of all ranks one after the other; stays as it is.
            sizes: of these parts.
        """
        return tensor

    def share(self, mine: Tensor, sizes: Sequence[int], what: str) -> list[Tensor]:
        """The bytes of all ranks, by rank; otherwise as :meth:`add_up`.

        Args:
            mine: flat and contiguous, of dtype uint8; those of this rank.
            sizes: the numbers of bytes of all ranks.
        """
        return [mine]

    def wait(self, begin: Callable[[], Any], what: str) -> None:
        """Lets a collective of ``torch.distributed`` begin, and waits for its end.

        Args:
            begin: begins it with ``async_op=True``, and returns what is waited for.

        Raises:
            RankError: if another rank has failed, or does not come in time.
        """

    def check(self, what: str) -> None:
        """Raises:
        RankError: if another rank has failed. A look that costs no message; for any thread.
        """

    def explain(self, error: BaseException, what: str) -> BaseException:
        """What is to be raised for an error of ``torch.distributed``: which rank has failed, if that is known."""
        return error

    @contextlib.contextmanager
    def explained(self, what: str) -> Iterator[None]:
        """Around collectives of others on the default group: their errors tell which rank has failed.

        Raises:
            RankError: if another rank has failed.
        """
        try:
            yield
        except RuntimeError as error:
            if (told := self.explain(error, what)) is error:
                raise
            raise told from error

    def close(self, error: BaseException | None = None) -> None:
        """The end; with an error, the others are told of it."""


ALONE = RankGroup()


class ManyRanks(RankGroup):
    """Ranks over ``torch.distributed``, whose default group is there already.

    Args:
        timeout: of each wait.
        main_address: host of rank 0, by which all reach it.
        owns_default: whether the default group ends with this one.
    """

    def __init__(self, timeout: timedelta, main_address: str, *, owns_default: bool = False) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._owns_default = owns_default
        self._timeout, self._timeout_s = timeout, timeout.total_seconds()
        self._is_closed = False
        self._control = dist.new_group(backend="gloo", timeout=timeout)
        self._sums = Sums(timeout)
        self._updates = dist.new_group(backend="gloo", timeout=timeout)
        self._mailbox = self._make_mailbox(main_address)

    def stage_sums(self, backend: str, device: torch.device | None) -> None:
        """Lets gradients travel over ``backend`` by way of ``device``; a collective, before the first step.

        Raises:
            RankError: if there is a device on some ranks only, or another rank fails meanwhile.
        """
        rows = self.exchange([float(device is not None)], f"whether gradients travel over {backend}")
        if len({is_there for (is_there,) in rows}) > 1:
            raise RankError(
                f"rank {[is_there for (is_there,) in rows].index(0.0)} has no device for process_group_backend="
                f"{backend!r}, and others have one: leave the option out"
            )
        if device is not None:
            with self.explained(f"connections over {backend}"):
                staged = Sums(self._timeout, backend, device)
            self._sums.close(is_failed=False)
            self._sums = staged

    def _make_mailbox(self, main_address: str) -> Mailbox:
        mailbox = Mailbox(main_address if self.rank == 0 else "", main_address)
        told: list[Any] = [None] * self.size
        mine = (mailbox.address, place_of_this_process(), secrets.token_hex())
        try:
            dist.all_gather_object(told, mine, group=self._control)
        except RuntimeError as error:
            raise RankError(
                f"rank {self.rank} has lost others while ranks exchanged their addresses: {error}"
            ) from error
        addresses, places, tokens = zip(*told, strict=True)
        mailbox.connect(self.rank, addresses, places, tokens[0])
        return mailbox

    def exchange(self, values: Sequence[float], what: str) -> list[list[float]]:
        record = torch.zeros(_RECORD, dtype=torch.float64)
        record[0], record[1] = _number_of(what), len(values)
        first = torch.tensor(values[: _RECORD - _HEADER], dtype=torch.float64)
        record[_HEADER : _HEADER + len(first)] = first
        records = self._all_gather(record, what)
        if any(not torch.equal(other[:_HEADER], record[:_HEADER]) for other in records):
            self._disagree(f"{what} ({len(values)} numbers)")
        found = [other[_HEADER : _HEADER + len(values)].tolist() for other in records]
        if len(values) > _RECORD - _HEADER:
            rest = torch.tensor(values[_RECORD - _HEADER :], dtype=torch.float64)
            for mine, other in zip(found, self._all_gather(rest, what), strict=True):
                mine += other.tolist()
        return found

    def _disagree(self, what: str) -> None:
        """All ranks come here, as all have seen the same records."""
        others = self._gather_objects(what, what)
        places = "; ".join(f"rank {rank} has come for {other}" for rank, other in enumerate(others))
        raise RankError(
            f"ranks have gone different ways: {places}. All ranks must make the same steps, and call what waits for "
            "the others (barriers, saving of checkpoints, logging with sync_dist=True) in the same order: look for "
            "code that depends on the rank, or on the rank's own data"
        )

    def gather(self, value: Any, what: str) -> list[Any]:
        self.exchange([], what)
        return self._gather_objects(value, what)

    def _gather_objects(self, value: Any, what: str) -> list[Any]:
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [int(size) for size in self._all_gather(torch.tensor([len(mine)]), what)]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(mine)] = mine
        found = self._all_gather(padded, what)
        return [pickle.loads(other[:size].numpy().tobytes()) for other, size in zip(found, sizes, strict=True)]

    @torch.no_grad()
    def copy_from(self, tensors: Iterable[Tensor], what: str, source: int = 0) -> None:
        for tensor in tensors:
            if not tensor.numel():
                continue
            # Bytes travel whatever the dtype.
            flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            self._send(flat, source, what)
            if self.rank != source:
                tensor.copy_(flat.view(tensor.dtype).reshape(tensor.shape))

    def add_up(self, tensor: Tensor, what: str, wire: torch.dtype | None = None) -> None:
        self._sums.add_up(tensor, wire, lambda begin: self.wait(begin, what))

    def add_up_parts(self, tensor: Tensor, sizes: Sequence[int], what: str, wire: torch.dtype | None = None) -> Tensor:
        return self._sums.add_up_parts(tensor, sizes, wire, lambda begin: self.wait(begin, what))

    def share(self, mine: Tensor, sizes: Sequence[int], what: str) -> list[Tensor]:
        outgoing = [0 if rank == self.rank else len(mine) for rank in range(self.size)]
        incoming = [0 if rank == self.rank else size for rank, size in enumerate(sizes)]
        sent = mine if self.size == 2 else mine.repeat(self.size - 1)
        come = torch.empty(sum(incoming), dtype=torch.uint8)
        self.wait(
            lambda: dist.all_to_all_single(come, sent, incoming, outgoing, group=self._updates, async_op=True), what
        )
        found = list(torch.split(come, incoming))
        found[self.rank] = mine
        return found

    def _send(self, tensor: Tensor, source: int, what: str) -> None:
        self.wait(lambda: dist.broadcast(tensor, source, group=self._control, async_op=True), what)

    def _all_gather(self, tensor: Tensor, what: str) -> list[Tensor]:
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        self.wait(lambda: dist.all_gather(found, tensor, group=self._control, async_op=True), what)
        return found

    def wait(self, begin: Callable[[], Any], what: str) -> None:
        self.check(what)
        start = time.monotonic()
        is_told, look_after_s = False, _TOLD_AFTER_S
        try:
            work = begin()
        except RuntimeError as error:
            raise self.explain(error, what) from error
        while True:
            try:
                work.wait(_RECHECK)
                return
            except RuntimeError as error:
                if work.is_completed():
                    return self._result(work, what)
                self.check(what)
                waited_s = time.monotonic() - start
                if not is_told and waited_s > min(_TOLD_AFTER_S, self._timeout_s / 2):
                    self._mailbox.send_wait(what)
                    is_told = True
                if waited_s > self._timeout_s:
                    raise self._late(what) from error
                if waited_s > look_after_s:
                    if (failure := self._mailbox.look_after()) is not None:
                        raise self._of(failure, what) from None
                    look_after_s = waited_s + min(waited_s, _LOOKED_AFTER_S)

    def _result(self, work: Any, what: str) -> None:
        """What has come of a collective: it may have ended well since a piece of the wait was over."""
        try:
            work.wait()
        except RuntimeError as error:
            raise self.explain(error, what) from error

    def check(self, what: str) -> None:
        if self._is_closed:
            raise RankError(f"rank {self.rank} has left the others, and waits no longer for {what}")
        if (failure := self._mailbox.look()) is not None:
            raise self._of(failure, what)

    def _of(self, failure: Failure, what: str) -> RankError:
        return RankError(f"{failure}\n\nThis is rank {self.rank}, which was waiting for {what}", failure)

    def explain(self, error: BaseException, what: str) -> BaseException:
        if isinstance(error, RankError):
            return error
        if not self._is_closed and (failure := self._mailbox.find_out()) is not None:
            return self._of(failure, what)
        if "imed out" in str(error):
            return self._late(what)
        return RankError(f"rank {self.rank} has lost a connection to other ranks while it waited for {what}: {error}")

    def _late(self, what: str) -> RankError:
        self._mailbox.send_wait(what)
        time.sleep(_LATE_S)  # others whose time ends at the same moment tell it as well
        here = {self.rank, *self._mailbox.waiting_for(what)}
        missing = [rank for rank in range(self.size) if rank not in here]
        who = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing)) or '(which one is not known)'}"
        return RankError(
            f"rank {self.rank} has waited for {what} for {self._timeout_s:g} s, the time limit "
            f"(RoundPipeStrategy(timeout=...)), and {who} did not come, without an error. A rank that does something "
            "else, or takes longer, holds up all others"
        )

    def close(self, error: BaseException | None = None) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if error is not None:
            self._mailbox.send(failure_of(self.rank, error))
        self._mailbox.close()
        if dist.is_initialized():
            dist.destroy_process_group(self._control)
            self._sums.close(is_failed=error is not None)
            dist.destroy_process_group(self._updates)
            if self._owns_default:
                dist.destroy_process_group()
        # Connections close with the last reference, and as soon as nothing waits on them any more: so one group after
        # the other, in the same order on all ranks.
        del self._control, self._sums, self._updates


def _number_of(what: str) -> int:
    """That float64 holds exactly."""
    return int.from_bytes(hashlib.sha256(what.encode()).digest()[:6], "big")
