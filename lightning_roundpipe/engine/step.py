"""One step in flight: its micro-batch threads, their runs over schedules, their barriers, the first error.

A step is one segment, or several where micro-batches meet; see [Note: barriers] in :mod:`engine.barrier`. The threads
begin in the first segment, and the step waits at its end, on every path, until they have nothing to do. Between two
segments they all stand still: no weight is on its way, the patches of a segment are undone, and the thread that runs
the step has everything for itself.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from time import perf_counter
from typing import Any

from torch import Tensor, nn

from ..common.errors import StepAborted
from ..common.threads import Worker, run_threads
from ..devices.pool import DevicePool
from ..planning.schedule import Schedule
from ..usercode.collected_lists import CollectedLists
from ..usercode.lock import UserCodeLock, UserCodeState
from ..usercode.loose_parameters import LooseParameters
from ..weights.events import tell
from ..weights.gradients import GradientStore
from ..weights.placement import Loader
from ..weights.units import UnitTable
from .barrier import Barrier, Collective, Place, agreed, closure_end, ends_closure, raising, returning
from .context import Plan, StepContext, slots_of
from .gate import Gate
from .microbatch_thread import MicrobatchThreads
from .patches import classes_patched, patch
from .report import Report
from .requests import StepRequest
from .resources import Resources
from .tracing import Clock, Trace, TracedGate, TracedUserCodeLock
from .walk import Walk


class Step:
    """Runs one step.

    Attributes:
        gradients: of masters, that the last segment has brought home.
        report: what is noted about it.
    """

    def __init__(self, request: StepRequest, resources: Resources, table: UnitTable, trace: Trace | None) -> None:
        self._request = request
        self._resources = resources
        self._table = table
        self._trace = trace
        self._aborted = threading.Event()  # shared with the lock, which must not know the step: no cycles
        if trace is None:
            self._lock = UserCodeLock(resources.exempt, self._aborted.is_set, resources.switches)
        else:
            self._lock = TracedUserCodeLock(trace, resources.exempt, self._aborted.is_set, resources.switches)
        count = len(request.microbatches)
        self._states = [UserCodeState(i, request.seed) for i in range(count)]
        for state in self._states:
            state.on_module_hook = resources.replicas.note_hook
            state.on_checkpoint = resources.backward_runs_user_code.set
        self._walks: dict[int, Walk] = {}
        self._workers: list[Worker] = []
        self._gate: Gate | None = None
        self._error: BaseException | None = None
        self._error_lock = threading.Lock()
        self._place = Place(request.key)
        self._clock = Clock(resources.pool)
        # How the micro-batches go on after a barrier, when the next segment begins.
        self._outcomes: list[Callable[[], Any]] = []
        self.gradients: dict[nn.Parameter, Tensor] = {}
        self._store = GradientStore(resources.replicas.weights.gradient_dtypes)
        self._loose_parameters = LooseParameters(self._store)
        leaf_names = resources.replicas.leaf_names
        self._threads = MicrobatchThreads(request, self._lock, self._loose_parameters, leaf_names)
        self.report = Report()

    @property
    def outputs(self) -> list[Any]:
        """Results of the user's function, by micro-batch."""
        return [self._threads.outputs[state.index] for state in self._states]

    def run(self) -> None:
        """Runs the step to its end.

        Raises:
            BaseException: the first exception of user code in any micro-batch, with its traceback.
            BarrierError: if micro-batches do not meet for the same.
        """
        lists = CollectedLists(self._table.user_code)
        succeeded = False
        self._resources.pool.open()
        try:
            self._lock.open(self._states, lists.copies)
            with classes_patched():
                self._run_segments(lambda arrival: arrival is None)
            self._lock.suspend()
            self.report.saved_bytes = sum(walk.saved_bytes for walk in self._walks.values())
            if self._request.merge is not None:
                lists.collect([state.overlay for state in self._states], self._request.merge)
            succeeded = True
        finally:
            self._stop()
            self._lock.close(self._states, keep_writes=succeeded)
            self._resources.replicas.end_step()
            self._loose_parameters.drop()
            self._resources.pool.close()
            tell("step_ended" if succeeded else "step_failed")

    # --- segments and barriers -----------------------------------------------------------------------------------

    def _run_segments(self, is_end: Callable[[Collective | None], bool]) -> list[Any]:
        """Lets the micro-batches run, and meet, until they have come to an end; the values that they bring there."""
        while True:
            self.gradients = self._run_segment()
            deferred, present = agreed([self._walks[i].attendance for i in range(len(self._states))])
            for collectives in deferred:
                self._hold(collectives, {})
            if is_end(None if present is None else present[0]):
                return [] if present is None else [collective.value for collective in present]
            assert present is not None
            try:
                result = self._hold(present, self.gradients)
            except Exception as error:  # user code, as any: the micro-batches may want to catch it
                if self._aborted.is_set():
                    raise
                self._outcomes = [raising(error, state.index) for state in self._states]
            else:
                self._outcomes = [returning(result)] * len(self._states)
            self._place.passed(present[0])

    def _hold(self, collectives: list[Collective], gradients: dict[nn.Parameter, Tensor]) -> Any:
        """Makes a call that all micro-batches have come for."""
        first = collectives[0]
        with contextlib.ExitStack() as gathered:
            gathered.enter_context(self._lock.gathered(self._states))

            def call_closures() -> list[Any]:
                gathered.close()
                outer, self._place = self._place, self._place.in_closure_of(first)
                closures = enumerate(collective.closure for collective in collectives)
                self._outcomes = [functools.partial(self._call_closure, *numbered) for numbered in closures]
                values = self._run_segments(ends_closure)
                self._place = outer
                gathered.enter_context(self._lock.gathered(self._states))
                return values

            values = [collective.value for collective in collectives]
            return first.perform(Barrier(values, gradients, call_closures))

    def _call_closure(self, index: int, closure: Callable[[], Any] | None) -> Any:
        """In the thread of a micro-batch, at a barrier: calls the closure, and comes back."""
        assert closure is not None
        try:
            value = closure()
        except BaseException as error:
            self._fail(error)  # the barrier is over as well
            raise
        return self._stand(self._walks[index], closure_end(value))

    def _meet(self, index: int, collective: Collective, roots: list[tuple[Tensor, float]], retain_graph: bool) -> Any:
        """In the thread of a micro-batch, which runs user code: see :func:`barrier.meet`."""
        walk = self._walks[index]
        if collective.is_deferred:
            walk.attendance.deferred.append(collective)
            return None
        weighted = [self._threads.root(walk, loss, share) for loss, share in roots if share != 0.0]
        roots.clear()
        if weighted:
            self._lock.release(walk.state)
            walk.backward(weighted, retain_graph=retain_graph)
        return self._stand(walk, collective)

    def _stand(self, walk: Walk, arrival: Collective) -> Any:
        walk.end_segment()
        go_on = walk.attendance.await_outcome(arrival, self._aborted)
        self._lock.acquire(walk.state)
        return go_on()

    def _run_segment(self) -> dict[nn.Parameter, Tensor]:
        """One segment of all micro-batches, from the plan for it to the gradients that have come home."""
        resources, request, key = self._resources, self._request, self._place.key
        weights, plans = resources.replicas.weights, resources.plans
        weights.begin_step(request.key, training=request.training)
        count = len(self._states)
        with contextlib.ExitStack() as stack:
            patch(stack, resources, self._table)
            plan, first = plans.of(key), 0
            if plan is None:
                recording = plans.recording(request.training)
                (walk,) = self._run_schedule(*recording, range(1))
                training = walk.has_backward if request.meets else request.training
                plan, first = plans.record(key, walk, count, training), 1
            schedule, planned = None, []
            if first < count:
                schedule = plans.schedule(plan.partition.num_stages, count - first)
                planned = self._run_schedule(plan, schedule, range(first, count))
            gradients = self._gradients_at_home()
        self.report.note_segment(plan, schedule, planned, self._clock, self._trace)
        started = perf_counter()
        self.report.replanned |= plans.note_step(key, planned, count)
        self.report.planning_s += perf_counter() - started
        if request.meets:
            resources.replicas.end_step()
        return gradients

    def _gradients_at_home(self) -> dict[nn.Parameter, Tensor]:
        if self._request.meets:
            self._loose_parameters.send_sums()
        else:
            self._loose_parameters.take_home()
        return self._store.take()

    # --- threads -------------------------------------------------------------------------------------------------

    def _run_schedule(self, plan: Plan, schedule: Schedule, indices: range) -> list[Walk]:
        """Lets micro-batches run over a schedule, until each has come to a barrier or is over."""
        resources, request = self._resources, self._request
        loader = Loader(
            slots_of(plan, schedule), resources.pool, resources.replicas, self._store, is_recording=plan.recording
        )
        end_slot = functools.partial(_end_slot, self._loose_parameters, loader, resources.pool)
        if self._trace is None:
            gate = Gate(schedule, end_slot)
        else:
            self._trace.begin(schedule, indices)
            gate = TracedGate(self._trace, schedule, end_slot)
        shared = StepContext(
            plan=plan,
            gate=gate,
            pool=resources.pool,
            replicas=resources.replicas,
            loader=loader,
            lock=self._lock,
            training=request.training,
            is_measured=resources.plans.measures(self._place.key),
            seed=request.seed,
            autocast_device=request.autocast_device,
            gradients=self._store,
            backward_runs_user_code=resources.backward_runs_user_code,
            compiler=resources.compiler,
            meets=request.meets,
        )
        self._gate = gate
        gate.join(len(indices))
        num_known = len(self._workers)
        go_on: list[Callable[[], None]] = []
        for slot, index in enumerate(indices):
            known = self._walks.get(index)
            if known is None:
                self._workers.append(resources.workers.take())
                walk = self._walk_of(index, slot, shared)
                go_on.append(functools.partial(self._threads.begin, self._workers[-1], walk, self._fail))
            else:
                known.begin_segment(slot, shared)
                go_on.append(functools.partial(known.attendance.resume, self._outcomes[index]))
        loader.begin()
        walks = [self._walks[index] for index in indices]
        run_threads(self._workers[num_known:], go_on, [walk.attendance.halted for walk in walks], self._fail)
        self._raise_error()
        return walks

    def _walk_of(self, index: int, slot: int, shared: StepContext) -> Walk:
        state = self._states[index]
        walk = self._walks[index] = Walk(index, slot, shared, state)
        if self._request.meets:
            state.meet = functools.partial(self._meet, index)
        return walk

    # --- failures ------------------------------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> None:
        with self._error_lock:
            if self._error is None and not isinstance(error, StepAborted):
                self._error = error
            self._aborted.set()
        if self._gate is not None:
            self._gate.abort()

    def _raise_error(self) -> None:
        if self._error is not None:
            self._stop()
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error

    def _stop(self) -> None:
        """Lets the micro-batches that still stand at a barrier come to their end, and waits for all threads."""
        if not all(walk.attendance.has_ended for walk in self._walks.values()):
            self._fail(StepAborted())
            for walk in self._walks.values():
                walk.attendance.resume(returning(None))
        self._resources.workers.give_back(self._workers)
        self._workers.clear()
        for state in self._states:
            state.meet = None
        self._walks.clear()
        self._outcomes.clear()


def _end_slot(loose_parameters: LooseParameters, loader: Loader, pool: DevicePool, device_index: int) -> None:
    """The last micro-batch of a slot has left it. What user code needs no more makes room for the next slot."""
    loose_parameters.end_stage_run(pool[device_index])
    loader.end_stage_run(device_index)
