"""The engine: one model over a pool of devices, step by step.

[Note: one step]
The first step with a new key (train, validate, ...) runs its first micro-batch alone on one device and records which
units it calls in which order; the plan made from that drives everything after, until a better one is made between two
steps (see [Note: re-planning] in :mod:`engine.plans`). What happens in a step is in :mod:`engine.step`: when it ends,
on every path, its threads have nothing to do; they end with it, or stay as long as the engine is open. The first
exception stops the others at their next wait and is raised to the caller with its own traceback; a KeyboardInterrupt in
the calling thread does the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Mapping
from typing import Any

from torch import nn

from ..autograd.compiling import UnitCompiler
from ..autograd.escape import UnitEscapeError
from ..autograd.relays import relay_hooks
from ..common.threads import Workers
from ..devices.pool import DevicePool
from ..planning.costs import CostProfile, Machine
from ..weights.placement import ReplicaCache
from ..weights.units import UnitClasses, UnitTable
from .context import Resources
from .costs import DeviceSpeeds
from .patches import modules_of, torch_patched
from .plans import Plan, Planner, Plans
from .requests import StepRequest, StepResult
from .step import Step
from .tracing import Trace

__all__ = ["Engine", "StepRequest", "StepResult", "UnitEscapeError"]


class Engine:
    """Runs steps of one model over a pool of devices.

    Args:
        root: the user's model; its parameters are the master weights.
        pool: the devices.
        planner: makes the plan of a step: (costs of the calls, machine, num_microbatches, training) -> plan, or a
            partition alone.
        round_size: micro-batches per round, where the planner returns a partition alone; None for one round.
        machine: what the devices are like, as far as it is known; None for devices that share the host's memory.
        unit_classes: see :class:`UnitTable`.
        exempt: module classes shared by all micro-batches (metrics).
        num_threads: intra-op threads per micro-batch thread; None leaves torch's setting.
        adding_threads: intra-op threads of the thread that adds up gradients which come from devices; likewise.
        compile_units: arguments of ``torch.compile`` for units; None runs them as they are. See
            :mod:`autograd.compiling`.

    Attributes:
        trace: whether timelines also show waits and transfers, see [Note: tracing] in :mod:`engine.tracing`.
        working_copies: weights that travel in a low dtype.
    """

    def __init__(
        self,
        root: nn.Module,
        pool: DevicePool,
        planner: Planner,
        *,
        round_size: int | None = None,
        machine: Machine | None = None,
        unit_classes: UnitClasses | None = None,
        exempt: tuple[type, ...] = (),
        num_threads: int | None = None,
        adding_threads: int | None = None,
        compile_units: Mapping[str, Any] | None = None,
    ) -> None:
        self._root = root
        self._pool = pool
        self._plans = Plans(
            planner,
            machine or Machine(len(pool)),
            round_size=round_size,
            speeds=DeviceSpeeds(len(pool)) if pool.has_own_speeds else None,
        )
        self._unit_classes = unit_classes
        self._exempt = exempt
        self._table: UnitTable | None = None
        self._replicas = ReplicaCache(relay_hooks, pool)
        compiler = None if compile_units is None else UnitCompiler(compile_units)
        adders = Workers(adding_threads)
        self._resources = Resources(pool, self._plans, self._replicas, compiler, exempt, num_threads, adders)
        self.working_copies = self._replicas.weights
        self.trace = False
        self._is_open = False
        self._open = contextlib.ExitStack()

    @property
    def times_steps(self) -> bool:
        """Whether every step has a timeline; on GPUs else only those that costs are measured from, and traced ones."""
        return self._resources.times_steps

    @times_steps.setter
    def times_steps(self, wanted: bool) -> None:
        self._resources.times_steps = wanted

    @property
    def machine(self) -> Machine:
        """What plans are made for, as it is known now."""
        return self._plans.machine

    def plan_of(self, key: Hashable) -> Plan | None:
        """The plan of steps with this key, once one has run."""
        return self._plans.of(key)

    def order_of(self, key: Hashable) -> list[list[nn.Parameter]]:
        """The weights in the order in which a step with this key needs them: those beside its units, which user code
        may use at any time, then unit by unit."""
        plan = self._plans.of(key)
        units = () if plan is None else dict.fromkeys(plan.sequence)
        groups = [list(unit.module.parameters()) for unit in units]
        in_units = {parameter for group in groups for parameter in group}
        return [[p for p in self._root.parameters() if p not in in_units], *groups]

    def costs(self, key: Hashable) -> CostProfile | None:
        """The costs of the unit calls of one micro-batch in steps with this key, as far as they are known now.

        Guesses from sizes at first, then measured ones; see [Note: measured costs] in :mod:`engine.costs`. None before
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

    def open(self) -> None:
        """From now on until :meth:`close` the threads of micro-batches stay from step to step, and so do
        replacements: see [Note: patches] in :mod:`engine.patches`. Otherwise nothing is left between two steps."""
        self._open.close()
        self._open.callback(self._end_threads)
        self._open.enter_context(torch_patched())
        self._is_open = True

    def close(self) -> None:
        """Forgets plans (not costs that were preset) and replicas; the engine may be used again."""
        self._is_open = False
        self._open.close()
        self._forget()

    def _end_threads(self) -> None:
        self._resources.workers.close()
        self._resources.adders.close()

    def _forget(self) -> None:
        self._plans.clear()
        self._resources.switches.clear()
        self._resources.compared_steps.clear()
        self._table = None
        self._replicas.clear()

    def run(self, request: StepRequest) -> StepResult:
        """Runs one step; see [Note: one step].

        Raises:
            BaseException: the first exception that user code raised in any micro-batch, with its traceback.
            PipelineStalled: if the schedule cannot make progress.
            UnitEscapeError: if a tensor leaves a unit on a way that would lose its gradient.
            BarrierError: if micro-batches do not meet for the same.
            ValueError: if preset costs do not match the calls.
        """
        trace = Trace(self._pool) if self.trace else None
        by_user = self._resources.by_user
        if by_user.is_in_units and self._resources.compiler is None:
            self._resources.compiler = UnitCompiler(None)
        step = Step(request, self._resources, self._current_table(), trace)
        try:
            result = step.run()
            if not request.is_trial:
                by_user.tell(is_final=self._resources.compiler is not None)
            return result
        finally:
            if not self._is_open:
                self._end_threads()
            if trace is not None:
                trace.close()

    def _current_table(self) -> UnitTable:
        """The units; found anew when modules came or went."""
        if self._table is None or not self._table.is_of(modules_of(self._root)):
            self._forget()
            self._table = UnitTable(self._root, self._unit_classes, self._exempt, self._pool.memory_limit)
        return self._table
