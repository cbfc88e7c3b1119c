"""One micro-batch on its way through the stages: the life of a thread.

[Note: the walk]
Forward: the user's function runs; each unit call is located in the plan, the thread moves to the stage of that call
(leaving the one before), runs the unit on the stage's device and cuts the graph. Backward, after the loss: the calls
in reverse order, each in its backward stage: gradients that wait are flushed through user code, the local graph is made
again or was kept, and the unit's backward runs on the stage's replica. A call that got no gradient is skipped.

Where micro-batches meet ([Note: barriers] in :mod:`engine.barrier`) a walk has several such segments, each with a plan
of its own. A call whose backward has not come by the end of a segment is *carried* into the next ones: its graph is
dropped if it was kept, and recomputed when its backward comes, in the stage that the plan of that segment has for it.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..autograd.recompute import Call, Flushing, PendingGradients, check_versions, versions_of
from ..autograd.unit_run import UnitRunner, autocast_state
from ..common import trees
from ..common.attributes import read
from ..common.seeds import derive_seed
from ..common.sizes import num_bytes_of
from ..devices.devices import Device
from ..devices.offload import Offloaded
from ..devices.runs import Run
from ..planning.partition import StageKind
from ..usercode.lock import UserCodeState
from ..usercode.loose_gradients import LooseGradients, node_of
from ..weights.parameters import Replica
from ..weights.units import Unit
from .backward import BackwardRunner
from .barrier import Attendance
from .context import StepContext
from .forward import ForwardResult, ForwardRunner
from .route import Route

_ALL_POSITIONS = 1 << 60


@dataclass(eq=False)
class Walk:
    """A micro-batch; see [Note: the walk].

    Args:
        index: micro-batch index: identifies it to the user and seeds its random numbers.
        slot: its index in the schedule of this run.

    Attributes:
        attendance: how its thread and that of the step wait for each other.
        runs, num_off_plan: what was noted in this segment.
        has_backward: whether its backward has begun in this segment.
    """

    index: int
    slot: int
    shared: StepContext
    state: UserCodeState
    calls: list[Call] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    attendance: Attendance = field(default_factory=Attendance)
    num_off_plan: int = 0
    has_backward: bool = False

    def __post_init__(self) -> None:
        self._called: list[Unit] = []
        self._carried: list[weakref.ref[Call]] = []
        self._flushing = Flushing()
        self._loose = LooseGradients()
        self._pending = PendingGradients(self._flushing, self._loose)
        self._anchor = torch.zeros((), requires_grad=True)
        shared = self.shared
        seed_of = functools.partial(derive_seed, shared.seed, self.index)
        self._runner = UnitRunner(self.state, shared.lock, seed_of, self._anchor, shared.compiler)
        self._route = Route(shared.pool, shared.gate, self.slot)
        self._activations = self._route.activations
        weights = shared.replicas.weights
        self._forward = ForwardRunner(self._runner, self._activations, self._anchor, weights, saves_kept=shared.meets)
        self._backward = BackwardRunner(
            self._runner, self._activations, self._route, self._loose, self._anchor, shared.autocast_device
        )
        self.state.call_unit = self.call_unit
        self._begin()

    # --- segments ----------------------------------------------------------------------------------------------

    def begin_segment(self, slot: int, shared: StepContext) -> None:
        """Goes on after a barrier, by another plan; arguments as of the class."""
        self.slot, self.shared = slot, shared
        self._route.begin(shared.gate, slot)
        self._begin()

    def _begin(self) -> None:
        plan = self.shared.plan
        self._first_call = len(self._called)
        self._next_position = len(plan.carried)
        self._replayed: dict[Unit, list[int]] = {}
        self._in_backward = self.has_backward = False
        self.runs, self.num_off_plan = [], 0
        self._revived: list[int] = []
        carried = {call.index: call for call in self._living()}
        for position, index in enumerate(plan.carried):
            call = carried.get(index)
            if call is not None and call.unit is plan.sequence[position]:
                assert call.ran is not None
                call.ran = call.ran._replace(position=position)
                call.backward_stage = plan.partition.backward_stage(position) if plan.partition.is_training else None

    def _living(self) -> list[Call]:
        """Calls of earlier segments whose backward may still come; in order."""
        return [call for ref in self._carried if (call := ref()) is not None]

    @property
    def carried(self) -> tuple[int, ...]:
        """Indices of the calls of earlier segments whose backward has come in this one."""
        return tuple(sorted(self._revived))

    @property
    def sequence(self) -> tuple[Unit, ...]:
        """The units of those calls, and of the calls of this segment."""
        return (*(self._called[index] for index in self.carried), *self._called[self._first_call :])

    def end_segment(self) -> None:
        """Stops at a barrier: releases tickets and the lock, and keeps what later segments may need."""
        self.shared.lock.release(self.state)
        versions: dict[Unit, tuple[int, ...]] = {}
        if not self.has_backward:
            self.calls[:0] = self._living()
        for call in self.calls:
            if call.unit not in versions:
                versions[call.unit] = versions_of(call.unit)
            self._route.put_aside(call, versions[call.unit])
        # What nothing leads to any more goes: the node of the cut is what holds a call.
        self._carried = [weakref.ref(call) for call in self.calls]
        self.calls.clear()
        self._route.rest()
        self.shared.gate.retire(self.slot)

    # --- stages and devices ------------------------------------------------------------------------------------

    @property
    def device(self) -> Device:
        """The worker that the micro-batch is on."""
        return self._route.device

    def owner_of(self, tensor: Tensor) -> Device | None:
        """The worker that has ``tensor``; None if it is on the host."""
        return None if self.device.aliases_host else self._activations.owner(tensor)

    @property
    def is_flushing(self) -> Callable[[], bool]:
        """Tells whether the engine itself walks the user code graph of this micro-batch at the moment."""
        return self._flushing.is_active

    @property
    def saved_bytes(self) -> int:
        """Bytes of activations that this micro-batch has put on the host."""
        return self._route.saved.num_bytes

    def _locate(self, unit: Unit) -> int | None:
        """Position of this call in the plan; None if it is off the plan."""
        sequence = self.shared.plan.sequence
        for position in range(self._next_position, len(sequence)):
            if sequence[position] is unit:
                self._next_position = position + 1
                return position
        self.num_off_plan += not self.shared.plan.recording
        return None

    # --- forward -----------------------------------------------------------------------------------------------

    def call_unit(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a unit that user code has called; the calling thread holds the user-code lock."""
        self.shared.gate.check()
        if self._in_backward:
            return self._run_in_backward(unit, args, kwargs)
        call = Call(unit, len(self._called), self.shared.trained(unit), self._flushing)
        self._called.append(unit)
        position = self._locate(unit)
        side_values = self._take_side_inputs(call)
        is_training = unit.module.training
        # From here on nothing is shared with other micro-batches until the results are written down.
        self.shared.lock.release(self.state)
        try:
            leaves: list[Any] = []
            call.structure = trees.flatten_call(args, kwargs, side_values, leaves)
            done = self._run_call(call, position, leaves, is_training)
        finally:
            self.shared.lock.acquire(self.state)
        result, outputs = done.unit, done.outputs
        for order, (home, name, value) in enumerate(result.written):
            self.shared.lock.write(self.state, home, name, outputs.get(("attribute", order, name), value))
        result_leaves = [
            leaves[done.passed_through[i]] if i in done.passed_through else outputs.get(i, leaf)
            for i, leaf in enumerate(result.leaves)
        ]
        return trees.unflatten(result.structure, result_leaves)

    def _run_call(self, call: Call, position: int | None, leaves: list[Any], is_training: bool) -> ForwardResult:
        """Moves to the device of the call, runs it there, cuts the graph."""
        call.autocast = autocast_state(self.shared.autocast_device)
        call.differentiable = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad]
        differentiates = self.shared.training and torch.is_grad_enabled()
        records = differentiates and (bool(call.differentiable) or any(call.trained))
        self._go_to_call(call, position, leaves)
        done = self._compute(call, position, leaves, records, is_training)
        if records:
            self._forward.cut(call, done, leaves)
            self.calls.append(call)
        return done

    def _take_side_inputs(self, call: Call) -> list[Any]:
        """Attributes that this micro-batch set on the unit's modules are inputs as well; their values."""
        if self.state.overlay:
            members = self.shared.members_of(call.unit)
            call.side = [(m, name) for (key, name), (m, _) in self.state.overlay.items() if key in members]
        return [read(module, name) for module, name in call.side]

    def _go_to_call(self, call: Call, position: int | None, leaves: list[Any]) -> None:
        partition = self.shared.plan.partition
        if position is None:
            self._route.move_to(max(self._route.stage, 0))
            stage = self._route.stage
        else:
            stage = partition.forward_stage(position)
            if stage != self._route.stage:  # nobody need wait for calls that were skipped until this one has its turn
                self.shared.gate.pass_position(self.slot, position)
            self._route.move_to(stage, leaves, f"inputs {call.unit.name}")
            call.backward_stage = partition.backward_stage(position) if partition.is_training else None
        call.kept = partition.stages[stage].kind is StageKind.FUSED and not self.shared.plan.recording

    def _compute(
        self, call: Call, position: int | None, leaves: list[Any], records: bool, is_training: bool
    ) -> ForwardResult:
        unit = call.unit
        key = (
            self.shared.training, records, torch.is_grad_enabled(), is_training, position, len(leaves),
            tuple(call.differentiable), call.trained, call.autocast,
            tuple(x for x in leaves if x is None or type(x) in (bool, str)),
        )  # fmt: skip
        facts = unit.facts.get(key)
        if position is not None and (unit.has_buffers if facts is None else facts.buffers):
            self.shared.await_buffers(unit, position, self.slot)
        device = self.device
        counts = self.shared.is_measured or device.counts_activations
        input_bytes = num_bytes_of(leaves) if counts else 0
        with device.computing():
            replica = self._replica(call, learns=facts is None)
            call.facts = facts
            booked = self._route.book_forward(call, input_bytes)
            changes_buffers = facts is None or bool(facts.buffers)
            if changes_buffers:
                replica.load_buffers(own=call.kept)
            started = device.stamp()
            done = self._forward.run(call, replica, leaves, records=records, key=key, full=self._replica)
            ended = device.stamp()
            self._activations.settle()
            output_bytes = num_bytes_of(done.outputs.values()) if counts else 0
            replica = done.replica
            self._route.rebook_forward(call, input_bytes, booked, has_learned=facts is None)
            if changes_buffers and call.kept and device.aliases_host:
                replica.load_buffers()
            self._free_recorded(replica)
        if position is not None:
            self.shared.gate.pass_position(self.slot, position + 1)
        elif self.shared.plan.recording:
            position = call.index - self._first_call  # in the plan that will be made of it
        assert call.facts is not None
        call.ran = Run(
            device, "F", unit.name, started, ended, self._route.stage, position,
            call.kept, facts is None or done.unit.was_compiled, input_bytes, output_bytes,
            call.facts.bytes_for(input_bytes)[1],
        )  # fmt: skip
        self.runs.append(call.ran)
        return done

    def _replica(self, call: Call, *, learns: bool = False) -> Replica:
        replica = self.shared.replicas.get(call, self.device, self.shared.lock.baseline, learns=learns)
        if not self.device.aliases_host:
            self.shared.loader.prefetch(self.device)
        return replica

    def _free_recorded(self, replica: Replica) -> None:
        """The recording runs all units on one device: what takes memory there must go at once."""
        if self.shared.plan.recording and not self.device.aliases_host:
            replica.harvest_now(self.shared.gradients)
            replica.unload()

    def _run_in_backward(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A unit called by user code's own recomputation (activation checkpointing around units): runs inline."""
        made = self._replayed.setdefault(unit, [i for i, u in enumerate(self._called) if u is unit])
        call = Call(unit, made[-1] if made else len(self._called), self.shared.trained(unit), self._flushing)
        leaves: list[Any] = []
        call.structure = trees.flatten_call(args, kwargs, [], leaves)
        with self.shared.lock.released(self.state), self.device.computing():
            replica = self._replica(call, learns=True)
            replica.has_gradients = torch.is_grad_enabled()
            replica.book_gradients(replica.has_gradients)
            self._loose.own.update(replica.leaves)
            started = self.device.stamp()
            result = self._runner.run(call, replica, leaves)
            self.runs.append(Run(self.device, "F", unit.name, started, self.device.stamp(), self._route.stage))
        if len(made) > 1 and result.draws:
            raise RuntimeError(
                f"unit {unit.name!r} draws random numbers, is called {len(made)} times, and sits in an activation "
                "checkpoint of the user code, so it cannot be told which call is run again. Remove the checkpoint: "
                "RoundPipe recomputes units by itself."
            )
        return trees.unflatten(result.structure, result.leaves)

    # --- backward ----------------------------------------------------------------------------------------------

    def backward(self, roots: list[tuple[Tensor, Tensor]], *, retain_graph: bool = False) -> None:
        """From the loss to the parameters; called without the user-code lock.

        Args:
            roots: tensors and their gradients; emptied, so that the graph of the loss dies when it has been walked.
            retain_graph: whether it may be walked again, in another segment.
        """
        # The forward is over, also for calls at the end that this micro-batch has skipped.
        self.shared.gate.pass_position(self.slot, _ALL_POSITIONS)
        stages = self.shared.plan.partition.stages
        fused = next((stage.index for stage in stages if stage.kind is StageKind.FUSED), len(stages) - 1)
        self._route.move_to(fused)
        self._in_backward = self.has_backward = True
        self.calls[:0] = self._living()
        self._loose.look_up([*(node_of(root) for root, _ in roots), *self.user_code_nodes()])
        with self._user_code_backward("loss"):
            self._pending.run_backward([root for root, _ in roots], [gradient for _, gradient in roots])
        roots.clear()
        kept: list[Call] = []
        try:
            while self.calls:
                call, stays = self.calls.pop(), False
                try:
                    stays = self._backward_of(call, retain_graph)
                finally:
                    if stays:
                        kept.append(call)
                    else:
                        self._route.forget(call)
            self._flush()
            if loose := self._loose.take():
                self.shared.gradients.add_loose(loose, self.index)
        finally:
            self.calls += kept[::-1]

    def _backward_of(self, call: Call, retain_graph: bool) -> bool:
        """Goes to the stage of the call's backward and runs it; whether it may have to run (again) later."""
        self.shared.gate.check()
        if call.backward_stage is not None:
            needed, what = _needed_in_backward(call), f"saved {call.unit.name}"
            self._route.move_to(call.backward_stage, needed, what)
        self._flush()
        if call.versions is not None and call.gradients:
            check_versions(call)
            self._revived.append(call.index)
        self._backward_call(call)
        return self.shared.meets and (retain_graph or not call.gradients)

    def _flush(self) -> None:
        if self._pending:
            with self._user_code_backward("user code"):
                self._pending.flush()

    @contextlib.contextmanager
    def _user_code_backward(self, what: str) -> Any:
        """Around backward through user code. With the user-code lock where that runs user code again, or depends on
        flags of
        parameters that each micro-batch has for itself."""
        device = self.device
        if self.shared.backward_runs_user_code.is_set() or self.shared.lock.switches_flags:
            self.shared.lock.acquire(self.state)
        started = device.stamp()
        self.state.loose = self._loose
        try:
            yield
        finally:
            self.state.loose = None
            self.shared.lock.release(self.state)
        self.runs.append(Run(device, "B", what, started, device.stamp(), self._route.stage))

    def _backward_call(self, call: Call) -> None:
        if not call.gradients:
            return
        device = self.device
        assert call.ran is not None
        with device.computing():
            replica = self._replica(call)
            started, ended = self._backward.run(call, replica, functools.partial(self._drop_all_but_coming, call))
            if device.aliases_host and call.unit in self.shared.repeated and (harvested := replica.harvest()):
                self.shared.gradients.add_later(*harvested, (call.unit.order, call.index), self.slot)
            self._free_recorded(replica)
        self.runs.append(Run(device, "B", call.ran.name, started, ended, self._route.stage, *call.ran[6:]))
        for receiver, arrived in zip(call.receivers, call.input_gradients, strict=False):
            if arrived is not None:
                self._pending.deliver(receiver, arrived)

    def _drop_all_but_coming(self, call: Call) -> list[Any]:
        """What was brought for this call alone is dropped; what the next one in this stage needs, to be sent for."""
        if self.device.aliases_host:
            return []
        following = self.calls[-1] if self.calls else None
        is_here = following is not None and following.backward_stage in (None, self._route.stage)
        coming = _needed_in_backward(following) if following is not None and is_here else []
        still = set(map(id, coming))
        self._activations.drop([x for x in _needed_in_backward(call) if id(x) not in still])
        return coming

    def user_code_nodes(self) -> list[Any]:
        """Autograd nodes of user code that produced the inputs of calls."""
        edges = [receiver.edge for call in self.calls for receiver in call.receivers]
        return [edge.node for edge in edges if edge is not None]

    def finish(self) -> None:
        """Releases tickets, the lock and every reference to tensors of the step."""
        self.shared.lock.release(self.state)
        for call in (*self.calls, *self._living()):
            self._route.forget(call)
        self.calls.clear()
        self._pending.clear()
        self._loose.take()
        self._route.clear()
        self.state.call_unit = None
        self.shared.gate.retire(self.slot)


def _needed_in_backward(call: Call) -> list[Any]:
    """Tensors that have to come to the device for the backward of a call, as far as they are known."""
    saved = [] if call.kept else [x for x in call.leaves if isinstance(x, Offloaded)]
    return [*call.gradients.values(), *saved] if call.gradients else saved
