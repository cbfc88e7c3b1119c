"""Device copies of parameters that user code uses by itself.

[Note: raw parameters]
``F.linear(h, self.lm_head.weight)`` in ``training_step`` needs on a GPU what lives on the host, in every micro-batch.
The first such use on a device uploads the parameter; the uses after it, of all micro-batches, share the copy::

    master (host) --upload--> copy --> use by micro-batch 0, 1, 2, ...
    gradients at home <------ sum  <-- their gradients, once, when the copy is given up

In the graph each use is a node of its own that leads to the master. Gradients of a large parameter are added up on the
device, as those of units are; so the last bits depend on which uses were on which device. Those of a small one are put
aside for each use, go home when the backward of the micro-batch ends, and are added up there in the order of the uses
(see [Note: loose parameters] in :mod:`usercode.loose_gradients`): which use was on which device leaves no trace. In a
backward that the *user* runs any gradient goes to the master at once.

User code may change masters, also through ``weight.data``, as teachers are updated. What is changed is known by its
memory; copies on devices, those of units included, are made anew before they are used again.

A copy is given up when a stage run of its device ends, no graph leads through it and no view of it is left: the weight
of a head after the fused stage, that of a position embedding when its micro-batches have been through their backward. A
master that was changed in place since the upload is uploaded anew.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..common.fingerprints import UNKNOWN, version_of
from ..common.graphs import EngineFunction
from ..common.sizes import num_bytes_of
from ..common.trees import leaves_of
from ..devices.device import Device
from ..devices.transfer import CHUNK_BYTES, Edge, Transfer
from ..weights.futures import unwaited
from ..weights.gradients import GradientStore
from .lock import UserCodeState
from .loose_gradients import LooseGradients

# Parameters from this size on have the sum of their gradients on the device.
LARGE_BYTES = 2**20


def may_wait(state: UserCodeState, gradients: LooseGradients) -> bool:
    """Whether user code of a micro-batch may give up the user-code lock, and wait for a device.

    A hook on a submodule of a unit runs with the compute lane held, a recomputation between units inside a walk of
    autograd: neither may wait for the device or let other user code in.
    """
    return state.lock is not None and state.call_unit is not None and not gradients.is_walking


def parameter_of(tensor: Tensor) -> nn.Parameter | None:
    """The parameter on the host that ``tensor`` is, or is a view of."""
    base = tensor if isinstance(tensor, nn.Parameter) else tensor._base if tensor._is_view() else None
    return base if type(base) is nn.Parameter and base.device.type == "cpu" else None


def _memory_of(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr() or -1
    except (NotImplementedError, RuntimeError):  # it has none: in a function transform, or of a class of the user's
        return -1


class _Lease:
    """A graph that leads through a copy holds one."""

    __slots__ = ("__weakref__",)


class _Copy:
    """A parameter on a device.

    Attributes:
        tensor: the copy.
        version: of the master when the copy was made.
        upload: which made it.
        has_sum: whether gradients are added up on the device.
        gradient: the sum of what has arrived; None before the first.
        num_bytes: booked as weights.
        gradient_bytes: booked as gradients.
    """

    def __init__(self, master: nn.Parameter, device: Device, upload: Transfer) -> None:
        self.master = master
        self.device = device
        self.upload = upload
        (self.tensor,) = upload.tensors
        self.version = version_of(master)
        self.num_bytes = num_bytes_of([self.tensor])
        self.has_sum = self.num_bytes >= LARGE_BYTES
        self.gradient: Tensor | None = None
        self.gradient_bytes = 0
        self._leases: weakref.WeakSet[_Lease] = weakref.WeakSet()
        self._lock = threading.Lock()

    def lease(self) -> _Lease:
        lease = _Lease()
        self._leases.add(lease)
        return lease

    @property
    def lacks_room_for_sum(self) -> bool:
        return self.has_sum and not self.gradient_bytes

    @property
    def is_in_use(self) -> bool:
        return len(self._leases) > 0

    def add_gradient(self, gradient: Tensor) -> None:
        """Called by autograd, on a thread of its own on GPUs."""
        with self._lock:
            if self.gradient is None:
                self.gradient = gradient.clone()  # autograd may hold the same tensor elsewhere
            else:
                self.gradient.add_(gradient)


class _Use(EngineFunction):
    """A use of a device copy; where its gradient goes: see [Note: raw parameters]."""

    @staticmethod
    def forward(ctx: Any, master: nn.Parameter, copy: _Copy, lease: _Lease, gradients: LooseGradients) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.copy, ctx.lease, ctx.gradients, ctx.use = copy, lease, gradients, gradients.begin_use()
        return copy.tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        (gradient,) = gradients
        copy: _Copy = ctx.copy
        if gradient is None:
            return None, None, None, None
        if not ctx.gradients.is_walking:
            return gradient.to(copy.master.device), None, None, None
        if copy.has_sum and gradient.layout is torch.strided:
            copy.add_gradient(gradient)
        else:
            ctx.gradients.put_aside(ctx.use, copy.master, copy.device, gradient)
        return None, None, None, None


class LooseParameters:
    """The device copies of one step; see [Note: raw parameters].

    Args:
        gradients: where the sums go.
        masters: gives those that user code may write.
        on_written: is told which it has written.
    """

    def __init__(
        self,
        gradients: GradientStore,
        masters: Callable[[], Iterable[nn.Parameter]] = tuple,
        on_written: Callable[[Sequence[nn.Parameter]], None] = lambda masters: None,
    ) -> None:
        self._gradients = gradients
        self._masters, self._on_written = masters, on_written
        self._by_memory: dict[int, list[nn.Parameter]] | None = None
        self._lock = threading.Lock()  # of the next two; never held during a wait
        self._copies: list[_Copy] = []
        self._newest: dict[tuple[int, int], _Copy] = {}
        self._num_sent: dict[int, int] = {}  # downloads of sums, by device

    def use(
        self,
        master: nn.Parameter,
        device: Device,
        state: UserCodeState | None,
        gradients: LooseGradients,
        *,
        tracks: bool,
    ) -> Tensor | None:
        """``master`` on ``device``; None if it is not there, and the calling thread must not wait for it.

        Called by user code, which gives up the user-code lock if there is something to upload: it waits for the device.

        Args:
            state: of the micro-batch; None on a thread that is not a micro-batch's, which uses what is there.
            gradients: of the micro-batch.
            tracks: whether the result is part of the graph.
        """
        found = self._find(master, device, tracks)
        if found is None and state is not None and may_wait(state, gradients):
            assert state.lock is not None
            with state.lock.released(state), device.occupied():
                self._make(master, device, tracks)
            found = self._find(master, device, tracks)
        if found is None:
            return None
        copy, lease = found
        if not tracks:
            # What keeps this tensor keeps the lease: a graph of a frozen one, or a view (``position.expand_as(h)``).
            given: Any = copy.tensor.detach()
            given._lease = lease
            return cast(Tensor, given)
        return cast(Tensor, _Use.apply(master, copy, lease, gradients))

    def _find(self, master: nn.Parameter, device: Device, tracks: bool) -> tuple[_Copy, _Lease] | None:
        """A copy that is right, with a lease that keeps it from being given up."""
        with self._lock:
            copy = self._newest.get((id(master), device.index))
            if copy is None or copy.version != version_of(master) or (tracks and copy.lacks_room_for_sum):
                return None
            return copy, copy.lease()

    def _make(self, master: nn.Parameter, device: Device, tracks: bool) -> None:
        """Uploads ``master``, unless another micro-batch has done so meanwhile; the calling thread occupies the device.

        Raises:
            DeviceOutOfMemoryError: if there is no room for it and its gradient.
        """
        key = (id(master), device.index)
        copy = self._newest.get(key)
        if copy is None or copy.version != version_of(master):
            num_bytes = num_bytes_of([master])
            device.memory.reserve("weights", num_bytes)
            try:
                upload = device.upload(
                    [master.detach()], "parameter in user code", is_bulk=num_bytes > CHUNK_BYTES, must=True
                )
            except BaseException:
                device.memory.release("weights", num_bytes)
                raise
            copy = _Copy(master, device, upload)
            with self._lock:  # an older copy stays until its graphs are gone
                self._copies.append(copy)
            upload.wait(Edge.WEIGHTS)
            with self._lock:  # not before: other micro-batches use what they find here without a wait
                self._newest[key] = copy
        if tracks and copy.lacks_room_for_sum:
            device.memory.reserve("gradients", copy.num_bytes)
            copy.gradient_bytes = copy.num_bytes

    def writing(self, function: Callable[..., Any], target: Any) -> Callable[..., Any]:
        """``function``, which changes ``target`` in place. If that is the memory of masters, they have another version
        afterwards: ``weight.data`` has one of its own."""
        masters = [master for x in leaves_of(target) if isinstance(x, Tensor) for master in self._masters_of(x)]
        if not masters:
            return function
        self.before_write(masters)
        versions = [version_of(master) for master in masters]

        def write(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            hidden = [m for m, version in zip(masters, versions, strict=True) if version_of(m) == version != UNKNOWN]
            torch.autograd.graph.increment_version(hidden)
            if any(_memory_of(master) not in (self._by_memory or ()) for master in masters):  # it has got other memory
                self._by_memory = None
            self._on_written(masters)
            return result

        return write

    def before_write(self, masters: list[nn.Parameter]) -> None:
        """They are about to be changed in place: no upload may still be reading them."""
        with self._lock:
            copies = [copy for copy in self._copies if any(copy.master is master for master in masters)]
        for copy in copies:
            copy.upload.await_done()

    def _masters_of(self, tensor: Tensor) -> list[nn.Parameter]:
        """Parameters on the host that have the memory of ``tensor``."""
        if tensor.device.type != "cpu":
            return []
        if (parameter := parameter_of(tensor)) is not None:
            return [parameter]
        if self._by_memory is None:
            self._by_memory = {}
            with unwaited():
                for master in self._masters():
                    if master.device.type == "cpu" and not is_lazy(master):
                        self._by_memory.setdefault(_memory_of(master), []).append(master)
        memory = _memory_of(tensor)
        return self._by_memory.get(memory, []) if memory > 0 else []

    def end_stage_run(self, device: Device) -> None:
        """A stage run of ``device`` has ended: gives up the copies that no graph leads through any more."""
        if any(copy.device is device for copy in self._copies):
            with device.occupied():
                self._give_up(device)

    def send_sums(self) -> None:
        """All micro-batches stand still: gradients go home; copies that graphs lead through stay."""
        for device in dict.fromkeys(copy.device for copy in self._copies):
            with device.occupied():
                self._give_up(device)
                held = [copy for copy in self._copies if copy.device is device]
                if (download := self._send_gradients(device, held)) is not None:
                    download.await_done()
                    device.free([copy.gradient for copy in held if copy.gradient is not None])
                for copy in held:
                    copy.gradient = None

    def drop(self) -> None:
        """The step has ended, well or not: nothing stays on the books, gradients that are still here are lost."""
        for copy in self._take(lambda copy: True):
            copy.device.memory.release("weights", copy.num_bytes)
            copy.device.memory.release("gradients", copy.gradient_bytes)
            copy.gradient = None

    def _take(self, which: Callable[[_Copy], bool]) -> list[_Copy]:
        """Copies that no use finds any more."""
        with self._lock:
            taken = [copy for copy in self._copies if which(copy)]
            self._copies = [copy for copy in self._copies if copy not in taken]
            self._newest = {key: copy for key, copy in self._newest.items() if copy not in taken}
        return taken

    def _give_up(self, device: Device) -> None:
        """Sends the gradients of copies on ``device`` home that no graph leads through, and frees what is there; the
        calling thread occupies it."""
        copies = self._take(lambda copy: copy.device is device and not copy.is_in_use)
        download = self._send_gradients(device, copies)
        for copy in copies:
            passing = device.free([copy.tensor])
            device.memory.release("weights", copy.num_bytes, passing)
            if copy.gradient_bytes:
                passing = None if copy.gradient is None else device.free([copy.gradient], after=download)
                device.memory.release("gradients", copy.gradient_bytes, passing)
            copy.gradient = None

    def _send_gradients(self, device: Device, copies: list[_Copy]) -> Transfer | None:
        held = [(copy.master, copy.gradient) for copy in copies if copy.gradient is not None]
        if not held:
            return None
        sums = [gradient for _, gradient in held]
        download = device.download(sums, "gradients in user code", is_bulk=num_bytes_of(sums) > CHUNK_BYTES)
        ordinal = self._num_sent.get(device.index, 0)
        self._num_sent[device.index] = ordinal + 1
        self._gradients.add_later([master for master, _ in held], download, (-1, device.index), ordinal)
        return download
