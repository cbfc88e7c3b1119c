"""Activations between the workers: what waits on the host, and what a micro-batch brings along.

[Note: offloaded activations]
Between two workers an activation goes through the host: down from the one that made it, up to the one that needs it.
The copy on the host is at the same time what a recomputation needs later, so it is made once. It is made from a
snapshot on the device: user code may change the tensor itself (``x += position``) before the lane has read it. What a
micro-batch needs next is fetched before its turn has come, while the one before it computes, if there is room.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..common.fingerprints import UNKNOWN, version_of
from ..common.sizes import num_bytes_of
from .devices import Device
from .memory import Ahead
from .transfer import Done, Edge, Transfer


class Offloaded:
    """A tensor that waits on the host, or is on its way there."""

    __slots__ = ("__weakref__", "num_bytes", "shape", "transfer")

    def __init__(self, transfer: Transfer, shape: torch.Size) -> None:
        self.transfer = transfer
        self.shape = shape
        self.num_bytes = num_bytes_of(transfer.tensors)

    def on_host(self) -> Tensor:
        """The copy, for a device that shares the host's memory."""
        (tensor,) = self.transfer.wait(Edge.OFFLOADED)
        return tensor if tensor.shape == self.shape else tensor.expand(self.shape)


class SavedInputs:
    """Host copies of tensors that one micro-batch needs again: to recompute a call, or on another worker.

    Copies, because user code may change the original later (``x += position``), which would give wrong gradients
    without an error. A tensor that goes to several calls unchanged (attention masks, rotary tables) is copied once.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], int, weakref.ref[Offloaded]]] = {}
        self.num_bytes = 0

    def save(self, tensor: Tensor, device: Device | None, what: str) -> Offloaded:
        """``tensor`` as it is now.

        Args:
            device: the worker that has it; None if it is on the host.
            what: it is, for the trace.
        """
        version = version_of(tensor)
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == version and (saved := known[2]()) is not None:
            return saved
        saved = _offload(tensor, device, what)
        self.num_bytes += saved.num_bytes
        self._known[id(tensor)] = (weakref.ref(tensor), version, weakref.ref(saved))
        return saved

    def clear(self) -> None:
        """Forgets which tensors were saved."""
        self._known.clear()


def _offload(tensor: Tensor, device: Device | None, what: str) -> Offloaded:
    narrow = tensor.detach()
    if tensor.layout is torch.strided and 0 in tensor.stride():
        for dim, stride in enumerate(tensor.stride()):
            if stride == 0 and tensor.shape[dim] > 1:
                narrow = narrow.narrow(dim, 0, 1)
    if device is None or device.aliases_host:  # it stays on the host: nothing travels
        return Offloaded(Done([narrow.to("cpu", copy=True)]), tensor.shape)
    num_bytes = num_bytes_of([narrow])
    if device.counts_activations and not device.memory.try_reserve("activations", num_bytes):
        transfer = device.download([narrow], what)  # no room for a snapshot: nobody must touch it meanwhile
        transfer.await_done()
        return Offloaded(transfer, tensor.shape)
    snapshot = device.snapshot(narrow)
    transfer = device.download([snapshot], what)
    passing = device.free([snapshot], after=transfer)
    if device.counts_activations:
        device.memory.release("activations", num_bytes, passing)
    return Offloaded(transfer, tensor.shape)


class _Arrival(NamedTuple):
    """A tensor on its way to a worker.

    Attributes:
        origin: gives what it was made of, or None if that is gone.
        version: of the origin.
        transfer: the upload.
        shape: of the tensor; dimensions that are expanded do not travel.
        booked: bytes on the books of the worker.
        ahead: set if they may have been lost meanwhile.
    """

    origin: Callable[[], Any]
    version: int
    transfer: Transfer
    shape: torch.Size
    booked: int
    ahead: Ahead | None


class TravellingActivations:
    """What one micro-batch has brought along to the worker that it visits; see [Note: offloaded activations].

    Args:
        saved: what of it is on the host.
        owners: GPU -> the worker that has it for itself.
    """

    def __init__(self, saved: SavedInputs, owners: Mapping[torch.device, Device]) -> None:
        self._saved = saved
        self._owners = owners
        self._arrivals: dict[int, _Arrival] = {}
        self._leaving: list[Offloaded] = []
        self._here: Device | None = None
        self._before: Device | None = None
        # Whether no unit has run here yet: what user code has made so far, it made where the micro-batch was before.
        self._is_new = True

    def go_to(self, device: Device) -> None:
        """The visit of the present worker ends, that of ``device`` begins."""
        self.drop()
        self._before, self._here = self._here, device
        self._is_new = True

    def settle(self) -> None:
        """A unit has run here: what user code makes from now on is made here."""
        self._is_new = False
        self._leaving.clear()
        # User code may change inference tensors before the next call, and nothing would tell: they are brought anew.
        self._drop([key for key, arrival in self._arrivals.items() if arrival.version == UNKNOWN])

    def drop(self, values: Iterable[Any] | None = None) -> None:
        """What was brought is not needed any more: what came of ``values``, or everything."""
        self._drop(list(self._arrivals) if values is None else map(id, values))

    def _drop(self, keys: Iterable[int]) -> None:
        for key in keys:
            arrival = self._arrivals.pop(key, None)
            if arrival is not None and arrival.booked and self._is_booked(arrival):
                assert self._here is not None
                self._here.memory.release("activations", arrival.booked)

    def clear(self) -> None:
        """The micro-batch is over."""
        self.drop()
        self._leaving.clear()

    @property
    def booked_bytes(self) -> int:
        """Bytes on the books of the worker."""
        return sum([arrival.booked for arrival in self._arrivals.values() if arrival.ahead is None])

    def _is_booked(self, arrival: _Arrival) -> bool:
        """Whether an arrival is on the books to stay; one that was lost is not."""
        assert self._here is not None
        return arrival.ahead is None or self._here.memory.claim(arrival.ahead)

    def save(self, tensor: Tensor, what: str) -> Offloaded:
        """``tensor``, an argument of a unit that runs here, as it is now; see :class:`SavedInputs`."""
        return self._saved.save(tensor, self.owner(tensor), what)

    def offload(self, values: Iterable[Any], what: str) -> None:
        """Sends tensors among ``values`` down to the host; for the end of a visit, before the worker goes on."""
        if self._here is not None and not self._here.aliases_host:
            self._leaving += [self.save(x, what) for x in values if isinstance(x, Tensor) and x.dim()]

    def send(self, values: Iterable[Any], what: str) -> None:
        """Starts to bring what ``values`` (tensors and :class:`Offloaded` among them) need, as far as there is room."""
        for value in values:
            if isinstance(value, (Tensor, Offloaded)) and not self._is_local(value) and self._found(value) is None:
                self._start(value, what, must=False)

    def receive(self, values: Sequence[Any], edge: Edge, what: str, *, keep_graph: bool = False) -> list[Any]:
        """``values`` on the worker, after a wait for what had to be brought; for the thread that holds its lane.

        Args:
            edge: which wait this is.
            what: they are, for the trace.
            keep_graph: whether copies are part of the autograd graph.
        """
        here = self._here
        assert here is not None
        if here.aliases_host:
            return [value.on_host() if isinstance(value, Offloaded) else value for value in values]
        # All on their way before the first wait.
        arrivals = [
            None if self._is_at_hand(x, keep_graph) else self._claimed(x) or self._bring(x, what) for x in values
        ]
        received = list(values)
        for i, arrival in enumerate(arrivals):
            if arrival is not None:
                (tensor,) = arrival.transfer.wait(edge)
                received[i] = tensor if tensor.shape == arrival.shape else tensor.expand(arrival.shape)
            elif keep_graph and isinstance(values[i], Tensor) and not self._is_local(values[i]):
                received[i] = values[i].to(here.torch_device, copy=True)
        return received

    def _is_at_hand(self, value: Any, keep_graph: bool) -> bool:
        if not isinstance(value, (Tensor, Offloaded)) or self._is_local(value):
            return True
        return keep_graph and isinstance(value, Tensor) and value.requires_grad

    def _is_local(self, value: Tensor | Offloaded) -> bool:
        here = self._here
        assert here is not None
        if here.aliases_host:
            return True
        if isinstance(value, Offloaded) or value.device != here.torch_device:
            return False
        return not (here.is_shared and self._is_new)

    def owner(self, tensor: Tensor) -> Device | None:
        """The worker that has ``tensor``; None if it is on the host."""
        if (owner := self._owners.get(tensor.device)) is not None:
            return owner
        visited = self._before if self._is_new else self._here
        return visited if visited is not None and tensor.device == visited.torch_device else None

    def _found(self, value: Tensor | Offloaded) -> _Arrival | None:
        arrival = self._arrivals.get(id(value))
        if arrival is None:
            return None
        if arrival.origin() is value and (isinstance(value, Offloaded) or arrival.version == version_of(value)):
            return arrival
        self.drop([value])
        return None

    def _claimed(self, value: Tensor | Offloaded) -> _Arrival | None:
        """What was sent for, if it has not been lost."""
        arrival = self._found(value)
        if arrival is None or arrival.ahead is None:
            return arrival
        del self._arrivals[id(value)]
        if not self._is_booked(arrival):
            return None
        arrival = self._arrivals[id(value)] = arrival._replace(ahead=None)
        return arrival

    def _bring(self, value: Tensor | Offloaded, what: str) -> _Arrival:
        arrival = self._start(value, what, must=True)
        assert arrival is not None
        return arrival

    def _start(self, value: Tensor | Offloaded, what: str, *, must: bool) -> _Arrival | None:
        here = self._here
        assert here is not None
        origin: Callable[[], Any]
        if isinstance(value, Offloaded):
            offloaded, version = value, 0
            origin = functools.partial(_itself, value)  # kept: its id must stay its own
        else:
            origin, version = weakref.ref(value), version_of(value)
            owner = self.owner(value)
            offloaded = Offloaded(Done([value.detach()]), value.shape) if owner is None else self.save(value, what)
        source = offloaded.transfer
        booked = num_bytes_of(source.tensors) if here.counts_activations else 0
        ahead = None
        if must:
            here.memory.reserve("activations", booked)
        elif booked and (ahead := here.memory.reserve_ahead(booked)) is None:
            return None
        transfer = here.upload(source.tensors, what, after=source)
        if ahead is not None:
            here.memory.offer(ahead, transfer)
        arrival = self._arrivals[id(value)] = _Arrival(origin, version, transfer, offloaded.shape, booked, ahead)
        return arrival


def _itself(value: Any) -> Any:
    return value
