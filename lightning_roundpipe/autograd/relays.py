"""Forward hooks on submodules of units.

[Note: relays]
Forward hooks on submodules of a unit (recorders of hidden states, attentions, router logits) keep the tensors they
see. Inside a unit these belong to the local graph, which user code must not reach, so on the replica such hooks are
run by a relay that shows them cut tensors: further outputs of the call. A recomputation does not run the hooks again,
unless they changed the output, which the rest of the unit needs.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..common import trees
from ..common.seeds import derive_seed
from ..usercode.lock import current
from .recompute import Call, Cut, Slot
from .unit_context import InsideUnit, UnitContext

_NOTHING: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()


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
        state = current()
        assert state is not None
        assert isinstance(state.unit_writes, InsideUnit)
        assert state.unit_writes.run is not None
        context, call, recorded = state.unit_writes.run
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
