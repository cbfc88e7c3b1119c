"""One execution of a unit on a replica: arguments in, slots out.

Used for the forward and for its recomputation alike, so that both see the same random numbers, autocast state,
attributes and buffers.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..common import trees
from ..common.attributes import UnitWrites, assign, read
from ..common.graphs import has_saved_tensor_hooks
from ..common.seeds import derive_seed
from ..devices.offload import TravellingActivations
from ..usercode.generators import ForeignSeeded
from ..usercode.gpu_draws import gpu_generator_seeded
from ..usercode.lock import UserCodeLock, UserCodeState
from ..weights.low_precision import WorkingCopies
from ..weights.parameters import Replica
from .compiling import UnitCompiler, without_flags
from .randomness import Draws, PrivateRandomness
from .recompute import Call, Cut, Slot

_active = threading.local()
_NOTHING: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
_NOT_REDIRECTED = 0, None, None  # what a unit draws: its seed, and what gives it numbers of torch's and of others


@dataclass(slots=True)
class UnitResult:
    """What one execution of a unit gave.

    Attributes:
        leaves, structure: the returned value, see :mod:`~lightning_roundpipe.common.trees`.
        slots: every tensor that left the unit, by slot.
        written: plain attributes that the unit wrote: (copy or other module, name, value).
        draws: from where it drew random numbers, as far as that was watched.
        was_compiled: whether the unit was compiled in this run, which took most of the time.
    """

    leaves: list[Any]
    structure: Any
    slots: dict[Slot, Tensor]
    written: list[tuple[nn.Module, str, Any]] = field(default_factory=list)
    draws: Draws = field(default_factory=Draws)
    was_compiled: bool = False


@dataclass(slots=True)
class UnitContext:
    """What the units of one micro-batch run with.

    Attributes:
        state: of the micro-batch in user code.
        lock: the user-code lock of the step.
        anchor: makes every cut require a gradient, see [Note: loose parameters] in :mod:`usercode.loose_gradients`.
        activations: what the micro-batch brings along from device to device.
        weights: the low-precision copies of the masters.
        autocast_device: device type of autocast.
        saves_kept: whether inputs are saved for calls whose graph is kept, too: their backward may come too late.
        compiler: runs units compiled; None to run them as they are.
        inside: open while a unit runs.
    """

    state: UserCodeState
    lock: UserCodeLock
    anchor: Tensor
    activations: TravellingActivations
    weights: WorkingCopies
    autocast_device: str
    saves_kept: bool
    compiler: UnitCompiler | None
    inside: InsideUnit


class InsideUnit:
    """While open, its micro-batch is inside a unit: on the calling thread, and on those of autograd that work for it
    meanwhile: what is written on modules is noted. May be entered again afterwards.

    Attributes:
        is_recomputing: whether the unit runs again for its backward, or runs its backward.
        written: plain attributes that were written the last time: (copy or other module, name, value).
    """

    __slots__ = ("_state", "_writes", "is_recomputing", "written")

    def __init__(self, state: UserCodeState) -> None:
        self._state = state
        self._writes = UnitWrites()
        self.is_recomputing = False
        self.written: list[tuple[nn.Module, str, Any]] = []

    @property
    def registered(self) -> dict[tuple[int, str], bool]:
        """Buffers that units have registered, see :class:`UnitWrites`."""
        return self._writes.registered

    def __enter__(self) -> None:
        state = self._state
        state.unit_writes, state.is_recomputing = self._writes, self.is_recomputing
        self.written = []

    def __exit__(self, *exc: object) -> None:
        state = self._state
        state.unit_writes = None
        state.is_recomputing = False
        if self._writes.before:
            self.written = [one for one in self._writes.take_back() if not _is_list_of_weights(*one[:2])]


def run_unit(context: UnitContext, call: Call, replica: Replica, leaves: list[Any]) -> UnitResult:
    """Calls the unit's forward on ``replica``, in the caller's grad mode; the caller holds the compute lane.

    Args:
        leaves: arguments, then the values of ``call.side``.

    Raises:
        RuntimeError: if the unit puts something into a list or dict that it was given.
    """
    originals: dict[int, Tensor] = {}
    here = replica.device.torch_device
    if here.type != "cpu":  # user code knows other devices: the host, and those of earlier calls
        leaves = [here if type(x) is torch.device and x.type in ("cpu", here.type) else x for x in leaves]
    if context.compiler is not None and call.facts is not None:
        leaves, originals = without_flags(leaves)
    (args, kwargs), side = trees.unflatten_call(call.structure, leaves)
    num_side = len(trees.leaves_of(side)) if call.facts is None else 0
    previous = _set_side(context, call, replica, side) if call.side else ()
    call.relayed = {}
    relays, call.relays = call.relays, []
    _active.run, _active.streams = (context, call, relays), _NOT_REDIRECTED
    draws = call.draws if call.facts is None else call.facts.draws  # those that are redirected
    inside = context.inside
    inside.is_recomputing = relays is not None
    try:
        with inside, _gpu_draws_seeded(context, call, replica) if draws.gpu else _NOTHING as have_drawn:
            result, drawn, was_compiled = _forward(context, call, replica, args, kwargs, draws)
            if call.facts is None:
                if have_drawn is not None and have_drawn():  # in whatever operator
                    drawn = replace(drawn, gpu=True)
                _check_containers(call, leaves, len(leaves) - num_side, args, kwargs)
    except RuntimeError as error:
        if here.type != "cpu" and "same device" in str(error):
            _note_devices(error, call.unit.name)
        raise
    finally:
        _active.run = None
        _active.streams = _NOT_REDIRECTED
        for module, name, value in previous:
            assign(module, name, value)
    found = _result_of(call, result, originals, inside.written)
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
    call: Call, result: Any, originals: dict[int, Tensor], written: list[tuple[nn.Module, str, Any]]
) -> UnitResult:
    """What the unit gave, what its hooks were shown, and the tensors that it wrote on modules, by slot."""
    leaves: list[Any] = []
    structure = trees.flatten(result, leaves)
    if originals:  # what is given back is recognised by its identity
        leaves = [originals.get(id(x), x) for x in leaves]
    slots: dict[Slot, Tensor] = {i: x for i, x in enumerate(leaves) if isinstance(x, Tensor)}
    slots.update(call.relayed)
    for order, (_, name, value) in enumerate(written):
        if isinstance(value, Tensor):
            slots["attribute", order, name] = value
    return UnitResult(leaves, structure, slots, written)


def _gpu_draws_seeded(context: UnitContext, call: Call, replica: Replica) -> contextlib.AbstractContextManager[Any]:
    device = replica.device.torch_device
    if device.type == "cpu":
        return _NOTHING
    return gpu_generator_seeded(device, _seed(context, call))


def _seed(context: UnitContext, call: Call) -> int:
    return derive_seed(context.state.seed, context.state.index, call.index)


def _forward(
    context: UnitContext, call: Call, replica: Replica, args: Any, kwargs: Any, draws: Draws
) -> tuple[Any, Draws, bool]:
    """The unit's forward: (result, where it drew, whether it was compiled now)."""
    compiler = context.compiler
    if draws.host or draws.foreign or has_saved_tensor_hooks():
        call.is_compiled = False
        with _NOTHING if compiler is None else context.lock.unit_running():
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
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(Tensor.detach, _identity))
        seed = _seed(context, call)
        foreign = private = None
        if draws.foreign:
            stack.enter_context(context.lock.exclusive())
            foreign = stack.enter_context(ForeignSeeded(seed))
        if draws.host:
            private = stack.enter_context(PrivateRandomness(seed, context.lock.exclusive))
        _active.streams = seed, private, foreign
        result = replica.module.forward(*args, **kwargs)
    if private is not None:
        draws = replace(private.draws, foreign=foreign is not None and foreign.have_moved)
    return result, draws


def _set_side(
    context: UnitContext, call: Call, replica: Replica, values: list[Any]
) -> list[tuple[nn.Module, str, Any]]:
    """Sets what user code has written on the unit's modules; what was there before."""
    previous = []
    for (module, name), value in zip(call.side, values, strict=True):
        copy = replica.copy_of(module)
        if copy is not None:
            previous.append((copy, name, read(copy, name)))
            if (id(module), name) in context.lock.registered:
                copy._buffers.setdefault(name, None)
            assign(copy, name, value)
    return previous


def _check_containers(call: Call, leaves: list[Any], num_arguments: int, args: Any, kwargs: Any) -> None:
    """Raises:
    RuntimeError: if the unit put something into a list or dict that it was given: user code would not see it.
    """
    now = trees.leaves_of((args, kwargs))
    if len(now) != num_arguments or any(a is not b for a, b in zip(now, leaves, strict=False)):
        raise RuntimeError(
            f"unit {call.unit.name!r} changes a list or dict that it was given as an argument, which cannot be "
            "followed through the pipeline: return it from its forward, or make the module around it the unit with "
            "RoundPipeStrategy(units=[TheClassAroundIt])"
        )


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def autocast_as(device_type: str, wanted: tuple[bool, torch.dtype]) -> contextlib.AbstractContextManager[Any]:
    """Autocast as it was at the call; the weight cache stays off (any thread's exit would clear it)."""
    if wanted == autocast_state(device_type):
        return contextlib.nullcontext()
    return torch.autocast(device_type, dtype=wanted[1], enabled=wanted[0], cache_enabled=False)


def autocast_state(device_type: str) -> tuple[bool, torch.dtype]:
    """(enabled, dtype) of the calling thread."""
    return torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)


# [Note: relays]
# Forward hooks on submodules of a unit (recorders of hidden states, attentions, router logits) keep the tensors they
# see. Inside a unit these belong to the local graph, which user code must not reach, so on the replica such hooks are
# run by a relay that shows them cut tensors: further outputs of the call. A recomputation does not run the hooks again,
# unless they changed the output, which the rest of the unit needs.


def relay_hooks(master: nn.Module) -> dict[str, Any]:
    """Instance attributes for a replica of ``master`` that put a relay in the place of its forward hooks."""
    return {
        "_forward_hooks": OrderedDict({0: _Relay(master)}),
        "_forward_hooks_with_kwargs": OrderedDict({0: True}),
        "_forward_hooks_always_called": OrderedDict(),
    }


class _Relay:
    """Stands for all forward hooks of one submodule."""

    def __init__(self, master: nn.Module) -> None:
        self._master = master

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        context, call, recorded = _active.run
        assert call.relays is not None
        order = len(call.relays)
        if recorded is not None and order >= len(recorded):
            return None  # a recomputation, and the hook was registered after the forward
        if recorded is not None and not recorded[order]:
            call.relays.append(False)
            _relay_slots(call, order, trees.leaves_of(output))
            return None
        changed, result = self._run_hooks(context, call, order, args, kwargs, output)
        call.relays.append(changed)
        return result if changed else None

    def _run_hooks(
        self, context: UnitContext, call: Call, order: int, args: Any, kwargs: Any, output: Any
    ) -> tuple[bool, Any]:
        leaves: list[Any] = []
        structure = trees.flatten(output, leaves)
        slots = _relay_slots(call, order, leaves)
        flagged = [slot for slot in slots if _is_flagged(call, slot)]
        with torch.enable_grad():
            for slot in flagged:
                leaves[slot[2]] = Cut.apply(call, slot, context.anchor, [slots[slot]])  # type: ignore[index]
        shown = trees.unflatten(structure, leaves)
        with _in_hook(context, order):
            is_same = self._call_hooks(args, kwargs, shown) is shown
            begun = [slot for slot in slots if slot not in flagged and slots[slot].requires_grad]
            # That a hook has begun a graph is a change: no output of the call hangs on it.
            call.relayed.update((slot, slots[slot].detach()) for slot in begun)
            if is_same and not begun:
                return False, output
            # The rest of the unit computes with what they returned, so they must see the tensors of the local graph.
            return True, self._call_hooks(args, kwargs, output)

    def _call_hooks(self, args: Any, kwargs: Any, output: Any) -> Any:
        for hook_id, hook in self._master._forward_hooks.items():
            if hook_id in self._master._forward_hooks_with_kwargs:
                new = hook(self._master, args, kwargs, output)
            else:
                new = hook(self._master, args, output)
            output = output if new is None else new
        return output


@contextlib.contextmanager
def _in_hook(context: UnitContext, order: int) -> Iterator[None]:
    """User code runs inside the unit, with random numbers of its own where those of the unit are redirected."""
    unit_seed, private, foreign = _active.streams
    seed, user_code = derive_seed(unit_seed, order), context.lock.in_user_code(context.state)
    with (
        user_code if foreign is None else foreign.interrupted(seed, by=user_code),
        _NOTHING if private is None else private.interrupted(seed),
    ):
        yield


def _relay_slots(call: Call, order: int, leaves: list[Any]) -> dict[Slot, Tensor]:
    slots: dict[Slot, Tensor] = {("relay", order, i): x for i, x in enumerate(leaves) if isinstance(x, Tensor)}
    call.relayed.update(slots)
    return slots


def _is_flagged(call: Call, slot: Slot) -> bool:
    if call.facts is not None:
        return slot in call.facts.flagged
    return call.relayed[slot].requires_grad


def _is_list_of_weights(module: nn.Module, name: str) -> bool:
    """Recurrent layers of torch list their weights, anew when these are others: those of a replica belong to it."""
    return isinstance(module, nn.RNNBase) and name.startswith("_flat_weight")
