"""One execution of a unit on a replica: arguments in, slots out.

Used for the forward and for its recomputation alike, so that both see the same random numbers, autocast state,
attributes and buffers.
"""

from __future__ import annotations

import contextlib
import operator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..common import trees
from ..common.attributes import assign, read
from ..common.graphs import has_saved_tensor_hooks
from ..common.seeds import derive_seed
from ..usercode.collected_lists import Attribute
from ..usercode.generators import ForeignSeeded
from ..usercode.gpu_draws import gpu_generator_seeded
from ..usercode.lock import UserCodeState
from ..weights.parameters import Replica
from .compiling import user_compiles
from .fills import Fills, GivenFills, contents_before, contents_of, plain, side_of
from .randomness import Draws, PrivateRandomness
from .recompute import Call, Slot
from .relays import hooks_found
from .unit_context import NOT_REDIRECTED, UnitContext

_NOTHING: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()


@dataclass(slots=True)
class WrittenAttribute:
    """A plain attribute that a unit wrote, or a list or dict there that it filled."""

    module: nn.Module  # the master, or another module
    name: str
    value: Any  # its new tensors belong to the unit
    _leaves: list[Any] = field(default_factory=list)
    _structure: Any = None
    _slots: dict[int, Slot] = field(default_factory=dict)  # index of a leaf of the value -> of the call
    _passed: dict[int, int] = field(default_factory=dict)  # index of a leaf -> of the argument that it is

    def locate(self, place: int, arguments: dict[int, int]) -> dict[Slot, Tensor]:
        """Finds the tensors in the value; the new ones, by slot.

        Args:
            place: of the module, the same in every run.
            arguments: id of a tensor that the unit was given -> its index.
        """
        found: dict[Slot, Tensor] = {}
        self._structure = trees.flatten(self.value, self._leaves)
        for i, leaf in enumerate(self._leaves):
            if isinstance(leaf, Tensor):
                if id(leaf) in arguments:
                    self._passed[i] = arguments[id(leaf)]
                else:  # counted, so that slots stay the same while a list grows from step to step
                    slot = self._slots[i] = "attribute", place, self.name, len(self._slots)
                    found[slot] = leaf
        return found

    def shown(self, outputs: dict[Slot, Tensor], arguments: list[Any]) -> Any:
        """The value for user code, given the outputs of the call and its arguments there."""
        if not (self._slots or self._passed):
            return self.value
        leaves = list(self._leaves)
        for i, slot in self._slots.items():
            leaves[i] = outputs[slot]
        for i, j in self._passed.items():
            leaves[i] = arguments[j]
        return trees.unflatten(self._structure, leaves)


@dataclass(slots=True)
class UnitResult:
    """What one execution of a unit gave."""

    leaves: list[Any]  # with the structure: the returned value, see `common.trees`
    structure: Any
    slots: dict[Slot, Tensor]  # every tensor that left the unit, by slot
    written: list[WrittenAttribute] = field(default_factory=list)
    given: list[tuple[int, WrittenAttribute]] = field(default_factory=list)  # lists and dicts among the arguments
    draws: Draws = field(default_factory=Draws)  # from where it drew random numbers, as far as that was watched
    was_compiled: bool = False  # whether the unit was compiled in this run, which took most of the time


def take_along(call: Call, state: UserCodeState, *, is_recording: bool) -> list[Any]:
    """Keeps in a call what user code has changed on the modules of its unit: attributes, hooks, and in a recording,
    where it is found which ones it changes, lists and dicts. Called with the user-code lock.

    Returns:
        The values of ``call.side``.
    """
    values: list[Any] = []
    if state.overlay:
        call.side, values = side_of(call.unit, state)
    if state.hooks_before:
        call.hooks = hooks_found(call.unit, state)
    if is_recording:
        call.contents = contents_of(call.unit, call.side)
    return values


def find_again(call: Call, state: UserCodeState) -> None:
    """Before a call is run again: it is to find what it has found on the modules of its unit."""
    if state.hooks_before:
        call.hooks = hooks_found(call.unit, state, call)
    if call.contents:
        call.hooks = [*call.hooks, *contents_before(call)]


def run_unit(context: UnitContext, call: Call, replica: Replica, leaves: list[Any]) -> UnitResult:
    """Calls the unit's forward on ``replica``, in the caller's grad mode; the caller holds the compute lane.

    Args:
        leaves: arguments, then the values of ``call.side``.

    Raises:
        RuntimeError: if the unit puts something into a container that it was given, and that is no list or dict.
    """
    here = replica.device.torch_device
    if here.type != "cpu":  # user code knows other devices: the host, and those of earlier calls
        leaves = [here if type(x) is torch.device and x.type in ("cpu", here.type) else x for x in leaves]
    (args, kwargs), side = trees.unflatten_call(call.structure, leaves)
    previous = _set_side(context, call, replica, side) if call.side or call.hooks else ()
    fills = Fills(replica, learns=call.facts is None) if call.facts is None or call.unit.fills else None
    given = GivenFills(call.unit, (args, kwargs), learns=call.facts is None)
    filled: list[Attribute] = []
    call.relayed = {}
    relays, call.relays = call.relays, []
    draws = call.draws if call.facts is None else call.facts.draws  # those that are redirected
    inside = context.inside
    inside.run, inside.streams = (context, call, relays), NOT_REDIRECTED
    inside.is_recomputing = relays is not None
    try:
        with inside:
            forward = _forward_seeded if draws.gpu and here.type != "cpu" else _forward
            result, drawn, was_compiled = forward(context, call, replica, args, kwargs, draws)
            filled_given = given.end()
            if call.facts is None:
                with given.undone():
                    _check_containers(call, leaves, (args, kwargs, side))
    except RuntimeError as error:
        if here.type != "cpu" and "same device" in str(error):
            _note_devices(error, call.unit.name)
        raise
    finally:
        inside.run = None
        if fills is not None:
            filled = fills.end()
        for module, name, value in reversed(previous):
            assign(module, name, value)
    written = [_of_master(context, replica, *one) for one in (*filled, *inside.written)]
    found = _result_of(call, result, written, filled_given, leaves)
    found.draws, found.was_compiled = drawn, was_compiled
    return found


def _note_devices(error: RuntimeError, unit_name: str) -> None:
    if hasattr(error, "add_note"):  # since Python 3.11
        error.add_note(
            f"The arguments, parameters and buffers of unit {unit_name!r} are on one device. What it takes from "
            "elsewhere (tensors in attributes, lists and dicts, other modules) may not be there: register it, pass it "
            "as an argument, or make the module around both a unit with RoundPipeStrategy(units=[...])."
        )


def _result_of(
    call: Call, result: Any, written: list[Attribute], filled: list[tuple[int, Any]], given: list[Any]
) -> UnitResult:
    """What the unit gave, what its hooks were shown, and the tensors that it wrote on modules, and has put into lists
    and dicts that it was given, by slot."""
    leaves: list[Any] = []
    structure = trees.flatten(result, leaves)
    slots: dict[Slot, Tensor] = {i: x for i, x in enumerate(leaves) if isinstance(x, Tensor)}
    slots.update(call.relayed)
    attributes = [WrittenAttribute(*one) for one in written]
    arrived = [(i, WrittenAttribute(call.unit.module, f"argument {i}", value)) for i, value in filled]
    if attributes or arrived:
        arguments = {id(x): i for i, x in enumerate(given) if isinstance(x, Tensor)}
        others: dict[int, int] = {}  # id of a module that is no part of the unit, and may be made in every run
        for attribute in (*attributes, *(attribute for _, attribute in arrived)):
            module = id(attribute.module)
            place = call.unit.places.get(module)
            slots.update(
                attribute.locate(~others.setdefault(module, len(others)) if place is None else place, arguments)
            )
    return UnitResult(leaves, structure, slots, attributes, arrived)


def _of_master(
    context: UnitContext, replica: Replica, copy: nn.Module, name: str, value: Any
) -> tuple[nn.Module, str, Any]:
    """What was written on a copy, as something that is written on its master."""
    master = replica.master_of(copy) or copy
    if (is_persistent := context.inside.registered.get((id(copy), name))) is not None:
        context.lock.registered[id(master), name] = is_persistent
    return master, name, plain(value)


def _seed(context: UnitContext, call: Call) -> int:
    return derive_seed(context.state.seed, call.index)


def _forward_seeded(
    context: UnitContext, call: Call, replica: Replica, args: Any, kwargs: Any, draws: Draws
) -> tuple[Any, Draws, bool]:
    """:func:`_forward` of a unit that may draw on a GPU, where it is."""
    with gpu_generator_seeded(replica.device.torch_device, _seed(context, call)) as have_drawn:
        result, drawn, was_compiled = _forward(context, call, replica, args, kwargs, draws)
        if call.facts is None and have_drawn():  # in whatever operator
            drawn = replace(drawn, gpu=True)
    return result, drawn, was_compiled


def _forward(
    context: UnitContext, call: Call, replica: Replica, args: Any, kwargs: Any, draws: Draws
) -> tuple[Any, Draws, bool]:
    """The unit's forward: (result, where it drew, whether it was compiled now)."""
    compiler = context.compiler
    if draws.host or draws.foreign or has_saved_tensor_hooks():
        call.is_compiled = False
        if compiler is None:
            return *_forward_watched(context, call, replica, args, kwargs, draws), False
        with context.lock.unit_running(), _NOTHING if call.facts is None else user_compiles(False):
            return *_forward_watched(context, call, replica, args, kwargs, draws), False
    if compiler is not None:
        result, was_compiled = compiler.run(call, replica, args, kwargs, context.lock)
        return result, draws, was_compiled
    return replica.module.forward(*args, **kwargs), draws, False


def drop_graph(result: UnitResult, *, keeps_flags: bool = False) -> None:
    """What a run with graph returned keeps its values only.

    Args:
        keeps_flags: whether it requires gradients as before: of a unit that has nothing to train, in which a hook has
            begun a graph, so that what comes after it gets one.
    """
    values = {id(t): t.detach().requires_grad_(keeps_flags) for t in result.slots.values() if t.requires_grad}
    if values:
        result.slots = {slot: values.get(id(t), t) for slot, t in result.slots.items()}


def without_weights(slots: dict[Slot, Tensor], replica: Replica) -> dict[Slot, Tensor]:
    """Views of device copies (a unit that returns its own weight) become copies."""
    if replica.device.aliases_host:
        return dict(slots)
    weights = {leaf.untyped_storage().data_ptr() for leaf in replica.leaves}
    return {slot: t.clone() if t.untyped_storage().data_ptr() in weights else t for slot, t in slots.items()}


def _forward_watched(
    context: UnitContext, call: Call, replica: Replica, args: Any, kwargs: Any, draws: Draws
) -> tuple[Any, Draws]:
    """The unit's forward, with what it draws on the host redirected: (result, where it drew); see
    [Note: private randomness] in :mod:`autograd.randomness`."""
    with contextlib.ExitStack() as stack:
        if has_saved_tensor_hooks():
            # Those of non-reentrant activation checkpointing in user code must not see the tensors of a unit. What is
            # kept instead must not lead to the graph: a node that keeps its own result would never be freed.
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda tensor: tensor))
        seed = _seed(context, call)
        foreign = private = None
        if draws.foreign:
            stack.enter_context(context.lock.exclusive())
            foreign = stack.enter_context(ForeignSeeded(seed))
        if draws.host:
            private = stack.enter_context(PrivateRandomness(seed, context.lock.exclusive))
        context.inside.streams = seed, private, foreign
        result = replica.module.forward(*args, **kwargs)
    if private is not None:
        draws = replace(private.draws, foreign=foreign is not None and foreign.have_moved)
    return result, draws


def _set_side(
    context: UnitContext, call: Call, replica: Replica, values: list[Any]
) -> list[tuple[nn.Module, str, Any]]:
    """Sets what user code has written on the unit's modules, and the hooks there; what was there before."""
    previous = []
    side = ((*place, value) for places, value in zip(call.side, values, strict=True) for place in places)
    for module, name, value in (*side, *call.hooks):
        copy = replica.copy_of(module)
        if copy is not None:
            previous.append((copy, name, read(copy, name)))
            if (id(module), name) in context.lock.registered:
                copy._buffers.setdefault(name, None)
            assign(copy, name, value)
    return previous


def _check_containers(call: Call, leaves: list[Any], given: Any) -> None:
    """Raises:
    RuntimeError: if the unit put something into what it was given, but for lists and dicts: user code would not see it.
    """
    now = trees.leaves_of(given)
    if len(now) != len(leaves) or any(map(operator.is_not, now, leaves)):
        raise RuntimeError(
            f"unit {call.unit.name!r} changes an object that it was given as an argument, or a container in an "
            "attribute, which cannot be followed through the pipeline: return it from its forward, use a plain list or "
            f"dict, or {call.unit.coarser()}"
        )


def autocast_as(device_type: str, wanted: tuple[bool, torch.dtype]) -> contextlib.AbstractContextManager[Any]:
    """Autocast as it was at the call; the weight cache stays off (any thread's exit would clear it)."""
    if wanted == autocast_state(device_type):
        return contextlib.nullcontext()
    return torch.autocast(device_type, dtype=wanted[1], enabled=wanted[0], cache_enabled=False)


def autocast_state(device_type: str) -> tuple[bool, torch.dtype]:
    """(enabled, dtype) of the calling thread."""
    return torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
