"""One micro-batch on its way through the stages: what happens in a call of a unit, and in the backward.

[Note: the walk]
A micro-batch is a thread that walks through the stages. Each call of a unit is located in the plan; its stage says on
which device it runs, and whether its graph is kept (F, then B: recomputed; fused: kept).

    call(unit), for each call in user code         backward(), after the loss: for call in reversed(calls)
        gate      wait for the turn in the stage       gate       wait for the turn in its backward stage
        inputs    come to the device                   flush      gradients that wait are pushed through user code
        weights   a replica of the unit                gradients  and saved inputs come to the device
        run       with its graph, or under no_grad     recompute  the graph, if it was not kept
        cut       the graph, towards user code         backward   of the unit, on the replica
        outputs   go back to user code                 deliver    the gradients of the inputs

A call whose outputs got no gradient is skipped in the backward.

Everything here runs on the thread of the micro-batch. It holds the user-code lock from the end of one call to the begin
of the next, and neither that lock nor a compute lane while it waits for the gate.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor

from ..autograd.fills import fill, fill_given, settled
from ..autograd.recompute import Call, PendingGradients, check_versions
from ..autograd.repeats import samples_of
from ..autograd.unit_backward import run_unit_backward
from ..autograd.unit_context import InsideUnit, UnitContext
from ..autograd.unit_run import autocast_state, take_along
from ..common import trees
from ..common.sizes import num_bytes_of
from ..devices.device import Device, Run
from ..devices.offload import TravellingActivations
from ..devices.transfer import Edge
from ..planning.partition import StageKind
from ..planning.schedule import Action
from ..usercode.implicit_transfers import put_on_mode, take_off_mode
from ..usercode.lock import UserCodeState
from ..usercode.loose_gradients import LooseGradients
from ..usercode.places import UserCodePlace
from ..weights.gradients import LOOSE
from ..weights.parameters import Replica
from ..weights.units import Unit
from .barrier import Attendance
from .books import ActivationBooks
from .context import SegmentContext, StepContext
from .execution import ForwardResult, cut, run_forward
from .requests import SegmentRecord

_ALL_POSITIONS = 1 << 60
_NOTHING = contextlib.nullcontext()


class Microbatch:
    """See [Note: the walk].

    Attributes:
        state: of the micro-batch in user code.
        index: identifies it to the user and seeds its random numbers.
        schedule_index: its index in the schedule of this segment.
        device: the one that it is on.
        place: where its user code is.
        attendance: how its thread and that of the step wait for each other.
        record: what is noted in this segment.
        pending: gradients that wait in user code.
    """

    def __init__(self, state: UserCodeState, step: StepContext, schedule_index: int, segment: SegmentContext) -> None:
        self.index = state.index
        self.state = state
        self.attendance = Attendance()
        resources, request = step.resources, step.request
        self._step = step
        self._lock = step.lock
        self._pool = resources.pool
        self._replicas = resources.replicas
        self._training = request.training
        self._calls: list[Call] = []  # whose backward may come, in order
        self._called: list[Unit] = []
        self._homes: list[Device] = []  # where they ran
        self._loose = LooseGradients(request.is_trained)
        owners = self._pool.owners
        self._activations = TravellingActivations(owners, self._pool.gpus)
        self.pending = PendingGradients(self._loose, self._activations)
        self._books = ActivationBooks(self._activations)
        anchor, weights = torch.zeros((), requires_grad=True), self._replicas.weights
        compiler = None if request.is_trial else resources.compiler
        self._context = UnitContext(
            state, step.lock, anchor, self._activations, weights, step.meets, compiler, InsideUnit(state)
        )
        self._has_lane = False  # in a backward that runs user code
        self.begin_segment(schedule_index, segment)
        self.device = self._pool[self._gate.device_of(Action(0, schedule_index))]
        is_engine = functools.partial(getattr, self.pending, "is_flushing")
        self.place = UserCodePlace(self.device, is_engine, owners)
        state.recomputed = self.place.recomputed
        self._activations.go_to(self.device)

    def begin_segment(self, schedule_index: int, segment: SegmentContext) -> None:
        """A run over a schedule begins, by another plan; called while the thread of the micro-batch stands still."""
        plan = segment.plan
        self.schedule_index, self._segment = schedule_index, segment
        self._gate, self._is_recording = segment.gate, plan.recording
        self._stage = -1
        self._num_called_before = len(self._called)
        self._next_position = len(plan.carried)
        self._replayed: dict[Unit, list[int]] = {}
        self.state.call_unit = self.call
        self.record = SegmentRecord(self.index)

    def _forget(self, call: Call) -> None:
        self._books.release(call)
        call.forget()

    # --- stages and devices ------------------------------------------------------------------------------------

    def _move_to(self, stage: int, values: list[Any], what: str) -> None:
        """Leaves the current stage and waits for the turn in ``stage``, a later one; stages in between are skipped.

        Args:
            values: what is needed there first: it travels meanwhile.
            what: that is, for the trace.
        """
        action = Action(stage, self.schedule_index)
        before, target = self.device, self._pool[self._gate.device_of(action)]
        if target is not before:
            # Before work of other micro-batches is queued on the device that is left.
            self._activations.offload(values, what)
        for passed in range(max(self._stage, 0), stage):
            self._gate.leave(Action(passed, self.schedule_index))
        self._stage, self.device, self.place.device = stage, target, target
        if target is before:
            self._activations.drop()
        else:
            self._activations.go_to(target)
        if not target.aliases_host:
            self._gate.approach(action)
            self._activations.send(values, what)
        self._gate.enter(action)
        self._segment.loader.begin(target)
        target.enter()
        target.throttle()

    def _replica(self, call: Call, *, learns: bool = True) -> Replica:
        if call.local is None:  # a graph that was kept is part of the replica that it was made on
            call.is_low = not learns and self._replicas.weights.is_low(call.unit, call.autocast)
        replica = self._replicas.get(
            call.unit, self.device, self._lock.baseline, is_low=call.is_low, trained=call.trained
        )
        if not self.device.aliases_host:
            self._segment.loader.prefetch(self.device)
        return replica

    # --- forward -----------------------------------------------------------------------------------------------

    def call(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a unit that user code has called; the calling thread holds the user-code lock, and has it afterwards."""
        self._gate.check()
        call = Call(unit, len(self._called), self._segment.trained(unit), self.pending, trains=self._training)
        self._called.append(unit)
        self.record.called.append(unit)
        position = self._locate(unit)
        if self._is_recording:
            self._lock.note_changed(self.state)
        side_values = take_along(call, self.state, is_recording=self._is_recording)
        is_training = unit.module.training
        # From here on nothing is shared with other micro-batches until the results are written down.
        state = self.state
        self._lock.release(state)
        if torch._C._len_torch_function_stack():
            take_off_mode(state)
        try:
            leaves: list[Any] = []
            call.structure = trees.flatten_call(args, kwargs, side_values, leaves)
            call.autocast = autocast_state(state.autocast_device)
            call.differentiable = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad]
            call.grad_mode = torch.is_grad_enabled()
            self._go_to_call(call, position, leaves)
            done = self._compute(call, position, leaves, is_training)
            cut(self._context, call, done, leaves)
            state.has_cuts = state.has_cuts or call.may_be_flagged
            if call.is_recorded:
                call.num_writes = self._replicas.num_writes
                self._calls.append(call)
        finally:
            if state.mode is not None:
                put_on_mode(state)
            self._lock.acquire(state)
        result, outputs, passed = done.unit, done.outputs, done.passed_through
        for attribute in result.written:
            place, value = (attribute.module, attribute.name), attribute.shown(outputs, leaves)
            if place in unit.fills:
                fill(self._lock, state, unit, place, value)
            else:
                self._lock.write(state, *place, value)
        if result.given:
            fill_given((args, kwargs), [(i, attribute.shown(outputs, leaves)) for i, attribute in result.given])
        result_leaves = [
            leaves[passed[i]] if i in passed else outputs.get(i, leaf) for i, leaf in enumerate(result.leaves)
        ]
        return trees.unflatten(result.structure, result_leaves)

    def _locate(self, unit: Unit) -> int | None:
        """Position of this call in the plan; None if it is off the plan."""
        sequence = self._segment.plan.sequence
        for position in range(self._next_position, len(sequence)):
            if sequence[position] is unit:
                self._next_position = position + 1
                return position
        self.record.num_off_plan += not self._is_recording
        return None

    def _go_to_call(self, call: Call, position: int | None, leaves: list[Any]) -> None:
        """The gate: waits for the turn in the stage of the call. Calls off the plan run where the micro-batch is."""
        plan, stage = self._segment.plan, max(self._stage, 0)
        if position is not None:
            stage, call.backward_stage = plan.stages_of[position]
            if stage != self._stage:  # skipped calls are not waited for until this one has its turn
                self._gate.pass_position(self.schedule_index, position)
        if stage > self._stage:
            self._move_to(stage, leaves if position is not None else [], f"inputs {call.unit.name}")
        call.kept = plan.keeps_graph[stage]

    def _compute(self, call: Call, position: int | None, leaves: list[Any], is_training: bool) -> ForwardResult:
        """Inputs, weights, run: on the device where the micro-batch is."""
        unit, device, segment = call.unit, self.device, self._segment
        self._homes.append(device)
        given = settled(call, leaves)
        kind = (
            self._training, call.grad_mode, is_training, len(given), len(call.hooks), tuple(call.differentiable),
            call.trained, call.autocast,
            tuple([x for x in given if x is None or type(x) in (bool, str)]),
        )  # fmt: skip
        key = position, kind
        facts = unit.facts.get(key)
        learns = facts is None
        if position is not None and (unit.has_buffers if learns else unit.written):
            segment.await_buffers(unit, position, self.schedule_index)
        changes_buffers = learns or bool(unit.written)
        counts = segment.is_measured or device.counts_activations
        input_bytes = num_bytes_of(leaves) if counts else 0
        booked = 0
        with device.computing():
            replica = self._replica(call, learns=learns)
            call.rely_on(facts)
            if device.counts_activations:
                booked = self._books.begin_forward(device, call, input_bytes)
            if changes_buffers:
                replica.load_buffers(own=call.kept, is_loaded=True)
            with device.issuing(unit.forward_pace):
                begun = device.begin()
                done = run_forward(self._context, call, replica, leaves, key=key, full=self._replica)
                ended = device.end(begun)
            replica = done.replica
            if learns and call.buffer_values:
                for earlier in self._calls:  # they have read what this call has found
                    if earlier.unit is unit and not earlier.buffer_values:
                        earlier.buffer_values = call.buffer_values
            if not device.aliases_host:
                self._activations.settle()
            if device.counts_activations:
                self._books.end_forward(device, call, input_bytes, booked, has_learned=learns)
            if changes_buffers and call.kept and device.aliases_host:
                replica.load_buffers()
            if call.is_recorded and (segment.compares or learns):
                call.samples = samples_of(done.unit.slots)
            if self._is_recording:
                self._segment.loader.free_recorded(replica)
        if position is not None:
            self._gate.pass_position(self.schedule_index, position + 1)
        elif self._is_recording:
            position = call.index - self._num_called_before  # in the plan that will be made of it
        assert call.facts is not None
        call.ran = Run(
            device, "F", unit.name, begun, ended, self._stage, position, call.kept,
            learns or done.unit.was_compiled, input_bytes, num_bytes_of(done.outputs.values()) if counts else 0,
            call.facts.bytes_for(input_bytes)[1],
        )  # fmt: skip
        self.record.runs.append(call.ran)
        return done

    # --- backward ----------------------------------------------------------------------------------------------

    def _begin_backward(self, nodes: list[Any]) -> None:
        """The forward of this segment has ended, also for calls at the end that this micro-batch has skipped.

        Args:
            nodes: of autograd, from which user code is going to be walked.
        """
        self._gate.pass_position(self.schedule_index, _ALL_POSITIONS)
        stages = self._segment.plan.partition.stages
        fused = next((stage.index for stage in stages if stage.kind is StageKind.FUSED), len(stages) - 1)
        if fused > self._stage:
            self._move_to(fused, [], "")
        self.record.has_backward = True
        if self._loose.look_up(nodes):
            self.state.on_late_code()

    def _backward_of_calls(self, first: int, retain_graph: bool) -> None:
        """From the last call that there is to the one with the index ``first``; nothing waits in user code then.

        Args:
            retain_graph: whether their graphs may be walked again, in another segment.
        """
        kept: list[Call] = []
        try:
            while self._calls and self._calls[-1].index >= first:
                call, stays = self._calls.pop(), False
                try:
                    stays = self._backward_of_call(call, retain_graph)
                finally:
                    if stays:
                        kept.append(call)
                    else:
                        self._forget(call)
            if self.pending:
                self._backward_of_user_code()
            if loose := self._loose.take():
                self._step.gradients.add_later(*loose, LOOSE, self.index)
        finally:
            self._calls += kept[::-1]

    def _backward_of_user_code(self, roots: list[tuple[Tensor, Tensor]] | None = None) -> None:
        """Backward through the graph of user code: from ``roots``, which are emptied, or from what waits there (flush).

        Holds the user-code lock where that runs user code again, which may call units, or depends on flags of
        parameters that each micro-batch has for itself.
        """
        device, state = self.device, self.state
        runs_code = self._step.resources.backward_runs_user_code.is_set()
        locks = runs_code or self._lock.switches_flags
        with (
            self._lock.walking(state) if locks and device.torch_device.type != "cpu" else _NOTHING,
            device.occupied() if runs_code else _NOTHING,
        ):
            if locks:
                self._lock.acquire(state)
            begun = device.begin()
            self._has_lane = runs_code
            put_on_mode(state)
            try:
                if roots is None:
                    self.pending.flush()
                else:
                    self.pending.run_backward([root for root, _ in roots], [gradient for _, gradient in roots])
            finally:
                take_off_mode(state)
                self._has_lane = False
                self._lock.release(state)
        what = "user code" if roots is None else "loss"
        ended = None if begun is None else device.stamp()
        self.record.runs.append(Run(device, "B", what, begun, ended, self._stage))
        if roots is not None:
            roots.clear()

    def _backward_of_call(self, call: Call, retain_graph: bool) -> bool:
        """Goes to the stage of the call's backward and runs it; whether it may have to run (again) later."""
        self._gate.check()
        if call.backward_stage is not None and call.backward_stage > self._stage:
            self._move_to(call.backward_stage, call.needed_in_backward(), f"saved {call.unit.name}")
        if self.pending:
            self._backward_of_user_code()
        if call.gradients:
            check_versions(call, has_changed=self._replicas.has_changed(call.unit, call.num_writes))
            if call.versions is not None:
                self.record.revived[call.index] = call.unit
            self._compute_backward(call)
            for receiver, arrived in zip(call.receivers, call.input_gradients, strict=False):
                if arrived is not None:
                    self.pending.deliver(receiver, arrived)
        stays = self._step.meets and (retain_graph or not call.gradients)
        call.gradients = {} if stays else call.gradients
        return stays

    def _compute_backward(self, call: Call) -> None:
        """Gradients, recompute, backward: on the device where the micro-batch is."""
        device, activations, name = self.device, self._activations, call.unit.name
        counts = device.counts_activations
        with device.computing():
            replica = self._replica(call, learns=False)
            replica.book_gradients(True)
            gradients = list(call.gradients.values())
            if not device.aliases_host:
                gradients = activations.receive(gradients, Edge.OUTPUT_GRADIENTS, f"gradient {name}")
            leaves = None if call.kept else activations.receive(call.leaves, Edge.RELOADED, f"saved {name}")
            booked = 0
            if not device.aliases_host:
                coming = self._drop_all_but_coming(call)
                booked = self._books.begin_backward(device, call) if counts else 0
                activations.send(coming, "saved inputs")
            with device.issuing(call.unit.backward_pace):
                begun = device.begin()
                run_unit_backward(self._context, call, replica, gradients, leaves, self._loose)
                ended = device.end(begun)
            if not device.aliases_host:
                activations.settle()
            elif call.unit in self._segment.repeated and (found := replica.harvest()):
                self._step.gradients.add_later(*found, (call.unit.order, call.index), self.schedule_index)
            if counts:
                self._books.end_backward(device, booked, num_bytes_of(call.input_gradients))
            if self._is_recording:
                self._segment.loader.free_recorded(replica)
        assert call.ran is not None
        self.record.runs.append(Run(device, "B", name, begun, ended, self._stage, *call.ran[6:]))

    def _drop_all_but_coming(self, call: Call) -> list[Any]:
        """What was brought for this call alone is dropped; what the next one in this stage needs, to be sent for."""
        following = self._calls[-1] if self._calls else None
        is_here = following is not None and following.backward_stage in (None, self._stage)
        coming = following.needed_in_backward() if following is not None and is_here else []
        still = set(map(id, coming))
        self._activations.drop([x for x in call.needed_in_backward() if id(x) not in still])
        return coming
