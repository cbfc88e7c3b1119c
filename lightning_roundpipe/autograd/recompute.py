"""Cutting autograd at units, and what a call must remember to be run again.

[Note: cutting autograd]
The graph of a micro-batch is cut at every unit call. Inside, the unit's graph is local to the call: it starts at
:class:`Entry` and at the replica's leaves and is either kept (fused stage) or made again from saved inputs when the
backward comes by (recompute). Outside, the call's differentiable outputs hang on a :class:`Cut` node that saves
nothing and, in backward, puts the gradient into the :class:`Call`. Everything between units is ordinary autograd.

Outputs live in *slots*: results by index, and by name what leaves a unit in other ways: outputs of submodules that
carry forward hooks (hooks see tensors that are cut already), tensor attributes that the unit wrote, and inputs that it
changed in place. So hidden-state recorders, auxiliary losses kept on ``self`` and in-place units get their gradients.

[Note: facts]
Under ``no_grad`` it cannot be seen which outputs would require a gradient, so the first call of a unit with a new kind
of arguments runs with its graph, once, and leaves its :class:`Facts`: flagged slots, whether it draws random
numbers, which buffers it writes. That of a frozen unit, too, which is given nothing to differentiate: a hook, a closure
or an adapter may bring in a weight from outside. Where none does, later calls are not recorded. They run in the grad
mode of their caller, so that a weight which comes in later is seen in their results, and learned.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from ..common.fingerprints import version_of
from ..common.graphs import EngineFunction, direct_apply, edge_of, walk_graph
from ..devices.device import Run
from ..devices.offload import Offloaded, TravellingActivations
from ..devices.transfer import Done, Transfer
from ..usercode.loose_gradients import LooseGradients
from ..usercode.moves import arrived, moved
from ..weights.units import Unit
from .randomness import Draws

Slot = Hashable
_GRADIENT = "gradient in user code"


class GradientCutError(RuntimeError):
    """User code ran a backward through a unit inside the step."""

    @classmethod
    def at(cls, call: Call) -> GradientCutError:
        """The error for a graph that is cut at ``call``."""
        if call.is_over:
            return cls(
                f"a backward pass went through unit {call.unit.name!r} after the training_step that called it, or its "
                "backward, had ended, and its graph with it. Run the backward of a loss in the training_step that has "
                "made it, and pass retain_graph=True if another one follows there."
            )
        return cls(
            f"a backward pass inside the step went through unit {call.unit.name!r}, whose graph is cut there "
            "(torch.autograd.grad, Tensor.backward or a gradient penalty in a step). With manual optimization "
            "call self.manual_backward(loss), which goes through units. Otherwise use torch.func.grad, inside which "
            "modules run as they are, without the pipeline; or write a module whose forward takes the gradient as "
            "well, and name its class in RoundPipeStrategy(units=[...]); or take the gradient in a hook that runs once "
            "per batch; or run this module with strategy='auto'."
        )


class Entry(EngineFunction):
    """Start of a call's local graph: aliases of the inputs; hands their gradients to the call."""

    @staticmethod
    def forward(ctx: Any, call: Call, anchor: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        # A list: torch does not look into it, so the inputs' own graph is not joined.
        ctx.set_materialize_grads(False)
        ctx.call = call
        return tuple([x.detach() for x in inputs])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.call.input_gradients = gradients
        return (None, None, None)


class Cut(EngineFunction):
    """End of a call for the user code graph, one for each output: identity forward, gradient into the call; see
    [Note: cutting autograd]. A node for several would run the hooks of those that no gradient has come for, too."""

    @staticmethod
    def forward(ctx: Any, call: Call, slot: Slot, anchor: Tensor, output: list[Tensor] | Tensor) -> Tensor:
        # In a list: torch does not look into it, so the local graph is not joined. An argument that the unit has
        # changed in place comes by itself.
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.slot = slot
        if isinstance(output, Tensor):
            ctx.mark_dirty(output)
            return output
        return output[0].detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[None, ...]:
        call: Call = ctx.call
        if not call.pending.is_flushing:
            raise GradientCutError.at(call)
        if gradient is not None:
            call.add_gradient(ctx.slot, gradient)
        return (None, None, None, None)


def note_hook(tensor: Tensor) -> None:
    """A hook is being registered on ``tensor``: gradients of a call's output must pass it, see :class:`Receiver`."""
    if (found := _cut_slot(tensor.grad_fn)) is not None:
        call, slot = found
        call.hooked[slot] = edge_of(tensor)


def _cut_slot(node: Any) -> tuple[Call, Slot] | None:
    if not isinstance(node, _CUT_NODE):
        return None
    cut: Any = node
    return cut.call, cut.slot


class Receiver:
    """Where the gradient of an input of a call goes: an edge of the user code graph.

    If the input is an unchanged output of another call, the gradient is handed to that call directly, without a walk
    through user code; unless hooks of the user sit on the tensor, which the walk would run.

    Attributes:
        owner: the call and slot whose output the input is.
        device: where the input is.
    """

    __slots__ = ("_edge", "device", "owner")

    def __init__(self, tensor: Tensor) -> None:
        self.device = tensor.device
        self.owner = _cut_slot(tensor.grad_fn)
        self._edge = None if self.owner is not None else edge_of(tensor)
        if self.owner is not None and (tensor._backward_hooks or tensor.retains_grad):
            note_hook(tensor)

    @property
    def edge(self) -> GradientEdge | None:
        """The edge of the user code graph, or None if :attr:`owner` is handed the gradient directly."""
        if self.owner is None:
            return self._edge
        call, slot = self.owner
        return call.hooked.get(slot)

    def behind(self, places: Collection[tuple[Any, int]]) -> tuple[list[Call], bool]:
        """The calls whose outputs the input was made of, and whether it was made of what comes from ``places`` (nodes
        and their outputs)."""
        if self.owner is not None:
            return [self.owner[0]], self.owner in {_cut_slot(node) for node, _ in places}
        assert self._edge is not None
        nodes = list(walk_graph([self._edge.node]))
        passed = {(self._edge.node, self._edge.output_nr), *(edge for node in nodes for edge in node.next_functions)}
        return _calls_among(nodes), not passed.isdisjoint(places)


_CUT_NODE = Cut._backward_cls
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
# Where a unit is entered and left, no function transform is active: calls inside of one are not intercepted.
enter_graph, leave_graph = direct_apply(Entry), direct_apply(Cut)


@dataclass(frozen=True)
class Facts:
    """What the first call with a kind of arguments taught; see [Note: facts]."""

    flagged: frozenset[Slot]  # slots whose tensor requires a gradient
    slots: frozenset[Slot]  # all slots of the result
    draws: Draws
    buffers: tuple[tuple[nn.Module, str], ...]  # that were written: (master module, name)
    writes: bool  # whether other attributes of modules were written
    graph_bytes: int  # what the local graph held, besides parameters, arguments and results
    output_bytes: int  # of all slots
    input_bytes: int  # of the tensor arguments then
    has_loose: bool  # whether the local graph leads to leaves that are not the replica's, see [Note: loose parameters]

    def bytes_for(self, input_bytes: int) -> tuple[int, int]:
        """(output, graph) bytes of a call with arguments of so many bytes: in proportion to those of the first one.
        As for the first one if ``input_bytes`` is 0: they were not counted."""
        if not input_bytes or not self.input_bytes:
            return self.output_bytes, self.graph_bytes
        return (
            math.ceil(self.output_bytes * input_bytes / self.input_bytes),
            math.ceil(self.graph_bytes * input_bytes / self.input_bytes),
        )


def flagged_of(slots: Mapping[Slot, Tensor]) -> frozenset[Slot]:
    """The slots whose tensor requires a gradient."""
    return frozenset([slot for slot, tensor in slots.items() if tensor.requires_grad])


_WATCHED = Draws(host=True, gpu=True)


@dataclass(eq=False)
class Call:
    """One execution of a unit by one micro-batch."""

    unit: Unit
    index: int  # ordinal of the call in its micro-batch; seeds its random numbers
    trained: tuple[bool, ...]  # for each parameter of the unit whether it required a gradient when user code called it
    pending: PendingGradients  # of the micro-batch
    trains: bool = False  # whether it is part of a training step
    leaves: Sequence[Any] = ()  # the arguments, see `common.trees`; tensors are `Offloaded` if the call is recomputed
    structure: Any = None  # of the arguments
    differentiable: Sequence[int] = ()  # indices of leaves that required a gradient
    receivers: Sequence[Receiver] = ()  # for each of them where its gradient goes
    # Attributes set by user code on the unit's modules: (master module, name); their values end `leaves`.
    side: Sequence[list[tuple[nn.Module, str]]] = ()
    # Hooks inside the unit where user code has changed some, see [Note: hooks of a call]: attributes of master modules.
    hooks: Sequence[tuple[nn.Module, str, Any]] = ()
    # In a recording what was in other lists and dicts of the unit: (master module, name, the list or dict, a copy).
    contents: Sequence[tuple[nn.Module, str, Any, Any]] = ()
    autocast: tuple[bool, torch.dtype] = (False, torch.float32)  # at the call: (enabled, dtype)
    grad_mode: bool = False  # whether gradients were switched on at the call
    may_be_flagged: bool = False  # whether its outputs can require a gradient; also in an evaluation
    is_recorded: bool = False  # whether it may get a backward
    kept: bool = False  # whether the local graph is kept until the backward (fused stage) instead of recomputed
    backward_stage: int | None = None  # stage that runs the backward, or None for a call off the plan
    facts: Facts | None = None
    draws: Draws = _WATCHED  # what is redirected as long as there are no facts
    is_compiled: bool | None = None  # whether it ran compiled; None before it has run
    is_low: bool = False  # whether it runs on the low form of the unit, see [Note: working copies]
    flagged: frozenset[Slot] = frozenset()  # slots of this call that required a gradient
    # Slots that carry hooks of the user in user code, with the edges at which the hooks sit.
    hooked: dict[Slot, GradientEdge] = field(default_factory=dict)
    changed: Sequence[int] = ()  # indices of leaves that the unit changes in place
    # Buffers that the forward wrote, as they were before: (copy's master, name, value).
    buffer_values: Sequence[tuple[nn.Module, str, Tensor]] = ()
    local: dict[Slot, Tensor] | None = None  # slots of the kept graph
    relayed: dict[Slot, Tensor] = field(default_factory=dict)  # what hooks inside the unit were shown
    relays: list[bool] | None = None  # per relay whether its hooks changed the output; None before the forward
    # What a recomputation is compared with, see [Note: repeats]: weights that results depend on, and elements of them.
    reached: frozenset[nn.Parameter] = frozenset()
    samples: dict[Slot, tuple[torch.Size, Tensor]] = field(default_factory=dict)
    gradients: dict[Slot, Tensor] = field(default_factory=dict)  # that have arrived
    input_gradients: Sequence[Tensor | None] = ()  # that its backward has given
    ran: Run | None = None  # what was noted about the forward
    versions: tuple[int, ...] | None = None  # of the weights at the end of its segment; None in that
    num_writes: int = 0  # of weights by user code, before the call, see `ReplicaCache.note_write`
    is_over: bool = False  # whether its backward has passed for good

    def rely_on(self, facts: Facts | None) -> None:
        """Takes what is known about such calls, which tells whether this one needs a graph; None: nothing yet."""
        self.facts = facts
        may_have_graph = facts is None or facts.has_loose or bool(self.differentiable) or any(self.trained)
        self.may_be_flagged = self.grad_mode and may_have_graph
        self.is_recorded = self.trains and self.may_be_flagged

    def add_gradient(self, slot: Slot, gradient: Tensor) -> None:
        """Adds to the gradient of a slot, out of place: autograd may hold the same tensor elsewhere.

        Raises:
            RuntimeError: if the backward has passed already.
        """
        if self.is_over:
            raise RuntimeError(
                f"a second backward went through unit {self.unit.name!r}, whose graph was given up after the first "
                "one: specify retain_graph=True for the first"
            )
        known = self.gradients.get(slot)
        self.gradients[slot] = gradient if known is None else self.pending.brought(known, gradient.device) + gradient

    def needed_in_backward(self) -> list[Any]:
        """Tensors that have to come to the device for the backward, as far as they are known."""
        saved = [] if self.kept else [x for x in self.leaves if isinstance(x, Offloaded)]
        return [*self.gradients.values(), *saved] if self.gradients else saved

    def put_aside(self, versions: tuple[int, ...]) -> None:
        """Keeps what a recomputation in a later segment needs, and nothing else."""
        self.versions = self.versions or versions
        self.kept = False
        self.local = None
        self.input_gradients = ()
        self.backward_stage = None
        if self.ran is not None:
            self.ran = self.ran._replace(position=None, kept=False)

    def forget(self) -> None:
        """Drops everything but the identity, as soon as the backward has passed or the step has ended."""
        self.is_over = True
        self.local = None
        self.leaves = self.receivers = self.buffer_values = self.input_gradients = ()
        self.side = self.hooks = self.contents = ()
        self.gradients = {}
        self.relayed = {}
        self.samples = {}
        self.hooked = {}


class PendingGradients:
    """Gradients that wait at the inputs of the calls of one micro-batch, until they are flushed through user code.

    Several consumers of a tensor of user code add up here, so that its producers are walked once.

    Args:
        loose: runs the backward, and takes the gradients of leaves.
        activations: of the micro-batch.

    Attributes:
        is_flushing: whether the engine itself walks the graph of user code at the moment.
    """

    def __init__(self, loose: LooseGradients, activations: TravellingActivations) -> None:
        self.is_flushing = False
        self._loose = loose
        self._activations = activations
        self._waiting: dict[tuple[Any, int], tuple[GradientEdge, list[Transfer]]] = {}

    def deliver(self, receiver: Receiver, gradient: Tensor) -> None:
        """Takes the gradient of one input of a call, on whatever device it was computed; it begins to travel."""
        if receiver.owner is not None:
            call, slot = receiver.owner
            if slot not in call.hooked:
                call.add_gradient(slot, gradient)
                return
        edge = receiver.edge
        assert edge is not None
        is_there = gradient.device == receiver.device
        arriving = Done([gradient]) if is_there else self._activations.start(gradient, receiver.device, _GRADIENT)
        self._waiting.setdefault((edge.node, edge.output_nr), (edge, []))[1].append(arriving)

    def brought(self, gradient: Tensor, device: torch.device) -> Tensor:
        """``gradient`` on a device."""
        return gradient if gradient.device == device else moved(gradient, device, self._activations, _GRADIENT)

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def flush(self) -> None:
        """Pushes what waits through the graph of user code, down to the cuts and to loose parameters."""
        waiting, self._waiting = list(self._waiting.values()), {}
        gradients = [functools.reduce(torch.add, arrived(parts)) for _, parts in waiting]
        self.run_backward([edge for edge, _ in waiting], gradients)

    def run_backward(self, roots: list[Any], gradients: list[Tensor]) -> None:
        """Pushes gradients through the graph of user code."""
        self.is_flushing = True
        try:
            self._loose.run_backward(roots, gradients)
        finally:
            self.is_flushing = False

    def clear(self) -> None:
        """Drops what waits."""
        self._waiting.clear()


def reached_cut(outputs: Iterable[Tensor]) -> Call | None:
    """A call whose cut the graph behind ``outputs`` ends at."""
    for node in walk_graph([output.grad_fn for output in outputs]):
        if isinstance(node, _CUT_NODE):
            return cast(Any, node).call  # type: ignore[no-any-return]
    return None


def cut_on_the_way(outputs: Sequence[Any], inputs: Iterable[Any]) -> Call | None:
    """The call whose cut is the first on a way from ``outputs`` back to ``inputs`` (tensors, edges). Their gradients
    would lack what is behind it, also if a part comes another way: ``x + block(x)``. Tensors inside transforms of
    ``torch.func`` have no cuts behind them: units are user code there."""
    if any(isinstance(output, Tensor) and _is_wrapped(output) for output in outputs):
        return None
    wanted = [x if isinstance(x, GradientEdge) else edge_of(x) for x in inputs if getattr(x, "requires_grad", True)]
    places = {(edge.node, edge.output_nr) for edge in wanted}
    weights = set(map(id, inputs))
    roots = [output.node if isinstance(output, GradientEdge) else output.grad_fn for output in outputs]
    firsts = {call: call for call in _calls_among(walk_graph(roots))}
    todo = list(firsts)
    while todo:
        call = todo.pop()
        if not weights.isdisjoint(map(id, call.unit.parameters())):
            return firsts[call]
        for receiver in call.receivers:
            behind, is_wanted = receiver.behind(places)
            if is_wanted:
                return firsts[call]
            found = [one for one in behind if one not in firsts]
            firsts.update(dict.fromkeys(found, firsts[call]))
            todo.extend(found)
    return None


def _calls_among(nodes: Iterable[Any]) -> list[Call]:
    """The calls whose cuts are among ``nodes``."""
    return list(dict.fromkeys(cast(Any, node).call for node in nodes if isinstance(node, _CUT_NODE)))


def versions_of(unit: Unit) -> tuple[int, ...]:
    """Those of its parameters."""
    return tuple(map(version_of, unit.parameters()))


def check_versions(call: Call, *, has_changed: bool) -> None:
    """A backward with other weights would give other values, where torch itself mostly raises an error.

    Args:
        has_changed: whether weights of the call have changed since, in its segment.

    Raises:
        RuntimeError: if they have, in it or later.
    """
    if has_changed or (call.versions is not None and call.versions != versions_of(call.unit)):
        raise RuntimeError(
            f"the weights of unit {call.unit.name!r} have changed between its forward and its backward (an "
            "optimizer step in between, or code that writes them): call it again after that, call manual_backward "
            "before it, or change the weights in on_train_batch_end."
        )
