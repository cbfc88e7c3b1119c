"""What micro-batches share: for the life of an engine, for a step, and for one run over a schedule."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from ..autograd.compiled_by_user import CompiledByUser
from ..autograd.compiling import UnitCompiler
from ..autograd.repeats import ComparedSteps
from ..common.errors import StepAborted
from ..common.threads import Surroundings, Workers
from ..devices.pool import DevicePool
from ..planning.partition import StageKind
from ..usercode.lock import UserCodeLock
from ..usercode.loose_parameters import LooseParameters
from ..weights.gradients import GradientStore
from ..weights.placement import Loader, ReplicaCache
from ..weights.units import Unit
from .gate import Gate
from .plans import Plan, Plans
from .requests import StepRequest


@dataclass
class Resources:
    """What the steps of an engine have in common.

    Attributes:
        backward_runs_user_code: set when user code has a backward that runs user code: an activation checkpoint, a hook
            on a tensor, a function of its own.
        workers: threads of micro-batches.
        adders: accumulation threads, see :class:`GradientStore`.
        compared_steps: in which ones units are compared with their recomputation.
        switches: flags and hooks that turned out to be there for a while only, see :class:`UserCodeLock`.
        draws_foreign: see :class:`UserGenerators`.
        by_user: what the user has compiled.
        meeting: keys of training steps in which micro-batches meet.
        times_steps: whether the runs of all steps are timed, not only those that costs are measured from.
    """

    pool: DevicePool
    plans: Plans
    replicas: ReplicaCache
    compiler: UnitCompiler | None
    exempt: tuple[type, ...]
    num_threads: int | None
    adders: Workers
    workers: Workers = field(default_factory=Workers)
    backward_runs_user_code: threading.Event = field(default_factory=threading.Event)
    compared_steps: ComparedSteps = field(default_factory=ComparedSteps)
    switches: set[tuple[int, Any]] = field(default_factory=set)
    draws_foreign: threading.Event = field(default_factory=threading.Event)
    by_user: CompiledByUser = field(default_factory=CompiledByUser)
    meeting: set[Hashable] = field(default_factory=set)
    times_steps: bool = False


class Failure:
    """The first error of a step, which stops all its threads. Knows neither the step nor its threads: no cycles.

    Attributes:
        error: the first one; None if there is none, or if it has been raised to the caller.
        aborted: set when the step has failed.
        gate: of the segment, as soon as there is one.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.aborted = threading.Event()
        self.gate: Gate | None = None
        self._lock = threading.Lock()

    def note(self, error: BaseException) -> None:
        """Notes an error, and makes all threads stop at their next wait. On any thread."""
        with self._lock:
            if self.error is None and not isinstance(error, StepAborted):
                self.error = error
            self.aborted.set()
        if self.gate is not None:
            self.gate.abort()


@dataclass
class StepContext:
    """What the micro-batches of one step share.

    Attributes:
        gradients: of masters, on their way home.
        surroundings: modes of torch that the threads of the micro-batches take over.
        failure: told of every error of a micro-batch: it must reach the thread that runs the step.
    """

    request: StepRequest
    resources: Resources
    lock: UserCodeLock
    gradients: GradientStore
    loose_parameters: LooseParameters
    surroundings: Surroundings
    failure: Failure

    @property
    def meets(self) -> bool:
        """Whether it is prepared for barriers between a forward and its backward: calls save their inputs, whether
        their graphs are kept or not."""
        return self.request.meets or self.request.key in self.resources.meeting


@dataclass
class SegmentContext:
    """What the micro-batches of one run over a schedule share.

    Attributes:
        is_measured: whether the costs of its calls are taken.
        compares: whether units are compared with their recomputation, see [Note: repeats] in :mod:`autograd.repeats`.
    """

    plan: Plan
    gate: Gate
    loader: Loader
    lock: UserCodeLock
    is_measured: bool
    compares: bool
    _trained: dict[Unit, tuple[bool, ...]] = field(default_factory=dict)

    def trained(self, unit: Unit) -> tuple[bool, ...]:
        """Which parameters of ``unit`` require a gradient, for the micro-batch that holds the user-code lock.

        Looks at the unit once per segment, unless user code switches parameters.
        """
        known = self._trained.get(unit)
        if known is None:
            unit.look(self.lock.baseline())
        if known is None or self.lock.switches_flags:
            known = self._trained[unit] = tuple([p.requires_grad for p in unit.parameters()])
        return known

    @functools.cached_property
    def _stage_orders(self) -> tuple[tuple[int, ...], ...]:
        num_forward = sum(stage.kind is not StageKind.BACKWARD for stage in self.plan.partition.stages)
        return self.gate.schedule.stage_orders(num_forward)

    def await_buffers(self, unit: Unit, position: int, schedule_index: int) -> None:
        """Waits until the micro-batches before this one have made their last call of ``unit`` in this stage.

        Also where it is not known yet whether the unit writes its buffers. All those before: one that skips a unit
        does not wait for others. See :meth:`Schedule.stage_orders`.
        """
        partition = self.plan.partition
        stage = partition.stages[partition.forward_stages[position]]
        order = self._stage_orders[stage.index]
        if before := order[: order.index(schedule_index)]:
            last = max(i for i in range(position, stage.stop) if self.plan.sequence[i] is unit)
            for other in before:
                self.gate.await_position(schedule_index, other, last)

    @functools.cached_property
    def repeated(self) -> frozenset[Unit]:
        """Units with several positions in the plan."""
        return frozenset(unit for unit, n in Counter(self.plan.sequence).items() if n > 1)
