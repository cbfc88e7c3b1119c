"""One step in flight: its micro-batch threads, their runs over schedules, their meetings, the first error.

A step is one segment, or several where micro-batches meet; see [Note: meetings] in :mod:`meetings`. The threads are
started in the first segment and joined when the step ends, on every path, unless it has a tail (see [Note: tails] in
:mod:`tail`). Between two segments they all stand still: no weight is on its way, patches of the process are undone, and
the thread that runs the step has everything for itself.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from ..planning.partition import Partition
from ..planning.schedule import Schedule
from ..planning.timeline import Span
from .checkpointing import checkpoints_passed_through
from .completion import Completion
from .dispatch import StepAborted, Turnstile
from .glue import GlueLock, GlueState, noting_writes
from .glue_parameters import GlueParameters
from .gradients import GradientStore
from .growing import GrowingContainers
from .loading import Loader
from .meetings import Collective, Meeting, Place, agreed, closure_end, ends_closure, raising, returning
from .microbatch_thread import MicrobatchThreads
from .parametrizations import parametrizations_apart
from .patches import gradients_aside, guarded_grad, intercepted, intra_op_threads, noting_hooks, process_settings_kept
from .pool import DevicePool
from .protocol import see_end
from .requests import StepRequest
from .resources import Resources
from .seen_gradients import gradients_seen
from .step_context import Plan, StepContext
from .tail import Tail, reaches_parameters
from .threads import await_all, run_threads
from .tracing import Clock, Trace, TracedGlueLock, TracedTurnstile
from .units import UnitTable
from .walk import Walk


class Step:
    """Runs one step.

    Args:
        before: the tail of the step before, if this one goes on with it.

    Attributes:
        outputs: results of the user's function, by micro-batch.
        tail: what is left of it; None if the step is over.
        gradients: of masters, that the last segment has brought home; those of a tail go to the request's
            ``on_gradients``.
        spans: what was computed by plan, and more if the step is traced.
        largest: the schedule and the partition of the run with most calls.
        planning_s: what re-planning took, in seconds.
    """

    def __init__(
        self,
        request: StepRequest,
        resources: Resources,
        table: UnitTable,
        trace: Trace | None,
        before: Tail | None = None,
    ) -> None:
        self._request = request
        self._resources = resources
        self._table = table
        self._trace = trace
        self._before = before
        self._aborted = threading.Event()  # shared with micro-batches, which must not know the step: no cycles
        if before is not None:
            self._lock = before.shared.lock
        elif trace is None:
            self._lock = GlueLock(resources.exempt, resources.switches)
        else:
            self._lock = TracedGlueLock(trace, resources.exempt, resources.switches)
        count = len(request.microbatches)
        self._states = [GlueState(i, request.seed, self._aborted.is_set) for i in range(count)]
        self._walks: dict[int, Walk] = {}
        self._alive: list[threading.Thread] = []
        self._turnstile: Turnstile | None = None
        self._error: BaseException | None = None
        self._error_lock = threading.Lock()
        self._place = Place(request.key)
        self._clock = Clock(resources.pool)
        self._aside = contextlib.ExitStack()
        self._aside_lock = threading.Lock()
        self._take_strays: Callable[[], dict[nn.Parameter, Tensor]] = dict
        # How the micro-batches go on after a meeting, when the next segment begins.
        self._outcomes: list[Callable[[], Any]] = []
        self.outputs: list[Any] = []
        self.gradients: dict[nn.Parameter, Tensor] = {}
        self._store = GradientStore(resources.replicas.weights.gradient_dtypes)
        self._glue_parameters = GlueParameters(self._store)
        leaf_names = resources.replicas.leaf_names
        self._threads = MicrobatchThreads(request, self._lock, self._glue_parameters, leaf_names)
        self.tail: Tail | None = None
        self.spans: list[Span] = []
        self._num_spans_of: dict[int, int] = {}
        self.largest: tuple[Schedule | None, Partition | None] = None, None
        self._num_calls = -1
        self.num_off_plan = 0
        self.saved_bytes = 0
        self.replanned = False
        self.planning_s = 0.0

    def run(self) -> None:
        """Runs the step to its end.

        Raises:
            BaseException: the first exception of user code in any micro-batch, with its traceback.
            MeetingError: if micro-batches do not meet for the same.
        """
        lists = GrowingContainers(self._table.glue)
        succeeded = False
        self._lock.begin()
        if self._before is None:
            self._resources.pool.open()
        try:
            lists.hand_out(self._states, self._lock)
            for state in self._states:
                state.lock = self._lock
            self._run_segments(lambda arrival: arrival is None)
            self._lock.suspend()
            self.outputs = [self._threads.results.pop(state.index).arrive() for state in self._states]
            self.saved_bytes = sum(walk.saved_bytes for walk in self._walks.values())
            if self._request.merge is not None:
                lists.collect(self._states, self._request.merge)
            succeeded = True
        finally:
            if not succeeded:
                self.tail = None
            if self.tail is None:
                self._stop()
            self._lock.show(self._states, keep_writes=succeeded)
            if self.tail is None:
                self._end(succeeded)
            self._before = None  # which leads to the step before, and so on

    def finish(self) -> None:
        """Lets the tail come to its end, alone.

        Raises:
            BaseException: its first exception.
        """
        assert self.tail is not None
        succeeded = False
        self._lock.begin()
        try:
            with contextlib.ExitStack() as stack:
                self._patch(stack)
                with self.tail.going_on(self._trained()):
                    pass
            succeeded = True
        finally:
            self._aside.close()
            self._lock.show((), keep_writes=False)
            self._release(succeeded)

    def _end(self, succeeded: bool) -> None:
        self._lock.forget(self._states)
        self._glue_parameters.drop()
        if self._before is None or self._before.is_over:
            self._release(succeeded)

    def _release(self, succeeded: bool) -> None:
        """No micro-batch of any step is left."""
        self._resources.replicas.end_step()
        self._resources.pool.close()
        see_end(succeeded)

    def _complete(self) -> bool:
        """The tail has come to its end; whether the next step has another plan."""
        try:
            self._raise_error()
            gradients = self._gradients_at_home()
            walks = list(self._walks.values())
            plans, key = self._resources.plans, self._request.key
            is_known = plans.of(key) is walks[0].shared.plan  # may have been forgotten meanwhile
            replanned = is_known and plans.note_step(key, walks, len(walks))
        finally:
            self._abort()
        assert self._request.on_gradients is not None
        self._request.on_gradients(gradients)
        return replanned

    def _abort(self) -> None:
        self.tail = None  # which leads back to the step
        self._stop()
        self._lock.forget(self._states)
        self._glue_parameters.drop()

    # --- segments and meetings -----------------------------------------------------------------------------------

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
            return first.perform(Meeting(values, gradients, call_closures))

    def _call_closure(self, index: int, closure: Callable[[], Any] | None) -> Any:
        """In the thread of a micro-batch, at a meeting: calls the closure, and comes back."""
        assert closure is not None
        try:
            value = closure()
        except BaseException as error:
            self._fail(error)  # the meeting is over as well
            raise
        return self._stand(self._walks[index], closure_end(value))

    def _meet(self, index: int, collective: Collective, roots: list[tuple[Tensor, float]], retain_graph: bool) -> Any:
        """In the thread of a micro-batch, which runs glue: see :func:`meetings.meet`."""
        walk = self._walks[index]
        if collective.is_deferred:
            walk.attendance.deferred.append(collective)
            return None
        weighted = [self._threads.root(walk, loss, share) for loss, share in roots if share != 0.0]
        roots.clear()
        if weighted:
            self._put_gradients_aside()
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
        if self._before is None:  # what goes on with a tail computes with the same weights
            weights.begin_step(request.key, training=request.training)
        count = len(self._states)
        with contextlib.ExitStack() as stack:
            self._patch(stack)
            plan, first = plans.of(key), 0
            if plan is None:
                recording = plans.recording(request.training)
                (walk,) = self._run_schedule(*recording, range(1))
                self._note_strays()
                training = walk.has_backward if request.meets else request.training
                plan, first = plans.record(key, walk, count, training), 1
            schedule, planned = None, []
            if first < count:
                schedule = plans.schedule(plan.partition.num_stages, count - first)
                planned = self._run_schedule(plan, schedule, range(first, count))
            self._note_strays()
            gradients = self._gradients_at_home() if self.tail is None else {}
        self._aside.close()
        if self._before is not None:
            self.spans += self._before.spans(self._clock)
            self.replanned |= self._before.replanned
        self.spans += [span for walk in planned for span in self._clock.spans_of(walk.runs, walk.index)]
        if self._trace is not None and planned:
            self.spans.extend(self._trace.spans(self._clock))
        self.num_off_plan += sum(walk.num_off_plan for walk in planned)
        if len(plan.sequence) > self._num_calls:
            self._num_calls, self.largest = len(plan.sequence), (schedule, plan.partition)
        if self.tail is None:
            started = time.perf_counter()
            self.replanned |= plans.note_step(key, planned, count)
            self.planning_s += time.perf_counter() - started
        if request.meets:
            resources.replicas.end_step()
        return gradients

    def _patch(self, stack: contextlib.ExitStack) -> None:
        """Everything that a segment changes outside itself."""
        resources = self._resources
        if not self._request.meets:
            self._put_gradients_aside()
        stack.enter_context(intercepted(self._table))
        stack.enter_context(noting_writes())
        stack.enter_context(guarded_grad())
        stack.enter_context(noting_hooks(resources.replicas.note_hook))
        stack.enter_context(checkpoints_passed_through(resources.glue_is_user_code.set))
        stack.enter_context(process_settings_kept())
        stack.enter_context(parametrizations_apart())
        stack.enter_context(intra_op_threads(resources.num_threads))

    def _put_gradients_aside(self) -> None:
        """Before the first backward of a segment; see [Note: gradients that are seen] in :mod:`seen_gradients`."""
        with self._aside_lock:
            if self._take_strays is dict:
                if self._request.meets and len(self._states) > 1:
                    self._aside.enter_context(gradients_seen(self._resources.root.parameters()))
                self._take_strays = self._aside.enter_context(gradients_aside(self._resources.root))
                self._aside.callback(setattr, self, "_take_strays", dict)

    def _gradients_at_home(self) -> dict[nn.Parameter, Tensor]:
        if self._request.meets:
            self._glue_parameters.send_sums()
        else:
            self._glue_parameters.take_home()
        for index in sorted(self._walks):
            walk = self._walks[index]
            for parameter, gradient in walk.glue_gradients.items():
                self._store.add(parameter, gradient)
            self._resources.glue_parameters.update(walk.glue_gradients)
            walk.glue_gradients = {}
        return self._store.take()

    def _trained(self) -> set[nn.Parameter]:
        return {parameter for parameter in self._resources.root.parameters() if parameter.requires_grad}

    def _note_strays(self) -> None:
        """Parameters that turned out to be used in glue; from now on their gradients are taken in order."""
        for parameter, gradient in self._take_strays().items():
            self._resources.glue_parameters.add(parameter)
            self._store.add(parameter, gradient)

    # --- threads -------------------------------------------------------------------------------------------------

    def _run_schedule(self, plan: Plan, schedule: Schedule, indices: range) -> list[Walk]:
        """Lets micro-batches run over a schedule, until each has come to a meeting or is over."""
        resources, request = self._resources, self._request
        completion = self._threads.completion = self._completion_of(indices)
        values = dict(request.values)  # an object of its own, by which replicas tell steps apart
        loader = Loader(plan, schedule, resources.pool, resources.replicas, self._store, completion, values)
        end_slot = functools.partial(_end_slot, self._glue_parameters, loader, resources.pool)
        if self._trace is None:
            turnstile = Turnstile(schedule, end_slot)
        else:
            self._trace.begin(schedule, indices)
            turnstile = TracedTurnstile(self._trace, schedule, end_slot)
        shared = StepContext(
            plan=plan,
            turnstile=turnstile,
            pool=resources.pool,
            replicas=resources.replicas,
            loader=loader,
            lock=self._lock,
            training=request.training,
            is_measured=resources.plans.measures(self._place.key),
            seed=request.seed,
            autocast_device=request.autocast_device,
            gradients=self._store,
            glue_parameters=resources.glue_parameters if self._before is None else self._trained(),
            glue_is_user_code=resources.glue_is_user_code,
            compiler=resources.compiler,
            meets=request.meets,
            values=values,
        )
        self._turnstile = turnstile
        turnstile.join(len(indices))
        new: list[threading.Thread] = []
        waiting: list[Callable[[], None]] = []
        for slot, index in enumerate(indices):
            known = self._walks.get(index)
            if known is None:
                new.append(self._thread_of(index, slot, shared))
            else:
                known.begin_segment(slot, shared)
                waiting.append(functools.partial(known.attendance.resume, self._outcomes[index]))
        walks = [self._walks[index] for index in indices]
        with self._beside_tail(shared):
            self._alive += new
            self._run(walks, new, waiting, may_trail=self._may_trail(plan, indices))
        self._raise_error()
        return walks

    def _completion_of(self, indices: range) -> Completion | None:
        request, resources = self._request, self._resources
        if request.completed is None or len(indices) < len(self._states):
            return None
        is_open, num_aliases = resources.glue_is_user_code.is_set, resources.replicas.num_aliases
        walks, in_glue = self._walks.values(), resources.glue_parameters
        return Completion(request.completed, self._store, walks, in_glue, is_open, num_aliases)

    @contextlib.contextmanager
    def _beside_tail(self, shared: StepContext) -> Iterator[None]:
        """Around a run over a schedule, which begins: a tail of the step before runs with it."""
        if self._before is None:
            shared.loader.begin()
            yield
            return
        shared.turnstile.follow(self._before.shared.turnstile)
        shared.loader.begin(self._before.shared.loader)
        with self._before.going_on(shared.glue_parameters):
            yield
        shared.turnstile.forget_before()

    def _may_trail(self, plan: Plan, indices: range) -> bool:
        """Whether a run over a schedule may leave a tail."""
        is_whole = len(indices) == len(self._states) and not self._request.meets and self._trace is None
        is_worth_it = len(self._resources.pool) > 1 and plan.partition.num_stages > 1
        return self._request.on_gradients is not None and is_whole and is_worth_it

    def _can_trail(self, walks: list[Walk]) -> bool:
        """Whether the backward of a step that stands still may come later."""
        if self._resources.glue_is_user_code.is_set():
            return False
        has_copies = not self._resources.pool[0].aliases_host
        return has_copies or not self._request.values or not any(map(reaches_parameters, walks))

    def _run(
        self,
        walks: list[Walk],
        new: list[threading.Thread],
        waiting: list[Callable[[], None]],
        *,
        may_trail: bool,
    ) -> None:
        """Lets micro-batches run, each until it comes to a meeting or is over, or until the step has a tail."""
        halted = [walk.attendance.halted for walk in walks]
        meanwhile = _nothing if self._before is None else self._before.await_end
        if may_trail:
            run_threads(new, waiting, [walk.attendance.at_tail for walk in walks], self._fail, meanwhile)
            assert self._turnstile is not None
            if self._turnstile.pause() and not self._aborted.is_set() and self._can_trail(walks):
                self.tail = Tail(walks, self._complete, self._abort)
                return
            self._turnstile.resume()
            await_all(halted)
        else:
            run_threads(new, waiting, halted, self._fail, meanwhile)

    def _thread_of(self, index: int, slot: int, shared: StepContext) -> threading.Thread:
        state = self._states[index]
        walk = self._walks[index] = Walk(index, slot, shared, state)
        if self._request.meets:
            state.meet = functools.partial(self._meet, index)
        return self._threads.thread_of(walk, self._fail)

    # --- failures ------------------------------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> None:
        with self._error_lock:
            if self._error is None and not isinstance(error, StepAborted):
                self._error = error
            self._aborted.set()
        if self._turnstile is not None:
            self._turnstile.abort()

    def _raise_error(self) -> None:
        if self._error is not None:
            self._stop()
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error

    def _stop(self) -> None:
        """Ends the threads that still wait at a meeting, and waits for all."""
        alive = [thread for thread in self._alive if thread.is_alive()]
        if alive:
            self._fail(StepAborted())
            for walk in self._walks.values():
                walk.attendance.resume(returning(None))
        for thread in self._alive:
            if thread.ident is not None:
                thread.join()
        for state in self._states:
            state.meet = None
        self._walks.clear()
        self._outcomes.clear()
        self._aside.close()


def _nothing() -> None:
    pass


def _end_slot(glue_parameters: GlueParameters, loader: Loader, pool: DevicePool, device_index: int) -> None:
    """The last micro-batch of a slot has left it. What glue does not need any more makes room for the next slot."""
    glue_parameters.end_slot(pool[device_index])
    loader.end_slot(device_index)
