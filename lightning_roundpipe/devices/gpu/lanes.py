"""Lanes between the host and a GPU.

[Note: streams]
A device computes on the default stream of its GPU, and has four streams for copies: in each direction one for
activations and one for bulk, so that an activation never queues behind bulk on the side of the host.

    compute      | unit ........ | unit ........ | unit
    h2d x        | x |                    wait(x): the compute stream waits for the event behind x
    h2d bulk     | W1 | W2 |--- the lane's thread issues W3 when W1 has been copied ---| W3 |
    d2h x             | wait for compute | y |
    d2h bulk          | wait for compute | G1 | G2 | ...

On the bus an activation waits for the chunks of bulk that were issued already, which are two at most, see
[Note: transfers]: a thread of the lane issues chunk after chunk, and waits for the last but one before each.
Activations are issued at once, by the thread that submits them.

Streams are ordered by events only. A download waits for what the compute stream was given before; an upload of what a
download brings waits for that; the compute stream waits for an upload. The host itself waits only for what it reads.

A copy from ordinary memory of the host would hold up the thread that issues it. So an activation that does not lie in a
page-locked buffer of ours is put into one first, by the thread that submits it: user code may change what is its own
right after that. Bulk is page-locked where it is, or staged chunk by chunk by the thread of the lane: see
[Note: page-locked memory] in :mod:`devices.gpu.pinned`.

Memory that a copy on the device uses belongs to one stream, in whose order the allocator hands it out again:
- Sources of downloads belong to the compute stream. They are held until the copy has been made.
- Destinations of activations belong to their lane's stream. The allocator is told that the compute stream uses them.
- Destinations of bulk belong to the bulk stream. Nothing tells the allocator; they are held by ``Device.free`` until
  the compute stream has passed, which the books on the memory wait for. So the next weights get exactly their place.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...common.sizes import num_bytes_of
from ..chunks import Pair, pieces_of, plain_mode
from ..transfer import CHUNK_BYTES, Done, Edge, Lane, Moved, Transfer
from .driver import GpuDriver

MAX_CHUNKS_IN_FLIGHT = 2
_NOTHING: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()


class GpuTransfer(Transfer):
    """Copies on a stream of a lane: queued, then issued (there is an event behind them), then ended.

    It ends when a thread finds that the event was reached, or when it fails.

    Attributes:
        is_bulk: see :meth:`Lane.submit`.
        is_download: whether it goes to the host.
        num_bytes: that travel.
    """

    def __init__(
        self, lane: GpuLane, tensors: list[Tensor], pairs: list[Pair], *, is_bulk: bool, is_page_locked: bool
    ) -> None:
        super().__init__(tensors, pairs)
        self.is_bulk = is_bulk
        self.is_page_locked = is_page_locked
        self.num_bytes = num_bytes_of([copy for copy, _ in pairs])
        self.is_download = lane.direction == "d2h"
        self._lane = lane
        self._event: Any = None
        self._may_go_on = not is_bulk  # no other thread sees an activation before it has been issued

    def issued(self, event: Any) -> None:
        """All copies are in the stream, with ``event`` behind them."""
        self._event = event
        if self.is_bulk:
            with self._lock:
                self._let_go_on()

    def is_done(self) -> bool:
        if self._has_ended:
            return True
        if not self._may_go_on:
            return False
        try:
            if not self._event.query():
                return False
        except RuntimeError as error:  # of anything that ran on the GPU before; kept for those who ask for the copies
            self.end(error)
        else:
            self.end()
        return True

    def settle(self) -> None:
        """Waits until the event is reached, and ends; an error is kept for those who ask for the copies."""
        self._await_go_on()
        if self._has_ended:
            return
        try:
            self._event.synchronize()
        except BaseException as error:
            self.end(error)
        else:
            self.end()

    def await_done(self) -> None:
        self.settle()
        self._raise()

    def await_on(self, stream: Any) -> None:
        """Lets ``stream`` wait for the copies; the host waits only until they are issued."""
        self._await_go_on()
        self._raise()
        if not self._has_ended:
            stream.wait_event(self._event)

    def _await_by_reader(self) -> None:
        self._lane.let_reader_wait(self)


class _Job(NamedTuple):
    """A transfer, the event that a download waits for, and what an upload comes after."""

    transfer: GpuTransfer
    ready: Any
    after: Transfer | None
    label: str


class GpuLane(Lane):
    """Copies in one direction between the host and a GPU; see [Note: streams].

    Args:
        direction: "h2d" or "d2h".
        device_name: for messages and the thread.
        torch_device: the GPU.
        compute: its compute stream.

    Attributes:
        activation_bytes: submitted so far.
    """

    def __init__(
        self, direction: str, device_name: str, torch_device: torch.device, compute: Any, driver: GpuDriver
    ) -> None:
        super().__init__(direction, device_name)
        self._device = torch_device
        self._compute = compute
        self._driver = driver
        self._activations = driver.new_stream(torch_device)
        self._bulk = driver.new_stream(torch_device)
        self._work = threading.Condition(self._mutex)
        self._queue: deque[_Job] = deque()
        # What was issued and is not known to have ended, per stream.
        self._under_way: dict[bool, deque[GpuTransfer]] = {False: deque(), True: deque()}
        self.activation_bytes = self._ended_bytes = 0
        # The thread's: events behind the chunks in flight, with what they read on the host.
        self._chunks: deque[tuple[Any, list[Tensor]]] = deque()
        self._thread: threading.Thread | None = None

    # --- submitting ----------------------------------------------------------------------------------------------

    def submit(
        self, sources: Sequence[Tensor], *, is_bulk: bool, after: Transfer | None = None, label: str = ""
    ) -> Transfer:
        if not sources:
            return Done([])
        self.collect()
        is_upload = self.direction == "h2d"
        ready = None if is_upload else self._driver.record(self._compute)  # a download reads what is there now
        # An activation that ordinary memory is to bring lies in page-locked memory before it is issued.
        is_staged = is_upload and not is_bulk and not (after is not None and after.is_page_locked)
        if is_staged and after is not None:
            after.wait(Edge.OFFLOADED)  # before the host reads it
        stream = self._bulk if is_bulk else self._activations
        with plain_mode(), self._driver.on(stream) if is_upload or not is_bulk else _NOTHING:
            transfer = self._transfer(sources, is_bulk=is_bulk, is_staged=is_staged)
            with self._mutex:
                self._count(transfer.num_bytes, label)
                self.activation_bytes += 0 if is_bulk else transfer.num_bytes
            job = _Job(transfer, ready, after, label)
            if not is_bulk:
                self._issue(job, stream, [transfer.pairs])
        if is_bulk:
            self._enqueue(job)
        return transfer

    def _transfer(self, sources: Sequence[Tensor], *, is_bulk: bool, is_staged: bool) -> GpuTransfer:
        """The destinations, which belong to the stream of the calling thread; nothing is copied yet."""
        tensors: list[Tensor] = []
        pairs: list[Pair] = []
        is_page_locked = True
        for source in sources:
            source = source.detach() if is_bulk or source.requires_grad else source  # bulk may get other memory
            copies = []
            for part in _parts(source):
                copy, is_locked = self._destination(part)
                is_page_locked = is_page_locked and is_locked
                copies.append(copy)
                pairs.append(_in_order(copy, self._staged(part) if is_staged else part))
            tensors.append(_like(source, copies))
        return GpuTransfer(self, tensors, pairs, is_bulk=is_bulk, is_page_locked=is_page_locked)

    def _destination(self, source: Tensor) -> tuple[Tensor, bool]:
        """Memory for a copy, and whether it is page-locked."""
        if self.direction == "d2h":
            copy, is_locked = self._driver.host.buffers.empty_like(source)
            return _marked_like(source, copy), is_locked
        return torch.empty_like(source, device=self._device), False

    def _staged(self, source: Tensor) -> Tensor:
        """``source`` in page-locked memory, as it is now."""
        return self._driver.host.buffers.empty_like(source)[0].copy_(source)

    def let_reader_wait(self, transfer: GpuTransfer) -> None:
        """What reads the copies waits for them: the compute stream after an upload, the host after a download."""
        if self.direction == "d2h":
            transfer.await_done()
            return
        transfer.await_on(self._compute)
        if not transfer.is_bulk:
            for tensor in transfer.tensors:
                for part in _parts(tensor):
                    self._driver.record_stream(part, self._compute)

    def _issue(self, job: _Job, stream: Any, pieces: Iterable[Sequence[Pair]]) -> None:
        """Gives the copies to a stream, which the calling thread has chosen: the one that submits an activation, or
        that of the lane."""
        transfer = job.transfer
        moved = self.moved
        self._await_sources(job, stream)
        started = None if moved is None else self._driver.record(stream, is_timed=True)
        for piece in pieces:
            for copy, source in piece:
                self._driver.copy(copy, source)
            if transfer.is_bulk:
                read = [source for _, source in piece] if self.direction == "h2d" else []
                self._chunks.append((self._driver.record(stream), read))
        event = self._driver.record(stream, is_timed=moved is not None)
        if moved is not None:
            moved.append(Moved(self.direction, started, event, job.label))
        transfer.issued(event)
        self._under_way[transfer.is_bulk].append(transfer)

    def _await_sources(self, job: _Job, stream: Any) -> None:
        if job.ready is not None:
            stream.wait_event(job.ready)
        if isinstance(job.after, GpuTransfer) and job.after.is_page_locked:
            job.after.await_on(stream)
        elif job.after is not None:  # from ordinary memory the driver may read at once
            job.after.wait(Edge.OFFLOADED)

    def collect(self) -> None:
        """Ends what has arrived meanwhile. On any thread; no lock is held while callbacks run."""
        for under_way in self._under_way.values():
            while (first := _first_of(under_way)) is not None and first.is_done():
                self._forget(under_way, first)

    def await_activations(self, submitted: int, *, but: int) -> None:
        """Waits until what :attr:`activation_bytes` counted at a time has ended, but for so many bytes of it. The
        calling thread holds no lock."""
        under_way = self._under_way[False]
        while submitted - self._ended_bytes > but and (first := _first_of(under_way)) is not None:
            first.settle()
            self._forget(under_way, first)

    def _forget(self, under_way: deque[GpuTransfer], ended: GpuTransfer) -> None:
        with self._mutex:
            if under_way and under_way[0] is ended:
                under_way.popleft()
                self._ended_bytes += 0 if ended.is_bulk else ended.num_bytes

    # --- the thread ----------------------------------------------------------------------------------------------

    def _enqueue(self, job: _Job) -> None:
        with self._work:
            if self._thread is None:
                thread = threading.Thread(target=self._serve, name=self.name, daemon=True)
                thread.start()
                self._thread = thread
            self._queue.append(job)
            self._work.notify_all()

    def _serve(self) -> None:
        """The life of the thread."""
        with contextlib.suppress(Exception):  # of a GPU that is lost: every job raises it anew
            self._driver.set_device(self._device)
        while (job := self._next_job()) is not None:
            try:
                with plain_mode(), self._driver.on(self._bulk):
                    self._issue(job, self._bulk, self._pieces(job.transfer))
            except BaseException as error:  # kept by the transfer, for those who ask for the copies
                job.transfer.end(error)
            del job  # it would hold memory of the device until the next one comes

    def _next_job(self) -> _Job | None:
        """Waits for a job, and ends what arrives meanwhile. None when the step has ended and nothing is left to do."""
        while True:
            with self._work:
                under_way = self._under_way[True]
                while self._is_open and not self._queue and not under_way:
                    self._work.wait()
                if self._queue:
                    return self._queue.popleft()
                if not self._is_open:
                    return None
                first = under_way[0]
            first.settle()
            self._forget(under_way, first)
            del first  # as above
            self.collect()

    def _pieces(self, transfer: GpuTransfer) -> Iterator[list[Pair]]:
        """The chunks, each when it may be issued."""
        for piece in pieces_of(transfer.pairs, CHUNK_BYTES):
            if len(self._chunks) == MAX_CHUNKS_IN_FLIGHT:
                event, read = self._chunks.popleft()
                event.synchronize()
                del read
                self.collect()
            yield self._driver.host.staged(piece) if self.direction == "h2d" else piece

    # --- steps ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """What was submitted is made: weights may stay for the next step."""
        with self._work:
            self._is_open = False
            thread, self._thread = self._thread, None
            self._work.notify_all()
        if thread is not None:
            thread.join()
        with self._work:
            left = [transfer for under_way in self._under_way.values() for transfer in under_way]
            for under_way in self._under_way.values():
                under_way.clear()
            self._ended_bytes = self.activation_bytes
        with contextlib.ExitStack() as stack:  # all of them, even if a callback raises
            stack.callback(self._chunks.clear)
            for transfer in reversed(left):
                stack.callback(transfer.settle)


def _first_of(under_way: deque[GpuTransfer]) -> GpuTransfer | None:
    try:
        return under_way[0]
    except IndexError:  # none, or another thread has taken it meanwhile
        return None


def _parts(tensor: Tensor) -> list[Tensor]:
    """The dense tensors that make up ``tensor``."""
    return [tensor._indices(), tensor._values()] if tensor.layout is torch.sparse_coo else [tensor]


def _in_order(copy: Tensor, source: Tensor) -> Pair:
    """Both tensors as one row, if their elements lie in the same order, without gaps: the driver copies it as it is."""
    if copy.is_contiguous() or copy.stride() != source.stride():
        return copy, source
    row = (copy.numel(),), (1,)
    return copy.as_strided(*row, copy.storage_offset()), source.as_strided(*row, source.storage_offset())


def _marked_like(source: Tensor, copy: Tensor) -> Tensor:
    """``copy``, still to be made, as lazily conjugated or negated as ``source``, so that only bytes are to be copied.
    Where marks differ, torch would change the values on the host as soon as the copy is issued, before they arrive."""
    if source.is_conj():
        copy = copy.conj()
    return torch._neg_view(copy) if source.is_neg() else copy


def _like(source: Tensor, parts: list[Tensor]) -> Tensor:
    """A tensor of the layout of ``source`` made of dense ones."""
    if source.layout is not torch.sparse_coo:
        return parts[0]
    indices, values = parts
    made: Tensor = torch.sparse_coo_tensor(
        indices, values, source.shape, check_invariants=False, is_coalesced=source.is_coalesced()
    )
    return made
