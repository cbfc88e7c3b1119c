"""One step: its micro-batch threads, their runs over schedules, their barriers, the first error.

A step is one segment, or several where micro-batches meet; see [Note: barriers] in :mod:`engine.barrier`. The threads
begin in the first segment, and the step waits at its end, on every path, until they have nothing to do. Between two
segments they all stand still: no weight is on its way, the patches of a segment are undone, and the thread that runs
the step has everything for itself. Everything here runs on that thread.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from torch import Tensor, nn

from ..common.errors import StepAborted
from ..common.seeds import derive_seed
from ..common.threads import Surroundings, Worker, run_threads
from ..devices.device import DeviceLostError
from ..devices.pool import DevicePool
from ..planning.schedule import Schedule
from ..planning.spans import Span
from ..planning.timeline import Timeline
from ..usercode.collected_lists import CollectedLists
from ..usercode.lock import UserCodeLock, UserCodeState
from ..usercode.loose_parameters import LooseParameters
from ..weights.events import tell
from ..weights.gradients import GradientStore
from ..weights.placement import Loader
from ..weights.units import UnitTable
from .barrier import Barrier, Collective, Place, agreed, ends_closure, raising, returning
from .context import Failure, Resources, SegmentContext, StepContext
from .gate import Gate
from .microbatch_thread import MicrobatchThread
from .patches import patch, torch_patched
from .plans import Plan
from .requests import SegmentRecord, StepRequest, StepResult
from .tracing import Clock, Trace, TracedGate, TracedUserCodeLock


class Step:
    """Runs one step."""

    def __init__(self, request: StepRequest, resources: Resources, table: UnitTable, trace: Trace | None) -> None:
        self._request = request
        self._resources = resources
        self._table = table
        self._trace = trace
        self._failure = failure = Failure()
        shared = resources.exempt, failure.aborted.is_set, resources.switches, resources.draws_foreign
        self._lock = UserCodeLock(*shared) if trace is None else TracedUserCodeLock(trace, *shared)
        count, autocast_device = len(request.microbatches), request.autocast_device
        seeds = [derive_seed(request.seed, 0 if request.is_trial else index) for index in range(count)]
        self._states = [UserCodeState(i, seed, count == 1, autocast_device) for i, seed in enumerate(seeds)]
        for state in self._states:
            state.on_module_hook = resources.replicas.note_hook
            state.on_late_code = resources.backward_runs_user_code.set
            state.on_compiled = resources.by_user.note
        self._threads: dict[int, MicrobatchThread] = {}
        self._workers: list[Worker] = []
        self._place = Place(request.key)
        self._clock = Clock(resources.pool)
        # How the micro-batches go on after a barrier, when the next segment begins.
        self._outcomes: list[Callable[[], Any]] = []
        self._gradients: dict[nn.Parameter, Tensor] = {}
        has_copies = not all(device.aliases_host for device in resources.pool.devices)
        self._adder = resources.adders.take() if has_copies else None
        gradients = GradientStore(
            resources.replicas.weights.gradient_dtypes, self._adder, num_devices=len(resources.pool)
        )
        self._shared = StepContext(
            request,
            resources,
            self._lock,
            gradients,
            LooseParameters(gradients, table.root.parameters, resources.replicas.note_write),
            Surroundings(request.autocast_device),
            self._failure,
        )
        self._records: list[SegmentRecord] = []
        self._traced: list[Span] = []
        timeline_of = functools.partial(_timeline, self._clock, self._records, self._traced, len(resources.pool))
        self._result = StepResult([], {}, timeline_of, num_microbatches=len(self._states))
        self._num_calls = -1  # of the segment that the result shows
        self._planning_s = 0.0
        self._compares = False  # whether units are compared in the segment

    def run(self) -> StepResult:
        """Runs the step to its end.

        Raises:
            BaseException: the first exception of user code in any micro-batch, with its traceback.
            BarrierError: if micro-batches do not meet for the same.
            DeviceLostError: if a device is lost; or what became of the driver's error on its way.
        """
        pool = self._resources.pool
        before = pool.bytes_moved
        self._run()
        moved = zip(pool.bytes_moved, before, strict=True)
        result = self._result
        result.bytes_up, result.bytes_down = (tuple(n - m for n, m in zip(*counts, strict=True)) for counts in moved)
        result.gradients = self._gradients
        result.peak_memory_bytes = tuple(device.peak_memory_bytes for device in pool.devices)
        result.step_ms = self._clock.host_ms(perf_counter() - self._planning_s)
        return result

    def _run(self) -> None:
        lists = self._lists = CollectedLists(
            self._table.user_code,
            self._table.filled,
            self._table.modules,
            (*self._table.user_code, *self._table.blocks),
        )
        succeeded = False
        self._resources.pool.open()
        try:
            if self._adder is not None:
                # It waits for copies, for which CUDA needs a context on the GPU of the thread: on one of the pool.
                self._adder.call(self._resources.pool[0].enter, "roundpipe-accumulation")
            self._lock.open(self._states, lists.copies)
            with torch_patched():
                self._run_segments(lambda arrival: arrival is None)
            self._lock.suspend()
            threads = [self._threads[state.index] for state in self._states]
            self._result.outputs = [thread.output for thread in threads]
            self._result.saved_bytes = sum(thread.saved_bytes for thread in threads)
            self._check_devices()
            overlays = [state.overlay for state in self._states]
            if self._request.merge is not None:
                lists.collect(overlays, self._request.merge)
            succeeded = True
        finally:
            with contextlib.ExitStack() as ending:  # all of it, even if one raises: from the last to the first
                ending.callback(tell, "step_ended" if succeeded else "step_failed")
                if self._adder is not None:
                    ending.callback(self._resources.adders.give_back, [self._adder])
                ending.callback(self._shared.gradients.close)
                if self._request.reduction is not None:
                    ending.callback(self._request.reduction.stop)
                ending.callback(self._resources.pool.close)
                ending.callback(self._shared.loose_parameters.drop)
                ending.callback(self._resources.replicas.end_step)
                ending.callback(self._lock.close, self._states, keep_writes=succeeded)
                ending.callback(self._stop)

    def _check_devices(self) -> None:
        """Before the results count: code of the user may have caught the error of a device that is lost."""
        lost = self._resources.pool.find_lost()
        if lost:
            raise DeviceLostError(f"{lost[0].name} is lost: {lost[0].lost}")

    # --- segments and barriers -----------------------------------------------------------------------------------

    def _run_segments(self, is_end: Callable[[Collective | None], bool]) -> list[Any]:
        """Lets the micro-batches run, and meet, until they have come to an end; the values that they bring there."""
        while True:
            self._run_segment()
            deferred, present = agreed([self._threads[state.index].attendance for state in self._states])
            self._end_segment(present)
            for collectives in deferred:
                self._hold(collectives, {})
            if is_end(None if present is None else present[0]):
                return [] if present is None else [collective.value for collective in present]
            assert present is not None
            try:
                result = self._hold(present, self._gradients)
            except Exception as error:  # user code, as any: the micro-batches may want to catch it
                if self._failure.aborted.is_set():
                    raise
                self._outcomes = [raising(error, state.index) for state in self._states]
            else:
                self._outcomes = [returning(result)] * len(self._states)
            self._place.passed(present[0])

    def _end_segment(self, present: list[Collective] | None) -> None:
        """The micro-batches have come to a barrier, or (None) to their end: gradients that have come home are taken,
        unless they wait for more."""
        if present is None and self._request.reduction is not None:
            self._gradients = self._request.reduction.finish(self._shared.gradients)
        elif present is None or present[0].takes_gradients:
            self._gradients = self._shared.gradients.take()  # by the caller, with its intra-op threads
        else:
            self._gradients = {}
            self._shared.gradients.settle()
        if present is not None:
            self._result.has_met = True
            self._resources.replicas.end_step()

    def _hold(self, collectives: list[Collective], gradients: dict[nn.Parameter, Tensor]) -> Any:
        """Makes a call that all micro-batches have come for."""
        first = collectives[0]
        with contextlib.ExitStack() as gathered:
            gathered.enter_context(self._lock.gathered(self._states))

            def call_closures() -> list[Any]:
                gathered.close()
                outer, self._place = self._place, self._place.in_closure_of(first)
                self._outcomes = [
                    functools.partial(self._threads[index].call_closure, collective.closure)
                    for index, collective in enumerate(collectives)
                ]
                values = self._run_segments(ends_closure)
                self._place = outer
                gathered.enter_context(self._lock.gathered(self._states))
                return values

            values = [collective.value for collective in collectives]
            return first.perform(Barrier(values, gradients, call_closures))

    def _run_segment(self) -> None:
        """One segment of all micro-batches, by the plan for it, which may be made on the way."""
        resources, request, key = self._resources, self._request, self._place.key
        plans = resources.plans
        resources.replicas.weights.begin_step(request.key, training=request.training, helper=self._adder)
        count = len(self._states)
        with contextlib.ExitStack() as stack:
            parameters = self._table.parameters()
            self._compares = request.training and resources.compared_steps.begin(key, parameters)
            patch(stack, self._table, parameters, resources.num_threads)
            plan, first = plans.of(key), 0
            if plan is None:
                recording = plans.recording(request.training)
                with self._lists.watching(self._give) as watch, self._lock.recording(self._states[0], watch.look):
                    recorded = self._record(*recording)
                places = [place for _, _, held_by in watch.changed for place in held_by]
                self._table.filled_by_users.update(dict.fromkeys(places))
                training = recorded.has_backward if self._shared.meets else request.training and not request.is_trial
                plan, first = plans.record(key, recorded, count, training), 1
            schedule, records = None, []
            if first < count:
                schedule = plans.schedule(plan, count - first)
                records = self._run_schedule(plan, schedule, range(first, count))
            self._shared.loose_parameters.send_sums()
            resources.replicas.coming_buffers.arrive()
        self._note_segment(plan, schedule, records)
        started = perf_counter()
        self._result.replanned |= plans.note_step(key, records, count)
        self._planning_s += perf_counter() - started

    def _record(self, plan: Plan, schedule: Schedule) -> SegmentRecord:
        """Lets the first micro-batch run alone, on the first device."""
        device = self._resources.pool[0]
        taken = device.watch_allocator()
        (recorded,) = self._run_schedule(plan, schedule, range(1))
        # What is on the books now is of parameters that user code uses, and stays there until the step ends.
        recorded.peak_bytes = max(0, taken() - device.memory.used)
        return recorded

    def _give(self, index: int, module: nn.Module, name: str, value: Any, original: Any) -> None:
        """Gives a micro-batch an attribute of its own, unless it has one in the place of ``original``; none is
        current."""
        state, key = self._states[index], (id(module), name)
        if key not in state.overlay or state.overlay[key][1] is original:
            self._lock.note(state, module, name)
            state.overlay[key] = (module, value)

    def _note_segment(self, plan: Plan, schedule: Schedule | None, records: Sequence[SegmentRecord]) -> None:
        """A segment has ended, in which these micro-batches ran by the plan."""
        result = self._result
        self._records += records
        if self._trace is not None and records:
            self._traced += self._trace.spans(self._clock)
        result.num_off_plan += sum(record.num_off_plan for record in records)
        if len(plan.sequence) > self._num_calls:
            self._num_calls, result.schedule, result.partition = len(plan.sequence), schedule, plan.partition

    # --- threads -------------------------------------------------------------------------------------------------

    def _run_schedule(self, plan: Plan, schedule: Schedule, indices: range) -> list[SegmentRecord]:
        """Lets micro-batches run over a schedule, until each has come to a barrier or has ended."""
        resources, shared = self._resources, self._shared
        loader = Loader(
            plan.stage_runs_in(schedule),
            resources.pool,
            resources.replicas,
            shared.gradients,
            is_recording=plan.recording,
        )
        # What has come in one segment may not be all of it.
        if self._request.reduction is not None and not (plan.recording or self._shared.meets):
            shared.gradients.foresee(loader.foreseen())
            self._request.reduction.begin(shared.gradients, self._failure.note)
        end_stage_run = functools.partial(_end_stage_run, shared.loose_parameters, loader, resources.pool)
        if self._trace is None:
            gate = Gate(schedule, end_stage_run)
        else:
            self._trace.begin(schedule, indices)
            gate = TracedGate(self._trace, schedule, end_stage_run)
        is_measured = resources.plans.measures(self._place.key)
        for device in resources.pool.devices:
            device.times_runs = is_measured or resources.times_steps or self._trace is not None
        segment = SegmentContext(plan, gate, loader, self._lock, is_measured, plan.recording or self._compares)
        self._failure.gate = gate
        gate.join(len(indices))
        num_known = len(self._workers)
        go_on: list[Callable[[], None]] = []
        for schedule_index, index in enumerate(indices):
            known = self._threads.get(index)
            if known is None:
                self._workers.append(resources.workers.take())
                known = self._threads[index] = MicrobatchThread(self._states[index], shared, schedule_index, segment)
                go_on.append(functools.partial(known.begin, self._workers[-1]))
            else:
                go_on.append(known.resume(schedule_index, segment, self._outcomes[index]))
        threads = [self._threads[index] for index in indices]
        run_threads(
            self._workers[num_known:], go_on, [thread.attendance.halted for thread in threads], self._failure.note
        )
        self._raise_error()
        return [thread.record for thread in threads]

    # --- failures ------------------------------------------------------------------------------------------------

    def _raise_error(self) -> None:
        if self._failure.error is not None:
            self._stop()
            error, self._failure.error = self._failure.error, None
            try:
                raise error
            finally:
                del error

    def _stop(self) -> None:
        """Lets the micro-batches that still stand at a barrier come to their end, and waits for all threads."""
        have_ended = all(thread.attendance.has_ended for thread in self._threads.values())
        if not have_ended:
            self._failure.note(StepAborted())
            for thread in self._threads.values():
                thread.attendance.resume(returning(None))
        self._resources.workers.give_back(self._workers, are_done=have_ended)
        self._workers.clear()
        for state in self._states:
            state.meet = None
        self._threads.clear()
        self._outcomes.clear()


def _end_stage_run(loose_parameters: LooseParameters, loader: Loader, pool: DevicePool, device_index: int) -> None:
    """The last micro-batch of a stage run has left it. What user code needs no more makes room for the next one."""
    loose_parameters.end_stage_run(pool[device_index])
    loader.end_stage_run(device_index)


def _timeline(clock: Clock, records: Sequence[SegmentRecord], traced: Sequence[Span], num_devices: int) -> Timeline:
    """What the micro-batches computed by plan, and what was traced besides."""
    computed = [span for record in records for span in clock.spans_of(record.runs, record.index)]
    return Timeline((*computed, *traced), num_devices)
