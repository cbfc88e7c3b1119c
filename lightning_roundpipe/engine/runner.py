"""One step: micro-batch threads over a schedule, first error, results.

[Note: one step]
The first step with a new key (train, validate, ...) runs its first micro-batch alone on one device and records which
units it calls in which order; the plan made from that drives everything after. Threads are started for a step and
joined before it ends, on every path. The first exception stops the others at their next wait and is raised to the
caller with its own traceback; a KeyboardInterrupt in the calling thread does the same.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..planning.partition import Partition, Stage, StageKind, keep_together
from ..planning.schedule import Schedule, next_first_device, round_robin
from ..planning.timeline import Span, Timeline
from .checkpointing import checkpoints_passed_through
from .devices import DevicePool
from .dispatch import StepAborted, Turnstile
from .glue import GlueLock, GlueState, GrowingContainers, entered, noting_writes
from .parameters import GradientStore, ReplicaCache
from .patches import gradients_aside, guarded_grad, intercepted, intra_op_threads, noting_hooks, process_settings_kept
from .recompute import find_escaped
from .step_context import Plan, StepContext, ordered_spans
from .strays import StrayOperands
from .threads import Surroundings, run_threads
from .unit_run import relay_hooks
from .units import Unit, UnitClasses, UnitTable
from .walk import Walk

Planner = Callable[[Sequence[Unit], int, bool], Partition]


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
        timeline: compute spans of the scheduled part.
        schedule: what was run; None if the step only recorded.
        num_microbatches: how many there were.
        num_off_plan: unit calls that the plan did not foresee.
    """

    outputs: list[Any]
    gradients: dict[nn.Parameter, Tensor]
    timeline: Timeline
    schedule: Schedule | None = None
    partition: Partition | None = None
    num_microbatches: int = 0
    num_off_plan: int = 0


@dataclass
class _Step:
    """Mutable state of a step in flight."""

    request: StepRequest
    lock: GlueLock
    states: list[GlueState]
    outputs: list[Any]
    gradients: GradientStore
    started_at: float
    aborted: threading.Event
    error: BaseException | None = None
    walks: list[Walk] = field(default_factory=list)
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
        planner: makes a partition from the recorded units: (units, num_microbatches, training) -> partition.
        round_size: micro-batches per round of the schedule; None for one round.
        unit_classes: see :class:`UnitTable`.
        exempt: module classes shared by all micro-batches (metrics).
        num_threads: intra-op threads per micro-batch thread; None leaves torch's setting.
    """

    def __init__(
        self,
        root: nn.Module,
        pool: DevicePool,
        planner: Planner,
        *,
        round_size: int | None = None,
        unit_classes: UnitClasses | None = None,
        exempt: tuple[type, ...] = (),
        num_threads: int | None = None,
    ) -> None:
        self._root = root
        self._pool = pool
        self._planner = planner
        self._round_size = round_size
        self._unit_classes = unit_classes
        self._exempt = exempt
        self._num_threads = num_threads
        self._table: UnitTable | None = None
        self._modules: list[int] = []
        self._plans: dict[Hashable, Plan] = {}
        self._schedules: dict[Any, Schedule] = {}
        self._replicas = ReplicaCache(relay_hooks)
        self._first_device = 0
        self._glue_parameters: set[nn.Parameter] = set()
        self._glue_is_user_code = threading.Event()

    def plan_of(self, key: Hashable) -> Plan | None:
        """The plan of steps with this key, once one has run."""
        return self._plans.get(key)

    def close(self) -> None:
        """Forgets plans and replicas; the engine may be used again."""
        self._replicas.clear()
        self._plans.clear()
        self._table = None
        self._modules = []

    def run(self, request: StepRequest) -> StepResult:
        """Runs one step; see [Note: one step].

        Raises:
            BaseException: the first exception that user code raised in any micro-batch, with its traceback.
            PipelineStalled: if the schedule cannot make progress.
            UnitEscapeError: if a tensor leaves a unit on a way that would lose its gradient.
        """
        table = self._current_table()
        aborted = threading.Event()  # shared by the step and its lock, which must not know each other: no cycles
        lock = GlueLock(self._exempt, aborted.is_set)
        states = [GlueState(i, request.seed) for i in range(len(request.microbatches))]
        step = _Step(request, lock, states, [None] * len(states), GradientStore(), time.perf_counter(), aborted)
        lists = GrowingContainers(table.glue)
        succeeded = False
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
                return result
        finally:
            lock.close(states, keep_writes=succeeded)
            self._replicas.drop_all()

    def _current_table(self) -> UnitTable:
        """The units; found anew when modules came or went."""
        modules = [id(module) for module in self._root.modules()]
        if self._table is None or modules != self._modules:
            self.close()
            self._table = UnitTable(self._root, self._unit_classes, self._exempt)
            self._modules = modules
        return self._table

    def _run_phases(self, step: _Step, take_strays: Callable[[], dict[nn.Parameter, Tensor]]) -> StepResult:
        request = step.request
        training = request.loss_of is not None
        plan = self._plans.get(request.key)
        first = 0
        if plan is None:
            stages = (Stage(0, StageKind.FUSED if training else StageKind.FORWARD, 0, 0),)
            recording = Plan((), Partition(0, stages), recording=True)
            (walk,) = self._run_schedule(step, recording, range(1), round_robin(1, 1, len(self._pool)))
            self._note_strays(step, take_strays)
            plan = self._make_plan(walk.sequence, len(request.microbatches), training)
            self._plans[request.key] = plan
            first = 1
        schedule = None
        walks: list[Walk] = []
        if first < len(request.microbatches):
            schedule = self._schedule(plan.partition.num_stages, len(request.microbatches) - first)
            step.started_at = time.perf_counter()
            walks = self._run_schedule(step, plan, range(first, len(request.microbatches)), schedule)
            self._replan_if_stale(request.key, walks, len(request.microbatches), training)
        self._note_strays(step, take_strays)
        spans: list[Span] = [span for walk in walks for span in walk.timed()]
        for walk in step.walks:
            for parameter, gradient in walk.glue_gradients.items():
                step.gradients.add(parameter, gradient)
            walk.glue_gradients = {}
        return StepResult(
            step.outputs,
            step.gradients.take(),
            Timeline(tuple(spans), len(self._pool)),
            schedule,
            plan.partition,
            len(request.microbatches),
            sum(walk.num_off_plan for walk in walks),
        )

    def _note_strays(self, step: _Step, take: Callable[[], dict[nn.Parameter, Tensor]]) -> None:
        """Parameters that turned out to be used in glue; from now on their gradients are taken in order."""
        for parameter, gradient in take().items():
            self._glue_parameters.add(parameter)
            step.gradients.add(parameter, gradient)

    def _make_plan(self, sequence: Sequence[Unit], num_microbatches: int, training: bool) -> Plan:
        partition = self._planner(sequence, num_microbatches, training)
        return Plan(tuple(sequence), keep_together(partition, ordered_spans(sequence)))

    def _replan_if_stale(self, key: Hashable, walks: list[Walk], num_microbatches: int, training: bool) -> None:
        """Calls off the plan mean that the model has taken another path: the first micro-batch's path counts."""
        if any(walk.num_off_plan for walk in walks):
            self._plans[key] = self._make_plan(walks[0].sequence, num_microbatches, training)

    def _schedule(self, num_stages: int, num_microbatches: int) -> Schedule:
        size = min(self._round_size or num_microbatches, num_microbatches)
        key = (num_stages, num_microbatches, size, self._first_device)
        schedule = self._schedules.get(key)
        if schedule is None:
            schedule = self._schedules[key] = round_robin(
                num_stages, num_microbatches, len(self._pool), round_size=size, first_device=self._first_device
            )
        self._first_device = next_first_device(
            num_stages, num_microbatches, len(self._pool), round_size=size, first_device=self._first_device
        )
        return schedule

    def _run_schedule(self, step: _Step, plan: Plan, indices: range, schedule: Schedule) -> list[Walk]:
        turnstile = Turnstile(schedule, functools.partial(self._end_stage, step.gradients))
        shared = StepContext(
            plan=plan,
            turnstile=turnstile,
            pool=self._pool,
            replicas=self._replicas,
            lock=step.lock,
            training=step.request.loss_of is not None,
            seed=step.request.seed,
            autocast_device=step.request.autocast_device,
            gradients=step.gradients,
            glue_parameters=self._glue_parameters,
            started_at=step.started_at,
            glue_is_user_code=self._glue_is_user_code,
        )
        walks = [Walk(index, slot, shared, step.states[index]) for slot, index in enumerate(indices)]
        step.walks += walks
        step.turnstile = turnstile
        turnstile.join(len(walks))
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

    def _end_stage(self, gradients: GradientStore, device: int) -> None:
        self._replicas.finish_stage(self._pool[device], gradients)

    def _run_walk(self, step: _Step, walk: Walk, surroundings: Surroundings) -> None:
        """Body of a micro-batch thread."""
        request = step.request
        try:
            strays = contextlib.nullcontext() if self._pool.is_virtual else StrayOperands(walk.current_torch_device)
            with entered(walk.state), surroundings.entered(), strays:
                try:
                    step.lock.acquire(walk.state)
                    output = request.function(request.microbatches[walk.index])
                    if request.loss_of is not None:
                        self._backward(step, walk, request.loss_of(output))
                    step.outputs[walk.index] = _without_graph(output)
                finally:
                    walk.finish()
        except BaseException as error:  # every error must reach the caller's thread, interrupts included
            step.fail(error)
        finally:
            walk.over.set()

    def _backward(self, step: _Step, walk: Walk, loss: Tensor | None) -> None:
        share = step.request.weights[walk.index]
        if loss is None or share == 0.0:
            return
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
        weight = torch.full_like(loss, share)
        step.lock.release(walk.state)
        walk.backward([loss], [weight])

    def _check_escape(self, walk: Walk, loss: Tensor) -> None:
        name = find_escaped([loss.grad_fn, *walk.glue_nodes()], self._replicas.leaf_names())
        if name is not None:
            raise UnitEscapeError(
                f"a tensor leaves unit {name!r} on a way that RoundPipe cannot follow (inside an object that is "
                "neither a container, a dataclass nor a registered pytree, or through a global), so its gradient "
                "would be lost. Return it from the unit's forward, or make a coarser module the unit: "
                "RoundPipeStrategy(units=[TheClassAroundIt])."
            )


def _without_graph(output: Any) -> Any:
    """The result with tensors detached: the step is over for them, and they must not keep its graph alive."""
    if isinstance(output, Tensor):
        return output.detach() if output.grad_fn is not None else output
    if type(output) in (list, tuple):
        return type(output)(_without_graph(item) for item in output)
    if isinstance(output, dict) and type(output) is dict:
        return {key: _without_graph(value) for key, value in output.items()}
    return output
