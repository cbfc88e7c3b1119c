"""Decide which device runs what, and when: pure data and arithmetic, no tensors, no threads, no devices.

A model is a row of *calls* (executions of its units). The package turns the measured cost of the calls into a
*partition* (calls -> stages), the partition into a *schedule* (stages x micro-batches -> devices), and a schedule into
a *timeline*, either simulated here or recorded by the engine. Everything is a frozen dataclass that validates itself,
and nothing but the standard library is imported, so that a plan can be computed, printed and tested anywhere.

Reading order: ``costs`` (what a call costs, and the machine), ``partition`` (calls -> stages), ``cuts`` (where stages
begin), ``stages`` (what a stage costs), ``schedule`` (what runs where, as data) and ``builders`` (RoundPipe's
schedule and those it is compared with), ``dispatch`` (stages that are split over devices), ``simulate`` (schedule ->
timeline), ``spans`` and ``timeline`` (what ran when), ``plan`` (the best plan of a step, found by ``search``).
``quantities`` reads and writes sizes, speeds and times; ``files`` writes files whole.

The method is that of the RoundPipe paper, "Efficient Training on Multiple Consumer GPUs with RoundPipe",
arXiv 2604.27085.
"""

from __future__ import annotations

from .builders import gpipe, interleaved_one_f_one_b, looped_bfs, one_f_one_b, round_robin
from .costs import CallCost, CostProfile, DeviceTraits, Machine, SharedLink
from .cuts import balanced_cuts
from .partition import Partition, Stage, StageKind, keep_together
from .plan import StageMemoryError, StepPlan, plan_evaluation, plan_training
from .schedule import Action, Schedule, ScheduleError
from .simulate import simulate
from .spans import Mark, Span
from .stages import StageCost, bound_stage_costs, stage_costs
from .timeline import Simulation, Timeline

__all__ = [
    "Action",
    "CallCost",
    "CostProfile",
    "DeviceTraits",
    "Machine",
    "Mark",
    "Partition",
    "Schedule",
    "ScheduleError",
    "SharedLink",
    "Simulation",
    "Span",
    "Stage",
    "StageCost",
    "StageKind",
    "StageMemoryError",
    "StepPlan",
    "Timeline",
    "balanced_cuts",
    "bound_stage_costs",
    "gpipe",
    "interleaved_one_f_one_b",
    "keep_together",
    "looped_bfs",
    "one_f_one_b",
    "plan_evaluation",
    "plan_training",
    "round_robin",
    "simulate",
    "stage_costs",
]
