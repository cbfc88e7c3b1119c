"""One step: micro-batch threads over a schedule, first error, results.

[Note: one step]
The first step with a new key (train, validate, ...) runs its first micro-batch alone on one device and records which
units it calls in which order; the plan made from that drives everything after, until a better one is made between two
steps (see [Note: re-planning] in :mod:`plans`). Threads are started for a step and
joined before it ends, on every path. The first exception stops the others at their next wait and is raised to the
caller with its own traceback; a KeyboardInterrupt in the calling thread does the same.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..planning.costs import CostProfile
from ..planning.machine import Machine
from ..planning.partition import Partition
from ..planning.schedule import Schedule
from ..planning.timeline import Timeline
from .checkpointing import checkpoints_passed_through
from .compiling import UnitCompiler
from .dispatch import StepAborted, Turnstile
from .glue import GlueLock, GlueState, GrowingContainers, entered, noting_writes
from .glue_parameters import GlueParameters
from .gradients import GradientStore
from .loading import Loader, ReplicaCache
from .outputs import Results
from .patches import gradients_aside, guarded_grad, intercepted, intra_op_threads, noting_hooks, process_settings_kept
from .plans import Planner, Plans, Scheduler, scheduler_of
from .pool import DevicePool
from .recompute import find_escaped
from .step_context import Plan, StepContext
from .strays import StrayOperands
from .threads import Surroundings, run_threads
from .tracing import Clock, Trace, TracedGlueLock, TracedTurnstile
from .unit_run import relay_hooks
from .units import UnitClasses, UnitTable
from .walk import Walk


class UnitEscapeError(RuntimeError):
    """A tensor left a unit on a way that the engine cannot follow."""


@dataclass(frozen=True)
class StepRequest:
    """What to run.

    Attributes:
        function: the user's step; called once per micro-batch, on a thread of its own.
        microbatches: its argument, one per micro-batch.
        weights: share of each micro-batch in the loss; they need not sum to 1 (the engine does not normalise).
        key: calls with the same key are expected to call the same units in the same order.
        seed: identifies the step: same seed, same random numbers.
        loss_of: picks the loss from the function's result, None where there is none; None for evaluation.
        merge: merges what micro-batches appended to a list, see :class:`GrowingContainers`.
        autocast_device: device type of autocast, ``"cpu"`` or ``"cuda"``.
    """

    function: Callable[[Any], Any]
    microbatches: Sequence[Any]
    weights: Sequence[float]
    key: Hashable
    seed: int
    loss_of: Callable[[Any], Tensor | None] | None = None
    merge: Callable[[list[Any]], Any] | None = None
    autocast_device: str = "cpu"


@dataclass
class StepResult:
    """What came out.

    Attributes:
        outputs: the function's results, in micro-batch order.
        gradients: master weight -> weighted sum of its gradients (host, the weight's shape and dtype).
        timeline: compute spans of the scheduled part; waits and transfers as well if the step was traced. On GPUs
            without what a device had not reached when the step ended.
        schedule: what was run; None if the step only recorded. It numbers the micro-batches that ran by the plan: in
            the first step with a key its micro-batch 0 is number 1 everywhere else, because number 0 was recorded.
        partition: the stages it was run in, or, if the step only recorded, those of the next step.
        num_microbatches: how many there were.
        num_off_plan: unit calls that the plan did not foresee.
        step_ms: wall-clock time of the step, without the planning of the next one.
        bytes_up, bytes_down: per device, bytes that were copied to it and from it: weights, buffers, gradients, and
            inputs of calls. Gradients on their way through glue are not counted.
        saved_bytes: bytes of activations that were kept on the host at most, if all micro-batches had theirs there.
        peak_memory_bytes: per device, the most bytes of tensors on it at a time, since the process began; None if it
            is not known.
        replanned: whether the next step has another plan.
    """

    outputs: list[Any]
    gradients: dict[nn.Parameter, Tensor]
    timeline: Timeline
    schedule: Schedule | None = None
    partition: Partition | None = None
    num_microbatches: int = 0
    num_off_plan: int = 0
    step_ms: float = 0.0
    bytes_up: tuple[int, ...] = ()
    bytes_down: tuple[int, ...] = ()
    saved_bytes: int = 0
    peak_memory_bytes: tuple[int | None, ...] = ()
    replanned: bool = False


@dataclass
class _Step:
    """Mutable state of a step in flight."""

    request: StepRequest
    lock: GlueLock
    states: list[GlueState]
    outputs: list[Any]
    gradients: GradientStore
    aborted: threading.Event
    trace: Trace | None
    glue_parameters: GlueParameters
    error: BaseException | None = None
    walks: list[Walk] = field(default_factory=list)
    planned: list[Walk] = field(default_factory=list)  # those that ran by the plan
    turnstile: Turnstile | None = None
    error_lock: threading.Lock = field(default_factory=threading.Lock)

    def fail(self, error: BaseException) -> None:
        with self.error_lock:
            if self.error is None and not isinstance(error, StepAborted):
                self.error = error
            self.aborted.set()
        if self.turnstile is not None:
            self.turnstile.abort()


class Engine:
    """Runs steps of one model over a pool of devices.

    Args:
        root: the user's model; its parameters are the master weights.
        pool: the workers.
        planner: makes a partition from costs: (costs of the calls, num_microbatches, training) -> partition.
        round_size: micro-batches per round of the schedule; None for one round.
        scheduler: builds other schedules than round-robin ones, of any form that :class:`Schedule` accepts.
        machine: on which plans are compared; None for devices that share the host's memory.
        unit_classes: see :class:`UnitTable`.
        exempt: module classes shared by all micro-batches (metrics).
        num_threads: intra-op threads per micro-batch thread; None leaves torch's setting.
        compile_units: arguments of ``torch.compile`` for units; None runs them as they are. See :mod:`compiling`.

    Attributes:
        trace: whether timelines also show waits and transfers, see [Note: tracing] in :mod:`tracing`.
        working_copies: weights that travel in a low dtype.
    """

    def __init__(
        self,
        root: nn.Module,
        pool: DevicePool,
        planner: Planner,
        *,
        round_size: int | None = None,
        scheduler: Scheduler | None = None,
        machine: Machine | None = None,
        unit_classes: UnitClasses | None = None,
        exempt: tuple[type, ...] = (),
        num_threads: int | None = None,
        compile_units: Mapping[str, Any] | None = None,
    ) -> None:
        self._root = root
        self._pool = pool
        self._plans = Plans(planner, scheduler_of(scheduler, round_size), len(pool), machine)
        self._unit_classes = unit_classes
        self._exempt = exempt
        self._num_threads = num_threads
        self._compiler = None if compile_units is None else UnitCompiler(compile_units)
        self._table: UnitTable | None = None
        self._modules: list[int] = []
        self._replicas = ReplicaCache(relay_hooks, pool)
        self.working_copies = self._replicas.weights
        self._glue_parameters: set[nn.Parameter] = set()
        self._glue_is_user_code = threading.Event()
        self.trace = False

    def plan_of(self, key: Hashable) -> Plan | None:
        """The plan of steps with this key, once one has run."""
        return self._plans.of(key)

    def costs(self, key: Hashable) -> CostProfile | None:
        """The costs of the unit calls of one micro-batch in steps with this key, as far as they are known now.

        Guesses from sizes at first, then measured ones; see [Note: measured costs] in :mod:`profiler`. None before
        the first step with this key.
        """
        return self._plans.costs(key)

    def preset_costs(self, key: Hashable, profile: CostProfile) -> None:
        """Plans steps with this key from ``profile``, and does not plan them anew from what is measured.

        Raises:
            ValueError: if steps with this key make other calls; the first step raises it, if none has run yet.
        """
        self._plans.preset(key, profile)

    def forget(self, key: Hashable) -> None:
        """Plans steps with this key anew, from their next first micro-batch: its size has changed."""
        self._plans.forget(key)
        self._current_table().forget_facts()

    def close(self) -> None:
        """Forgets plans (not costs that were preset) and replicas; the engine may be used again."""
        self._replicas.clear()
        self._plans.clear()
        self._table, self._modules = None, []

    def run(self, request: StepRequest) -> StepResult:
        """Runs one step; see [Note: one step].

        Raises:
            BaseException: the first exception that user code raised in any micro-batch, with its traceback.
            PipelineStalled: if the schedule cannot make progress.
            UnitEscapeError: if a tensor leaves a unit on a way that would lose its gradient.
            ValueError: if preset costs do not match the calls.
        """
        started = time.perf_counter()
        before = self._pool.bytes_moved
        step, result = self._run_step(request)
        result.step_ms = (time.perf_counter() - started) * 1e3
        result.bytes_up, result.bytes_down = (
            tuple(n - m for n, m in zip(*counts, strict=True))
            for counts in zip(self._pool.bytes_moved, before, strict=True)
        )
        result.saved_bytes = sum(walk.saved_bytes for walk in step.walks)
        result.peak_memory_bytes = tuple(device.peak_memory_bytes for device in self._pool.devices)
        result.replanned = self._plans.note_step(request.key, step.planned, len(request.microbatches))
        return result

    def _run_step(self, request: StepRequest) -> tuple[_Step, StepResult]:
        table = self._current_table()
        trace = Trace(self._pool) if self.trace else None
        aborted = threading.Event()  # shared by the step and its lock, which must not know each other: no cycles
        if trace is None:
            lock = GlueLock(self._exempt, aborted.is_set)
        else:
            lock = TracedGlueLock(trace, self._exempt, aborted.is_set)
        states = [GlueState(i, request.seed) for i in range(len(request.microbatches))]
        gradients = GradientStore(self._replicas.weights.gradient_dtypes)
        outputs: list[Any] = [None] * len(states)
        step = _Step(request, lock, states, outputs, gradients, aborted, trace, GlueParameters(gradients))
        lists = GrowingContainers(table.glue)
        succeeded = False
        self._replicas.weights.begin_step(request.key, training=request.loss_of is not None)
        self._pool.open()
        try:
            with contextlib.ExitStack() as stack:
                take_strays = stack.enter_context(gradients_aside(self._root))
                stack.enter_context(intercepted(table))
                stack.enter_context(noting_writes())
                stack.enter_context(guarded_grad())
                stack.enter_context(noting_hooks(self._replicas.note_hook))
                stack.enter_context(checkpoints_passed_through(self._glue_is_user_code.set))
                stack.enter_context(process_settings_kept())
                stack.enter_context(intra_op_threads(self._num_threads))
                lists.hand_out(states, lock)
                for state in states:
                    state.lock = lock
                result = self._run_phases(step, take_strays)
                lock.suspend()
                if request.merge is not None:
                    lists.collect(states, request.merge)
                succeeded = True
                return step, result
        finally:
            lock.close(states, keep_writes=succeeded)
            self._replicas.end_step()
            step.glue_parameters.drop()
            self._pool.close()
            if trace is not None:
                trace.close()

    def _current_table(self) -> UnitTable:
        """The units; found anew when modules came or went."""
        modules = [id(module) for module in self._root.modules()]
        if self._table is None or modules != self._modules:
            self.close()
            self._table = UnitTable(self._root, self._unit_classes, self._exempt, self._pool.memory_limit)
            self._modules = modules
        return self._table

    def _run_phases(self, step: _Step, take_strays: Callable[[], dict[nn.Parameter, Tensor]]) -> StepResult:
        request = step.request
        clock = Clock(self._pool)
        plan = self._plans.of(request.key)
        first = 0
        if plan is None:
            (walk,) = self._run_schedule(step, *self._plans.recording(request.loss_of is not None), range(1))
            self._note_strays(step, take_strays)
            plan = self._plans.record(request.key, walk, len(request.microbatches), request.loss_of is not None)
            first = 1
        schedule = None
        if first < len(request.microbatches):
            schedule = self._plans.schedule(plan.partition.num_stages, len(request.microbatches) - first)
            step.planned = self._run_schedule(step, plan, schedule, range(first, len(request.microbatches)))
        self._note_strays(step, take_strays)
        step.glue_parameters.take_home()
        for walk in step.walks:
            for parameter, gradient in walk.glue_gradients.items():
                step.gradients.add(parameter, gradient)
            walk.glue_gradients = {}
        gradients = step.gradients.take()
        spans = [span for walk in step.planned for span in clock.spans_of(walk.runs, walk.index)]
        if step.trace is not None and step.planned:
            spans.extend(step.trace.spans(clock))
        return StepResult(
            step.outputs,
            gradients,
            Timeline(tuple(spans), len(self._pool)),
            schedule,
            plan.partition,
            len(request.microbatches),
            sum(walk.num_off_plan for walk in step.planned),
        )

    def _note_strays(self, step: _Step, take: Callable[[], dict[nn.Parameter, Tensor]]) -> None:
        """Parameters that turned out to be used in glue; from now on their gradients are taken in order."""
        for parameter, gradient in take().items():
            self._glue_parameters.add(parameter)
            step.gradients.add(parameter, gradient)

    def _run_schedule(self, step: _Step, plan: Plan, schedule: Schedule, indices: range) -> list[Walk]:
        loader = Loader(plan, schedule, self._pool, self._replicas, step.gradients)
        end_slot = functools.partial(_end_slot, step.glue_parameters, loader, self._pool)
        if step.trace is None:
            turnstile = Turnstile(schedule, end_slot)
        else:
            step.trace.begin(schedule, indices)
            turnstile = TracedTurnstile(step.trace, schedule, end_slot)
        shared = StepContext(
            plan=plan,
            turnstile=turnstile,
            pool=self._pool,
            replicas=self._replicas,
            loader=loader,
            lock=step.lock,
            training=step.request.loss_of is not None,
            is_measured=self._plans.measures(step.request.key),
            seed=step.request.seed,
            autocast_device=step.request.autocast_device,
            gradients=step.gradients,
            glue_parameters=self._glue_parameters,
            glue_is_user_code=self._glue_is_user_code,
            compiler=self._compiler,
        )
        walks = [Walk(index, slot, shared, step.states[index]) for slot, index in enumerate(indices)]
        step.walks += walks
        step.turnstile = turnstile
        turnstile.join(len(walks))
        loader.begin()
        surroundings = Surroundings.of_this_thread(step.request.autocast_device)
        threads = [
            threading.Thread(
                target=contextvars.copy_context().run,
                args=(self._run_walk, step, walk, surroundings),
                name=f"roundpipe-microbatch-{walk.index}",
                daemon=True,
            )
            for walk in walks
        ]
        run_threads(threads, [walk.over for walk in walks], step.fail)
        if step.error is not None:
            error, step.error = step.error, None
            try:
                raise error
            finally:
                del error
        return walks

    def _run_walk(self, step: _Step, walk: Walk, surroundings: Surroundings) -> None:
        """Body of a micro-batch thread."""
        request = step.request
        try:
            with entered(walk.state), surroundings.entered(), self._strays(step, walk):
                try:
                    step.lock.acquire(walk.state)
                    results, roots = self._forward(request, walk)
                    if roots:
                        step.lock.release(walk.state)
                        walk.backward(roots)
                finally:
                    walk.finish()
                step.outputs[walk.index] = results.arrive()
        except BaseException as error:  # every error must reach the caller's thread, interrupts included
            step.fail(error)
        finally:
            walk.over.set()

    @staticmethod
    def _strays(step: _Step, walk: Walk) -> contextlib.AbstractContextManager[Any]:
        if walk.device.aliases_host:
            return contextlib.nullcontext()
        return StrayOperands(lambda: walk.device, step.glue_parameters, walk.is_flushing)

    def _forward(self, request: StepRequest, walk: Walk) -> tuple[Results, list[tuple[Tensor, Tensor]]]:
        """The user's step on one micro-batch: (its results, what to run backward from: tensors, their gradients).

        Nothing else may hold the graph of the loss, so that it dies during the backward: the logits hang on it.
        """
        output = request.function(request.microbatches[walk.index])
        loss = None if request.loss_of is None else request.loss_of(output)
        results = Results(output, walk.owner_of)
        share = request.weights[walk.index]
        if loss is None or share == 0.0:
            return results, []
        if loss.numel() != 1:
            raise ValueError(
                f"training_step returned a loss of shape {tuple(loss.shape)}: return a scalar, for instance its mean"
            )
        if not loss.requires_grad:
            raise RuntimeError(
                "the loss of training_step does not require a gradient: it does not depend on a trainable parameter, "
                "or was detached on the way"
            )
        if walk.shared.plan.recording:
            self._check_escape(walk, loss)
        return results, [(loss, torch.full_like(loss, share))]

    def _check_escape(self, walk: Walk, loss: Tensor) -> None:
        name = find_escaped([loss.grad_fn, *walk.glue_nodes()], self._replicas.leaf_names())
        if name is not None:
            raise UnitEscapeError(
                f"a tensor leaves unit {name!r} on a way that RoundPipe cannot follow (inside an object that is "
                "neither a container, a dataclass nor a registered pytree, or through a global), so its gradient "
                "would be lost. Return it from the unit's forward, or make a coarser module the unit: "
                "RoundPipeStrategy(units=[TheClassAroundIt])."
            )


def _end_slot(glue_parameters: GlueParameters, loader: Loader, pool: DevicePool, device_index: int) -> None:
    """The last micro-batch of a slot has left it. What glue does not need any more makes room for the next slot."""
    glue_parameters.end_slot(pool[device_index])
    loader.end_slot(device_index)
