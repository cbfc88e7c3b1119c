"""Activations between devices: what waits on the host, and what a micro-batch brings along.

[Note: offloaded activations]
Between two devices an activation goes through the host: down from the device that made it, up to the one that needs it.
The copy on the host is at the same time what a recomputation needs later, so it is made once:

    device 0    unit a -> y -> snapshot
                                  | d2h
    host                     copy of y . . . . . . . . . . kept for the recomputation
                                  | h2d                        | h2d
    device 1               y -> unit b                  y -> unit b again, and its backward

It is made from a snapshot on the device, because user code may change the tensor itself (``x += position``) before the
lane has read it. What a micro-batch needs next is fetched before its turn has come, while the one before it computes,
if there is room.

Everything here belongs to one micro-batch, and is used by its thread; :meth:`TravellingActivations.start` also by those
of autograd, in a backward of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..common.fingerprints import UNKNOWN, version_of
from ..common.sizes import num_bytes_of
from .device import Device
from .transfer import Done, Edge, Transfer

# Kernels load up to so many bytes of a tensor at once, if it begins at a multiple of them, as memory of its own does.
_ALIGNMENT = 16


class Offloaded:
    """A tensor that waits on the host, or is on its way there."""

    __slots__ = ("__weakref__", "num_bytes", "shape", "transfer")

    def __init__(self, transfer: Transfer, shape: torch.Size) -> None:
        self.transfer = transfer
        self.shape = shape
        self.num_bytes = num_bytes_of(transfer.tensors)

    def on_host(self) -> Tensor:
        """The copy, for a device that shares the host's memory."""
        (tensor,) = self.transfer.tensors  # nothing travels there
        return _expanded(tensor, self.shape)


def _expanded(tensor: Tensor, shape: torch.Size) -> Tensor:
    return tensor if tensor.shape == shape else tensor.expand(shape)


def _narrowed(tensor: Tensor) -> Tensor:
    """Without what is expanded: what :func:`_expanded` makes it of."""
    if tensor.layout is torch.strided and 0 in tensor.stride():
        for dim, stride in enumerate(tensor.stride()):
            if stride == 0 and tensor.shape[dim] > 1:
                tensor = tensor.narrow(dim, 0, 1)
    return tensor


def as_reloaded(values: Sequence[Any]) -> list[Any]:
    """``values``, tensors on a device among them, laid out as they will be when they come back from the host.

    Kernels on GPUs choose their order of work by strides and alignment, and the order decides which random number
    meets which element. Dense and expanded tensors come back as they are; others are copied here, as they would be.
    """
    made: dict[int, Tensor] = {}
    for x in values:
        if not isinstance(x, Tensor) or x.layout is not torch.strided or id(x) in made:
            continue
        is_aligned = x.storage_offset() * x.element_size() % _ALIGNMENT == 0
        if is_aligned and x.is_contiguous():
            continue
        narrow = _narrowed(x)
        if not is_aligned or torch.empty_like(narrow, device="meta").stride() != narrow.stride():
            made[id(x)] = _expanded(narrow.clone(), x.shape)
    return [made.get(id(x), x) for x in values] if made else list(values)


def _offload(tensor: Tensor, device: Device | None, what: str, here: Device | None) -> Offloaded:
    """A copy of ``tensor``, which is on ``device`` or (None) on the host, and is needed ``here``."""
    narrow = _narrowed(tensor.detach())
    if device is None or device.aliases_host:  # it stays on the host: nothing travels
        return Offloaded(Done([narrow.clone()]) if here is None else here.keep(narrow), tensor.shape)
    counts, num_bytes = device.counts_activations, num_bytes_of([narrow])
    has_room = not counts or device.memory.try_reserve("activations", num_bytes)
    snapshot = device.snapshot(narrow) if has_room else None
    if snapshot is None:
        if has_room and counts:
            device.memory.release("activations", num_bytes)
        transfer = device.download([narrow], what)  # no room for a snapshot: user code must not go on meanwhile
        transfer.await_done()
        return Offloaded(transfer, tensor.shape)
    transfer = device.download([snapshot], what)
    passing = device.free([snapshot], after=transfer)
    if counts:
        device.memory.release("activations", num_bytes, passing)
    return Offloaded(transfer, tensor.shape)


@dataclass(slots=True, eq=False)
class _Arrival:
    """A tensor on its way to a device.

    Attributes:
        origin: gives what it was made of, or None if that is gone.
        version: of the origin.
        transfer: the upload.
        shape: of the tensor; dimensions that are expanded do not travel.
        booked: bytes on the books of the device.
    """

    origin: Callable[[], Any]
    version: int
    transfer: Transfer
    shape: torch.Size
    booked: int


class TravellingActivations:
    """What one micro-batch has on the host, to recompute a call or for another device, and what it has brought along to
    the device that it is on; see [Note: offloaded activations].

    Args:
        owners: GPU -> the device that has it for itself.
        gpus: GPU -> one of its devices.

    Attributes:
        saved_bytes: that it has put on the host.
    """

    def __init__(self, owners: Mapping[torch.device, Device], gpus: Mapping[torch.device, Device]) -> None:
        self.saved_bytes = 0
        self._saved: dict[int, tuple[weakref.ref[Tensor], int, weakref.ref[Offloaded]]] = {}
        self._owners = owners
        self._gpus = gpus
        self._arrivals: dict[int, _Arrival] = {}
        self._leaving: list[Offloaded] = []
        self._here: Device | None = None
        self._before: Device | None = None
        # Whether no unit has run here yet: what user code has made so far, it made where the micro-batch was before.
        self._is_new = True

    def go_to(self, device: Device) -> None:
        """The micro-batch goes from the present device to ``device``."""
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
            if arrival is not None and arrival.booked:
                self._device.memory.release("activations", arrival.booked)

    def clear(self) -> None:
        """The micro-batch has ended."""
        self.drop()
        self._leaving.clear()
        self._saved.clear()

    @property
    def booked_bytes(self) -> int:
        """Bytes on the books of the device."""
        return sum([arrival.booked for arrival in self._arrivals.values()])

    @property
    def _device(self) -> Device:
        assert self._here is not None
        return self._here

    def save(self, tensor: Tensor, what: str) -> Offloaded:
        """A copy of ``tensor``, an argument of a unit that runs here, on the host: as it is now, because user code may
        change it later. What goes to several calls unchanged (attention masks, rotary tables) is copied once."""
        version = version_of(tensor)
        known = self._saved.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == version and (saved := known[2]()) is not None:
            return saved
        saved = _offload(tensor, self.owner(tensor), what, self._here)
        self.saved_bytes += saved.num_bytes
        self._saved[id(tensor)] = (weakref.ref(tensor), version, weakref.ref(saved))
        return saved

    def offload(self, values: Iterable[Any], what: str) -> None:
        """Sends tensors among ``values`` down to the host, before the micro-batch leaves and the device goes on."""
        if self._here is not None and not self._here.aliases_host:
            self._leaving += [self.save(x, what) for x in values if isinstance(x, Tensor) and x.dim()]

    def send(self, values: Iterable[Any], what: str) -> None:
        """Starts to bring what ``values`` (tensors and :class:`Offloaded` among them) need, where there is room for
        what comes early: see [Note: device memory] in :mod:`devices.memory`."""
        for value in values:
            if isinstance(value, (Tensor, Offloaded)) and not self._is_local(value) and self._found(value) is None:
                self._start(value, what, ahead=True)

    @property
    def here(self) -> torch.device:
        """The device of torch that the micro-batch is on."""
        return self._device.torch_device

    def receive(self, values: Sequence[Any], edge: Edge, what: str) -> list[Any]:
        """``values`` on the device, after a wait for what had to be brought.

        Args:
            edge: which wait this is.
            what: they are, for the trace.
        """
        here = self._device
        if here.aliases_host:
            return [value.on_host() if isinstance(value, Offloaded) else value for value in values]
        received = list(values)
        arrivals: list[tuple[int, _Arrival]] = []  # all on their way before the first wait
        for i, value in enumerate(values):
            if not isinstance(value, (Tensor, Offloaded)) or self._is_local(value):
                continue
            if (arrival := self._found(value) or self._start(value, what)) is not None:
                arrivals.append((i, arrival))
        for i, arrival in arrivals:
            (tensor,) = arrival.transfer.wait(edge)
            received[i] = _expanded(tensor, arrival.shape)
        return received

    def _is_local(self, value: Tensor | Offloaded) -> bool:
        here = self._device
        if here.aliases_host:
            return True
        if isinstance(value, Offloaded) or value.device != here.torch_device:
            return False
        return not (here.is_shared and self._is_new)

    def owner(self, tensor: Tensor) -> Device | None:
        """Where ``tensor`` is; None if it is on the host."""
        if (owner := self._owners.get(tensor.device)) is not None:
            return owner
        made_at = self._before if self._is_new else self._here
        if made_at is not None and tensor.device == made_at.torch_device:
            return made_at
        return self._gpus.get(tensor.device)

    def reaches(self, *devices: torch.device) -> bool:
        """Whether these are the host, or devices of the pool."""
        return all([device.type == "cpu" or device in self._gpus for device in devices])

    def start(self, tensor: Tensor, target: torch.device, what: str, *, may_change: bool = False) -> Transfer:
        """Starts to bring ``tensor``, as it is now, to ``target``, which is another device, or the host.

        Args:
            may_change: whether it may be written before it has been read.
        """
        source, owner = tensor.detach(), self.owner(tensor)
        if owner is None:
            return self._at(target).upload([source], what)
        if target.type == "cpu":
            return owner.download([source], what)
        snapshot = owner.snapshot(source) if may_change else source
        download = owner.download([source if snapshot is None else snapshot], what)
        if snapshot is None:  # no room for one
            download.await_done()
        return self._at(target).upload(download.tensors, what, after=download)

    def _at(self, target: torch.device) -> Device:
        here = self._here
        return here if here is not None and here.torch_device == target else self._gpus[target]

    def _found(self, value: Tensor | Offloaded) -> _Arrival | None:
        arrival = self._arrivals.get(id(value))
        if arrival is None:
            return None
        if arrival.origin() is value and (isinstance(value, Offloaded) or arrival.version == version_of(value)):
            return arrival
        self.drop([value])
        return None

    def _start(self, value: Tensor | Offloaded, what: str, *, ahead: bool = False) -> _Arrival | None:
        """Starts to bring ``value``; None if it is brought ahead of its time and there is no room for that."""
        here, origin = self._device, weakref.ref(value)
        if isinstance(value, Offloaded):
            offloaded, version = value, 0
        else:
            version, owner = version_of(value), self.owner(value)
            offloaded = Offloaded(Done([value.detach()]), value.shape) if owner is None else self.save(value, what)
        source = offloaded.transfer
        booked = num_bytes_of(source.tensors) if here.counts_activations else 0
        if not ahead:
            here.memory.reserve("activations", booked)
        elif booked and (here.memory.limit is not None or not here.memory.try_reserve("activations", booked)):
            return None  # under a limit it would take the room of what is needed first
        try:
            transfer = here.upload(source.tensors, what, after=source, must=not ahead)
        except torch.OutOfMemoryError:
            here.memory.release("activations", booked)
            if not ahead:
                raise
            return None
        arrival = _Arrival(origin, version, transfer, offloaded.shape, booked)
        self._arrivals[id(value)] = arrival
        return arrival
