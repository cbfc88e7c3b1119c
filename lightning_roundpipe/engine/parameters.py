"""Host masters, device copies of units, and the way of gradients back home.

[Note: weights and gradients]
The user's parameters are the *master weights*; they never leave the host and their ``.grad`` is not touched while a
step runs. A unit computes on a *replica*: a shallow structural copy of its module tree whose parameters are fresh
leaves. On a device that shares the host's memory the leaves alias the masters; elsewhere they are device copies, made
when a stage starts and dropped when it ends. Gradients of all micro-batches of a stage add up in the leaves' ``.grad``
and go home to a :class:`GradientStore` when the stage's last micro-batch leaves.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .devices import Device
from .glue import assign
from .transfer import poison
from .units import Unit, rebind

# What replaces the hook dictionaries of a submodule that carries forward hooks; see [Note: relays] in unit_run.
Relay = Callable[[nn.Module], dict[str, Any]]
Attributes = Iterable[tuple[nn.Module, str, Any]]
_PLAIN = frozenset({bool, int, float, str, type(None)})


# (order of the unit, position of the call), or less where that says enough.
Source = tuple[int, ...]


class GradientStore:
    """Gradients of master weights that have come home, on the host, in the masters' dtype and shape."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gradients: dict[nn.Parameter, dict[Source, Tensor]] = {}

    def add(self, master: nn.Parameter, gradient: Tensor, source: Source = ()) -> None:
        """Adds ``gradient`` to what is there; takes ownership of it.

        Args:
            source: where it comes from. Parts of a shared weight are added up per source, and the sums in the order
                of the sources, so that the result does not depend on which of them comes home first.
        """
        with self._lock:
            parts = self._gradients.setdefault(master, {})
            parts[source] = _sum(parts.get(source), gradient)

    def take(self) -> dict[nn.Parameter, Tensor]:
        """All gradients; the store is empty afterwards."""
        with self._lock:
            stored, self._gradients = self._gradients, {}
        gradients = {}
        for master, parts in stored.items():
            total: Tensor | None = None
            for source in sorted(parts):
                total = _sum(total, parts[source])
            assert total is not None
            gradients[master] = total
        return gradients


def _sum(known: Tensor | None, gradient: Tensor) -> Tensor:
    if known is None:
        return gradient
    if known.is_sparse or gradient.is_sparse:
        return known + gradient
    return known.add_(gradient)


class Replica:
    """A shallow structural copy of a unit; see [Note: weights and gradients].

    Attributes:
        module: the copy that runs.
        leaves: leaf parameter of the copy -> master weight.
        copies: master module -> its copy.
    """

    def __init__(self, unit: Unit, device: Device, relay: Relay) -> None:
        self.unit = unit
        self._relay = relay
        self.device = device
        self._pairs: list[tuple[nn.Module, nn.Module]] = []
        self._copy_of: dict[int, nn.Module] = {}
        self._master_of: dict[int, nn.Module] = {}
        self._leaf_of: dict[int, nn.Parameter] = {}
        self.leaves: dict[nn.Parameter, nn.Parameter] = {}
        self.buffers: list[tuple[nn.Module, nn.Module, str]] = []
        self.resident = False
        self.has_gradients = False
        self._owns_buffers = False
        self.num_hooks = 0
        for module in unit.module.modules():
            copy = module.__new__(type(module))
            self._pairs.append((module, copy))
            self._copy_of[id(module)] = copy
            self._master_of[id(copy)] = module
        self.module = self._copy_of[id(unit.module)]
        self._structure = [_structure_of(module) for module, _ in self._pairs]
        # What was copied last time; held, so that an equal id means the same object.
        self._seen: list[list[Any]] = [[] for _ in self._pairs]
        self._index = {id(module): i for i, (module, _) in enumerate(self._pairs)}
        for master in unit.module.parameters():
            leaf = nn.Parameter(master.detach(), requires_grad=master.requires_grad)
            self._leaf_of[id(master)] = leaf
            self.leaves[leaf] = master

    def is_current(self) -> bool:
        """Whether modules and parameter objects of the unit are still the ones that were copied."""
        return all(known == _structure_of(m) for known, (m, _) in zip(self._structure, self._pairs, strict=True))

    def copy_of(self, module: nn.Module) -> nn.Module | None:
        """The copy of a master module, or None if it does not belong to this unit."""
        return self._copy_of.get(id(module))

    def master_of(self, copy: nn.Module) -> nn.Module | None:
        """The master of one of this replica's modules."""
        return self._master_of.get(id(copy))

    def refresh(self, baseline: Callable[[], Attributes]) -> None:
        """Takes over what may have changed on the masters since the last step: attributes, flags, hooks.

        Glue of micro-batches may write attributes meanwhile; ``baseline``, asked last, tells them apart.
        """
        buffers = []
        for i, (master, copy) in enumerate(self._pairs):
            now = [*master.__dict__.values(), *master._buffers.values(), len(master._forward_hooks)]
            if len(now) != len(self._seen[i]) or any(map(operator.is_not, now, self._seen[i])):
                self._seen[i] = now
                self._copy_state(master, copy)
            if master._buffers:
                buffers += [(master, copy, name) for name, b in master._buffers.items() if b is not None]
        self.buffers = buffers
        for leaf, master_parameter in self.leaves.items():
            if leaf.requires_grad != master_parameter.requires_grad:
                leaf.requires_grad_(master_parameter.requires_grad)
        for module, name, value in baseline():
            if (copied := self.copy_of(module)) is not None:
                assign(copied, name, value)
                self._seen[self._index[id(module)]] = []  # saw values of a micro-batch: must not keep them alive

    def _copy_state(self, master: nn.Module, copy: nn.Module) -> None:
        state = copy.__dict__
        state.clear()
        for name, value in list(master.__dict__.items()):  # a list: glue writes attributes meanwhile
            state[name] = value if type(value) in _PLAIN else rebind(value, self._copy_of, self._leaf_of)
        state.pop("forward", None)
        own_forward = _own_forward(master)
        if own_forward is not None:
            state["forward"] = rebind(own_forward, self._copy_of, self._leaf_of)
        state["_parameters"] = {
            name: None if p is None else self._leaf_of[id(p)] for name, p in master._parameters.items()
        }
        state["_modules"] = {name: None if m is None else self._copy_of[id(m)] for name, m in master._modules.items()}
        state["_buffers"] = dict(master._buffers)
        if master is not self.unit.module and master._forward_hooks:
            state.update(self._relay(master))

    def load(self, baseline: Callable[[], Attributes]) -> None:
        """Makes the device copies (or aliases) of weights and buffers."""
        self.refresh(baseline)
        leaves = list(self.leaves)
        if self.device.aliases_host:
            for leaf in leaves:
                data = self.leaves[leaf].data
                if _layout(leaf) != _layout(data):
                    leaf.data = data
        else:
            moved = self.device.upload([self.leaves[leaf] for leaf in leaves], self.unit.name, "weights").wait()
            for leaf, data in zip(leaves, moved, strict=True):
                leaf.data = data
        self.load_buffers()
        self.resident = True

    def load_buffers(self, *, own: bool = False) -> None:
        """Makes device copies of the masters' buffers; on a host-aliasing device the buffers are the masters'.

        Args:
            own: makes copies there as well: for a graph that is kept while other micro-batches change the masters'.
        """
        self._owns_buffers = own
        if self.device.aliases_host:
            for master, copy, name in self.buffers:
                buffer = master._buffers[name]
                copy._buffers[name] = buffer.clone() if own and buffer is not None else buffer
            return
        found = [(c, name, m._buffers[name]) for m, c, name in self.buffers]
        moved = self.device.upload([b for _, _, b in found if b is not None], self.unit.name, "buffers").wait()
        for (copy, name, _), tensor in zip(found, moved, strict=True):
            copy._buffers[name] = tensor

    def store_buffers(self) -> None:
        """Brings buffers home that the forward wrote."""
        for master, copy, name in self.buffers:
            value, home = copy._buffers.get(name), master._buffers.get(name)
            if value is None or home is None or value is home:
                continue
            if self.device.aliases_host and not self._owns_buffers:  # assigned anew here: assigned anew on the master
                master._buffers[name] = value.detach()
                continue
            if not self.device.aliases_host:
                (value,) = self.device.download([value], self.unit.name, "buffers").wait()
            if home.shape == value.shape and home.dtype == value.dtype:
                with torch.no_grad():
                    home.copy_(value)
            else:
                master._buffers[name] = value.detach()

    def harvest(self, store: GradientStore, *position: int) -> None:
        """Moves the gradients of the leaves to ``store``, as those of the call at ``position`` if it is given."""
        if not self.has_gradients:
            return
        self.has_gradients = False
        found = [(leaf, master) for leaf, master in self.leaves.items() if leaf.grad is not None]
        gradients = [leaf.grad for leaf, _ in found]
        if not self.device.aliases_host:
            gradients = list(
                self.device.download([g for g in gradients if g is not None], self.unit.name, "gradients").wait()
            )
        for (leaf, master), gradient in zip(found, gradients, strict=True):
            leaf.grad = None
            assert gradient is not None
            store.add(master, gradient, (self.unit.order, *position))

    def drop(self) -> None:
        """Frees the device copies; what still reads them sees NaN on a virtual device."""
        if not self.resident:
            return
        self.resident = False
        self.has_gradients = False
        for leaf in self.leaves:
            leaf.grad = None
            if not self.device.aliases_host:
                if self.device.torch_device.type == "cpu":
                    with torch.no_grad():
                        poison(leaf.data)
                leaf.data = torch.empty(0, dtype=leaf.dtype)
        if not self.device.aliases_host:
            for _, copy, name in self.buffers:
                copy._buffers[name] = None


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.dtype, tensor.stride()


def _structure_of(module: nn.Module) -> list[int]:
    return [*map(id, module._modules.values()), -1, *map(id, module._parameters.values())]


def _own_forward(module: nn.Module) -> Any:
    """The ``forward`` a user set on the instance, looking through the interceptor of the engine."""
    forward = module.__dict__.get("forward")
    return getattr(forward, "roundpipe_original", forward) if forward is not None else None


class ReplicaCache:
    """Replicas of units on devices, kept across steps (building one costs more than refreshing it).

    Not thread-safe by itself: a replica is only used by the thread that holds the compute lane of its device.
    """

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._num_hooks = 0
        self._replicas: dict[tuple[int, int], Replica] = {}

    def note_hook(self) -> None:
        """A forward hook was registered during the step: loaded replicas are out of date."""
        self._num_hooks += 1

    def get(self, unit: Unit, device: Device, baseline: Callable[[], Attributes]) -> Replica:
        """The replica of ``unit`` on ``device``, loaded.

        Args:
            baseline: gives attributes that belong to some micro-batch at the moment, with their values for everybody
                else.
        """
        key = (id(unit), device.index)
        replica = self._replicas.get(key)
        if replica is None or (not replica.resident and not replica.is_current()):
            replica = self._replicas[key] = Replica(unit, device, self._relay)
        if not replica.resident:
            replica.load(baseline)
        elif replica.num_hooks != self._num_hooks:
            replica.refresh(baseline)
            replica.load_buffers()
        replica.num_hooks = self._num_hooks
        return replica

    def on_device(self, device: Device) -> Iterator[Replica]:
        """Resident replicas on ``device``."""
        return (r for (_, index), r in list(self._replicas.items()) if index == device.index and r.resident)

    def finish_stage(self, device: Device, store: GradientStore) -> None:
        """Gradients of what ran on ``device`` go home; device copies are dropped where they cost memory."""
        for replica in self.on_device(device):
            replica.harvest(store)
            if not device.aliases_host:
                replica.drop()

    def leaf_names(self) -> dict[int, str]:
        """Id of every replica parameter -> name of its unit."""
        return {id(leaf): replica.unit.name for replica in self._replicas.values() for leaf in replica.leaves}

    def drop_all(self) -> None:
        """Ends a step: nothing stays on any device, gradients that were not harvested are lost."""
        for replica in list(self._replicas.values()):
            replica.drop()

    def clear(self) -> None:
        """Forgets all replicas."""
        self.drop_all()
        self._replicas.clear()
