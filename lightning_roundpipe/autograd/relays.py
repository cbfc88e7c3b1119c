"""Hooks on submodules of units.

[Note: relays]
Forward hooks on submodules of a unit (recorders of hidden states, attentions, router logits) keep the tensors they
see. Inside a unit these belong to the local graph, which user code must not reach, so on the replica such hooks are
run by a relay that shows them cut tensors: further outputs of the call. A recomputation does not run the hooks again,
unless they changed the output, which the rest of the unit needs.

[Note: hooks of a call]
A step may register hooks inside a unit, and remove them before the backward runs the unit again; adapters of PEFT that
are given arguments do. What a call found is what its recomputation finds::

    handle = layer.register_forward_pre_hook(...)     what was there before is kept: state.hooks_before
    self.model(x)                                     the call takes along what is there now: Call.hooks
    handle.remove()
    backward                                          runs the unit with Call.hooks; where hooks were changed after the
                                                      call alone, with what was there before

A call of a micro-batch that changes no hooks takes nothing along. Micro-batches that register the same hook have one
each. Others run it as well (what is registered once is for all), unless one has removed such a hook again.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..common import trees
from ..common.seeds import derive_seed
from ..usercode.lock import UserCodeState, current
from ..weights.units import Unit
from .recompute import Call, Cut, Slot
from .unit_context import InsideUnit, UnitContext

_NOTHING: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
# Where a module has its hooks, and which of them want the keyword arguments. Those of a backward are kept by its graph.
_PRE, _FORWARD = _KINDS = (
    ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    ("_forward_hooks", "_forward_hooks_with_kwargs"),
)
Hooks = tuple[dict[int, Any], dict[int, bool]]  # by id, and which of them want the keyword arguments


class OwnHook:
    """A hook for all but the micro-batches that register the same one: the same code, on the same module; see
    [Note: hooks of a call].

    Copies and pickles of the module get the hook itself.
    """

    def __init__(self, owner: UserCodeState, module: nn.Module, hook: Callable[..., Any]) -> None:
        function = hook.func if isinstance(hook, functools.partial) else hook
        self._hook = self.__wrapped__ = hook
        self.key = id(module), getattr(function, "__code__", type(function))
        owner.own_hooks.setdefault(self.key, []).append(self)

    def of(self, state: UserCodeState | None) -> Callable[..., Any] | None:
        """The hook, if this micro-batch runs it."""
        if state is None:
            return self._hook
        own = state.own_hooks.get(self.key)
        if own is not None:
            return self._hook if self in own else None
        return None if state.lock is not None and self.key in state.lock.switches else self._hook

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hook = self.of(current())
        return None if hook is None else hook(*args, **kwargs)

    def __reduce__(self) -> Any:
        return as_it_is, (self._hook,)


def as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    """For pickles, which then have the function itself."""
    return function


def own_hook(state: UserCodeState, module: nn.Module, hook: Callable[..., Any], *, is_pre: bool) -> Callable[..., Any]:
    """What user code registers in place of ``hook``. Replicas have to take over a forward hook that stays."""
    names = _PRE if is_pre else _FORWARD
    _note_change(state, _hooks_of(module, names))
    own = OwnHook(state, module, hook)
    if not is_pre and (state.lock is None or own.key not in state.lock.switches):
        state.on_module_hook()
    return own


def note_removal(state: UserCodeState, hook_id: int, hooks: Hooks) -> None:
    """User code is about to remove one of these."""
    hook = hooks[0].get(hook_id)
    if hook is not None:
        _note_change(state, hooks)
        if isinstance(hook, OwnHook) and state.lock is not None:
            state.lock.switches.add(hook.key)


def _note_change(state: UserCodeState, hooks: Hooks) -> None:
    if id(hooks[0]) not in state.hooks_before:
        state.hooks_before[id(hooks[0])] = hooks[0], _run_by(state, hooks)


def _hooks_of(module: nn.Module, names: tuple[str, str]) -> Hooks:
    return module.__dict__[names[0]], module.__dict__[names[1]]


def _run_by(state: UserCodeState | None, hooks: Hooks) -> Hooks:
    """Those that this micro-batch runs."""
    items = list(hooks[0].items())  # others register theirs meanwhile
    found = [(i, hook.of(state) if isinstance(hook, OwnHook) else hook) for i, hook in items]
    kept = OrderedDict((i, hook) for i, hook in found if hook is not None)
    return kept, OrderedDict((i, True) for i in kept if i in hooks[1])


def hooks_found(unit: Unit, state: UserCodeState, call: Call | None = None) -> list[tuple[nn.Module, str, Any]]:
    """Attributes of modules inside ``unit`` that are hooks, where user code of the micro-batch has changed some.

    Args:
        call: has been made before: what it has taken along, and where it has nothing, what was there before.
    """
    found = [] if call is None else list(call.hooks)
    known = {(id(module), name) for module, name, _ in found}
    for module in unit.members[1:]:  # hooks on the unit itself are user code
        for names in _KINDS:
            hooks = _hooks_of(module, names)
            before = state.hooks_before.get(id(hooks[0]))
            if before is not None and (id(module), names[0]) not in known:
                now = _run_by(state, hooks) if call is None else before[1]
                shown = relay_hooks(module, now) if names is _FORWARD else dict(zip(names, now, strict=True))
                found += [(module, name, value) for name, value in shown.items()]
    return found


def relay_hooks(master: nn.Module, hooks: Hooks | None = None) -> dict[str, Any]:
    """Instance attributes for a replica of ``master`` that put a relay in the place of its forward hooks.

    Args:
        hooks: what it has; by default what it has when the relay runs.
    """
    return {
        "_forward_hooks": OrderedDict({0: _Relay(master, hooks)}),
        "_forward_hooks_with_kwargs": OrderedDict({0: True}),
        "_forward_hooks_always_called": OrderedDict(),
    }


class _Relay:
    """Stands for all forward hooks of one submodule."""

    def __init__(self, master: nn.Module, hooks: Hooks | None) -> None:
        self._master = master
        self._hooks = hooks

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        state = current()
        assert state is not None
        assert isinstance(state.unit_writes, InsideUnit)
        assert state.unit_writes.run is not None
        hooks = self._hooks or _run_by(state, _hooks_of(self._master, _FORWARD))
        if not hooks[0]:
            return None
        context, call, recorded = state.unit_writes.run
        assert call.relays is not None
        order = len(call.relays)
        if recorded is not None and order >= len(recorded):
            return None  # a recomputation, and the hook was registered after the forward
        if recorded is not None and not recorded[order]:
            call.relays.append(False)
            _relay_slots(call, order, trees.leaves_of(output))
            return None
        changed, result = self._run_hooks(context, call, order, hooks, args, kwargs, output)
        call.relays.append(changed)
        return result if changed else None

    def _run_hooks(
        self, context: UnitContext, call: Call, order: int, hooks: Hooks, args: Any, kwargs: Any, output: Any
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
            is_same = self._call_hooks(hooks, args, kwargs, shown) is shown
            begun = [slot for slot in slots if slot not in flagged and slots[slot].requires_grad]
            # That a hook has begun a graph is a change: no output of the call hangs on it.
            call.relayed.update((slot, slots[slot].detach()) for slot in begun)
            if is_same and not begun:
                return False, output
            # The rest of the unit computes with what they returned, so they must see the tensors of the local graph.
            return True, self._call_hooks(hooks, args, kwargs, output)

    def _call_hooks(self, hooks: Hooks, args: Any, kwargs: Any, output: Any) -> Any:
        for hook_id, hook in hooks[0].items():
            given = (args, kwargs) if hook_id in hooks[1] else (args,)
            new = hook(self._master, *given, output)
            output = output if new is None else new
        return output


@contextlib.contextmanager
def _in_hook(context: UnitContext, order: int) -> Iterator[None]:
    """User code runs inside the unit, with random numbers of its own where those of the unit are redirected."""
    unit_seed, private, foreign = context.inside.streams
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
