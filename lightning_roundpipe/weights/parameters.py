"""Host masters, and the copies of units that run on devices.

[Note: weights and gradients]
The user's parameters are the *master weights*; they never leave the host and their ``.grad`` is not touched while a
step runs. A unit computes on a *replica*: a shallow structural copy of its module tree whose parameters are fresh
leaves. On a device that shares the host's memory the leaves alias the masters; elsewhere they are device copies, which
come and go as :mod:`weights.placement` decides. Gradients of all micro-batches of a stage add up in the leaves'
``.grad`` and go home (:mod:`weights.gradients`) when the stage's last micro-batch leaves. A unit that has a low form
(see [Note: working copies] in :mod:`weights.low_precision`) has a replica of each form; in the low one, gradients are
added up in the masters' dtype beside the leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule

from ..common.attributes import assign
from ..common.sizes import num_bytes_of
from ..devices.device import Device
from ..devices.transfer import Done, Edge, Transfer
from .attributes import KeptAttributes
from .buffers import ComingBuffers
from .compiled import compiled_as, wrapping
from .events import tell
from .futures import unwaited
from .gradients import sum_up
from .low_precision import WorkingCopies
from .units import Unit, Written, rebind

# What replaces the hook dictionaries of a submodule that carries forward hooks; see [Note: relays] in autograd.relays.
Relay = Callable[[nn.Module], dict[str, Any]]
_CALL = "_compiled_call_impl"
_PLAIN = frozenset({bool, int, float, str, type(None)})
Harvest = tuple[list[nn.Parameter], Transfer]  # masters, and their gradients on their way home


@dataclass(eq=False)
class _Copies:
    """Weights of a unit that have travelled together: they are on a device, or on their way there.

    Attributes:
        leaves: of the replica, one per weight.
        versions: of the masters, see :meth:`WorkingCopies.version`.
        upload: that brings them.
        num_bytes: booked for them.
        is_waited_for: whether the device has been told to wait for the upload, and the leaves hold what it brings.
    """

    leaves: list[nn.Parameter]
    versions: list[Hashable]
    upload: Transfer
    num_bytes: int
    is_waited_for: bool = False


class Replica:
    """A shallow structural copy of a unit; see [Note: weights and gradients].

    Attributes:
        module: the copy that runs.
        leaves: leaf parameter of the copy -> master weight.
        is_low: whether it has the low form of the unit.
        trained: which leaves require a gradient, by the last call of :meth:`switch`.
    """

    def __init__(
        self, unit: Unit, device: Device, relay: Relay, coming: ComingBuffers, *, is_low: bool = False
    ) -> None:
        self.unit = unit
        self._coming = coming
        self.is_low = is_low
        self._relay = relay
        self.device = device
        self._pairs: list[tuple[nn.Module, nn.Module]] = []
        self._copy_of: dict[int, nn.Module] = {}
        self._master_of: dict[int, nn.Module] = {}
        self._leaf_of: dict[int, nn.Parameter] = {}
        self.leaves: dict[nn.Parameter, nn.Parameter] = {}
        self.buffers: list[tuple[nn.Module, nn.Module, str]] = []
        self.is_active = False
        self.last_use = 0
        self.num_hooks = self.num_writes = 0
        self.kept = KeptAttributes(device)
        self._owns_buffers = False
        self._copies: list[_Copies] = []
        self._is_loading = False
        self._gradient_bytes = 0
        self._low_gradient_bytes = 0
        self._sums: dict[nn.Parameter, Tensor] = {}  # of gradients of low leaves
        self.trained: tuple[bool, ...] = ()
        for module in unit.members:
            copy = module.__new__(type(module))
            self._pairs.append((module, copy))
            self._copy_of[id(module)] = copy
            self._master_of[id(copy)] = module
        self.module = self._copy_of[id(unit.module)]
        self._structure = [_structure_of(module) for module, _ in self._pairs]
        self._copied: list[list[Any] | None] = [None for _ in self._pairs]  # of `unit.seen`
        for master in unit.parameters():
            leaf = self._leaf_for(master)
            self._leaf_of[id(master)] = leaf
            self.leaves[leaf] = master

    def _leaf_for(self, master: nn.Parameter) -> nn.Parameter:
        """A leaf that has the master's memory, where devices share it, and else none yet: only its count of versions,
        which shows writes of the unit."""
        with unwaited(), torch.inference_mode(False):
            leaf = nn.Parameter(master.detach(), requires_grad=master.requires_grad)
            if not self.device.aliases_host:
                leaf.data = torch.empty(0, dtype=leaf.dtype)
        return leaf

    def copy_of(self, module: nn.Module) -> nn.Module | None:
        """The copy of a master module, or None if it does not belong to this unit."""
        return self._copy_of.get(id(module))

    def master_of(self, copy: nn.Module) -> nn.Module | None:
        """The master of one of this replica's modules."""
        return self._master_of.get(id(copy))

    def refresh(self, baseline: Callable[[], Iterable[Written]]) -> bool:
        """Takes over what has changed on the masters, as far as the unit has been looked at: attributes, flags, hooks.

        User code of micro-batches may write attributes meanwhile; ``baseline``, asked last, tells them apart.

        Returns:
            Whether modules and parameters of the unit are still the objects that were copied. If not, this replica is
            of no use any more.
        """
        seen = list(self.unit.seen)
        changed = [i for i, now in enumerate(seen) if now is not self._copied[i]]
        if any([_structure_of(self._pairs[i][0]) != self._structure[i] for i in changed]):
            return False
        self.kept.drop()
        for i in changed:
            self._copied[i] = seen[i]
            self._copy_state(*self._pairs[i])
        if changed:
            own = [(*pair, name, b) for pair in self._pairs for name, b in pair[0]._buffers.items()]
            self.buffers = [(master, copy, name) for master, copy, name, b in own if b is not None]
        for module, name, value in baseline():
            if (copied := self.copy_of(module)) is not None:
                assign(copied, name, value)
                self._copied[self.unit.places[id(module)]] = None  # it has values of a micro-batch besides
        self.kept.look(self._pairs)
        return True

    def switch(self, trained: tuple[bool, ...]) -> None:
        """Lets these parameters require gradients; calls, also of several micro-batches, may differ in it."""
        self.trained = trained
        for leaf, flag in zip(self.leaves, trained, strict=True):
            if leaf.requires_grad is not flag:
                Tensor.requires_grad_(leaf, flag)  # unnoticed: see [Note: attribute writes]

    def _copy_state(self, master: nn.Module, copy: nn.Module) -> None:
        state = copy.__dict__
        state.clear()
        for name, value in list(master.__dict__.items()):  # a list: user code writes attributes meanwhile
            state[name] = value if type(value) in _PLAIN else rebind(value, self._copy_of, self._leaf_of)
        state.pop("forward", None)
        own_forward = _own_forward(master)
        if own_forward is not None:
            state["forward"] = rebind(own_forward, self._copy_of, self._leaf_of)
        state["_parameters"] = {
            name: None if p is None else self._leaf_of[id(p)] for name, p in master._parameters.items()
        }
        try:
            state["_modules"] = {n: None if m is None else self._copy_of[id(m)] for n, m in master._modules.items()}
        except KeyError:
            raise RuntimeError(
                f"a module in a {type(master).__name__} of the unit {self.unit.name!r} was replaced in the middle of a "
                "step: replace modules before the run, or in on_train_batch_start"
            ) from None
        state["_buffers"] = dict(master._buffers)
        if (compiled := state.pop(_CALL, None)) is not None:
            # Around the unit itself the call is user code.
            name, function = ("forward", copy.forward) if master is self.unit.module else (_CALL, copy._call_impl)
            if (made := compiled_as(compiled, function)) is not None:
                state[name] = made
        if isinstance(master, OptimizedModule):
            state["forward"] = wrapping(master, self._copy_of[id(master._orig_mod)])
        if master is not self.unit.module and master._forward_hooks:
            state.update(self._relay(master))

    # --- weights on the device -----------------------------------------------------------------------------------

    @property
    def is_loaded(self) -> bool:
        """Whether all weights are on the device, or on their way."""
        return sum(len(copies.leaves) for copies in self._copies) == len(self.leaves)

    @property
    def is_evictable(self) -> bool:
        """Whether it takes memory that is not in use at the moment."""
        return bool(self._copies) and not self.is_active and not self._is_loading

    def _wanted(self, weights: WorkingCopies, leaf: nn.Parameter) -> tuple[nn.Parameter, torch.dtype]:
        """The master of ``leaf``, and in which dtype it is to be on the device."""
        master = self.leaves[leaf]
        return master, weights.dtype_of(self.unit, master) if self.is_low else master.dtype

    def load(self, weights: WorkingCopies, *, must: bool) -> bool:
        """Starts the upload of the weights that are missing, on a device that has copies; whether there was room.

        Args:
            must: whether to make room for them; then there was.

        Raises:
            DeviceOutOfMemoryError: if they must be there and cannot.
            torch.OutOfMemoryError: if the books have room for them, and the allocator has none.
        """
        there = {leaf for copies in self._copies for leaf in copies.leaves}
        missing = [leaf for leaf in self.leaves if leaf not in there]
        num_bytes = sum(m.numel() * dtype.itemsize for m, dtype in (self._wanted(weights, leaf) for leaf in missing))
        self._is_loading = True  # what makes room leaves it alone
        try:
            if must:
                self.device.memory.reserve("weights", num_bytes)
            elif not self.device.memory.try_reserve("weights", num_bytes, ahead=True):
                return False
            flags = {leaf: self.leaves[leaf].requires_grad for leaf in missing}  # once: user code may switch them
            try:
                for is_trained in (False, True):  # apart: frozen weights may stay when the others are given up
                    leaves = [leaf for leaf, flag in flags.items() if flag is is_trained]
                    if leaves:
                        num_bytes -= self._upload(leaves, weights, must=must)
            finally:
                self.device.memory.release("weights", num_bytes)  # of what did not come, because something was raised
        finally:
            self._is_loading = False
        return True

    def _upload(self, leaves: list[nn.Parameter], weights: WorkingCopies, *, must: bool) -> int:
        """Starts the upload of these, for which there is room; their bytes."""
        wanted = [self._wanted(weights, leaf) for leaf in leaves]
        versions = [weights.version(*one) for one in wanted]
        sources = [weights.source(*one) for one in wanted]
        upload = self.device.upload(sources, f"weights {self.unit.name}", is_bulk=True, must=must)
        tell("upload", [master for master, _ in wanted], self.unit.name, self, upload)
        self._copies.append(_Copies(leaves, versions, upload, num_bytes_of(sources)))
        return self._copies[-1].num_bytes

    def drop_stale(self, weights: WorkingCopies) -> None:
        """Frees copies of what the masters no longer are; while the replica is active see :meth:`renew`."""
        for copies in list(self._copies):
            if copies.versions != [weights.version(*self._wanted(weights, leaf)) for leaf in copies.leaves]:
                self._free(copies)

    def unload(self, unless: Callable[[Iterable[nn.Parameter]], bool] | None = None) -> None:
        """Frees the device copies; what still reads them sees NaN on a virtual device.

        Args:
            unless: tells of masters that travel together whether their copies stay.
        """
        self.deactivate()
        for copies in list(self._copies):
            if unless is None or not unless(self.leaves[leaf] for leaf in copies.leaves):
                self._free(copies)

    def _free(self, copies: _Copies) -> None:
        self._copies.remove(copies)
        # Memory that is still written must not be freed.
        passing = self.device.free(copies.upload.tensors, None if copies.is_waited_for else copies.upload)
        self.device.memory.release("weights", copies.num_bytes, passing)
        with torch.inference_mode(False):  # a leaf that became an inference tensor could not be unfrozen
            for leaf in copies.leaves:
                leaf.data = torch.empty(0, dtype=leaf.dtype)

    def activate(self) -> None:
        """Makes the replica, which has been refreshed, ready to run: weights, buffers. Waits for pending weights."""
        self._take_weights()
        self.load_state()
        self.is_active = True
        tell("activate", self.leaves.values(), self.unit.name, self)

    def renew(self, weights: WorkingCopies) -> None:
        """While the replica is active: user code may have changed masters, or given them other memory."""
        if not self.device.aliases_host:
            self.drop_stale(weights)
            if not self.is_loaded:
                self.load(weights, must=True)
        self._take_weights()

    def _take_weights(self) -> None:
        """Leaves hold what the masters have, or what has come to the device."""
        if self.device.aliases_host:
            for leaf, master in self.leaves.items():
                if leaf.dtype is not master.dtype or not leaf.is_set_to(master):
                    leaf.data = master.data
        for copies in self._copies:
            if not copies.is_waited_for:
                for leaf, data in zip(copies.leaves, copies.upload.wait(Edge.WEIGHTS), strict=True):
                    leaf.data = data
                copies.is_waited_for = True

    def deactivate(self) -> None:
        """Ends the use of the replica; gradients that were not harvested are lost."""
        if not self.is_active:
            return
        self.is_active = False
        tell("deactivate", self.leaves.values(), self.unit.name, self)
        self._sums.clear()
        for leaf in self.leaves:
            if leaf.grad is not None:
                leaf.grad = None
        self.book_gradients(False)
        if not self.device.aliases_host:
            self.kept.drop()
            for _, copy, name in self.buffers:
                copy._buffers[name] = None

    # --- buffers and gradients -----------------------------------------------------------------------------------

    def load_state(self) -> None:
        """Brings what is no weight to the device: buffers, and what the unit keeps in attributes."""
        self.load_buffers()
        self.kept.bring(f"attributes {self.unit.name}")

    def load_buffers(self, *, own: bool = False, is_loaded: bool = False) -> None:
        """Makes device copies of the buffers, which may be on their way home; on a host-aliasing device they are the
        masters'.

        Args:
            own: makes copies there as well: for a graph that is kept while other micro-batches change the masters'.
            is_loaded: whether device copies are there, which are right unless others are on their way home.
        """
        self._owns_buffers = own
        if self.device.aliases_host:
            for master, copy, name in self.buffers:
                buffer = master._buffers[name]
                copy._buffers[name] = buffer.clone() if own and buffer is not None else buffer
            return
        self._coming.load(self.buffers, self.device, f"buffers {self.unit.name}", is_loaded=is_loaded)

    def store_buffers(self, written: Container[tuple[nn.Module, str]]) -> None:
        """Brings buffers home that the forward wrote, or on their way: see [Note: buffers come home]."""
        for master, copy, name in self.buffers:
            value, home = copy._buffers.get(name), master._buffers.get(name)
            if value is None or home is None or (master, name) not in written:
                continue
            if not self.device.aliases_host:
                self._coming.send(master, name, value, self.device, f"buffers {self.unit.name}")
            elif value is home:
                self._coming.note_written(home)
            elif self._owns_buffers and home.shape == value.shape and home.dtype == value.dtype:
                with torch.no_grad():
                    home.copy_(value)
            else:  # assigned anew here: assigned anew on the master
                master._buffers[name] = value.detach()

    def book_gradients(self, are_there: bool, after: Any = None) -> None:
        """Notes that gradients of this unit are on the device, before they are made; or that they are gone."""
        memory = self.device.memory
        if self.device.aliases_host or are_there == (self._gradient_bytes > 0):
            return
        if are_there:
            trained = [(leaf, master) for leaf, master in self.leaves.items() if leaf.requires_grad]
            num_bytes = num_bytes_of([master for _, master in trained])
            # Of a low leaf there is a sum, and the gradient of one call that is going to be added to it.
            num_low = num_bytes_of([leaf for leaf, master in trained if leaf.dtype != master.dtype])
            memory.reserve("gradients", num_bytes + num_low)
            self._gradient_bytes, self._low_gradient_bytes = num_bytes, num_low
        else:
            memory.release("gradients", self._low_gradient_bytes)
            memory.release("gradients", self._gradient_bytes, after)
            self._gradient_bytes = self._low_gradient_bytes = 0

    def add_up(self) -> None:
        """A backward has run: adds gradients in the low dtype to their sums."""
        if not self.is_low:
            return
        for leaf, master in self.leaves.items():
            if leaf.grad is not None and leaf.dtype != master.dtype:
                gradient, leaf.grad = leaf.grad, None
                self._sums[leaf] = sum_up(self._sums.get(leaf), gradient, master.dtype)

    def harvest(self) -> Harvest | None:
        """Sends the gradients of the leaves home; None if there are none."""
        self.add_up()
        masters, gradients = [], []
        for leaf, master in self.leaves.items():
            gradient = self._sums.pop(leaf, leaf.grad)
            if gradient is not None:
                leaf.grad = None
                masters.append(master)
                gradients.append(gradient)
        if not masters:
            return None
        if self.device.aliases_host:
            arriving: Transfer = Done(gradients)
        else:
            arriving = self.device.download(gradients, f"gradients {self.unit.name}", is_bulk=True)
            self.book_gradients(False, self.device.free(gradients, after=arriving))
        tell("download", masters, self.unit.name, self, arriving)
        return masters, arriving


def _structure_of(module: nn.Module) -> list[int]:
    return [*map(id, module._modules.values()), -1, *map(id, module._parameters.values())]


def _own_forward(module: nn.Module) -> Any:
    """The ``forward`` a user set on the instance, looking through the interceptor of the engine."""
    forward = module.__dict__.get("forward")
    return getattr(forward, "roundpipe_original", forward) if forward is not None else None
