"""Decide which device runs what, and when: pure data and arithmetic, no tensors, no threads, no devices.

A model is a row of *calls* (executions of its units). The package turns the measured cost of the calls into a
*partition* (calls -> stages), the partition into a *schedule* (stages x micro-batches -> devices), and a schedule into
a *timeline*, either simulated here or recorded by the engine. Everything is a frozen dataclass that validates itself,
and nothing but the standard library is imported, so that a plan can be computed, printed and tested anywhere.

Reading order: ``costs`` (what a call costs), ``partition`` (costs -> stages), ``schedule`` (stages -> devices),
``timeline`` (what ran when), ``simulate`` (schedule -> timeline), ``rank`` (the best of several partitions).

The method is that of the RoundPipe paper, "Efficient Training on Multiple Consumer GPUs with RoundPipe",
arXiv 2604.27085.
"""

from __future__ import annotations

from .costs import CallCost, CostProfile
from .partition import (
    Partition,
    Stage,
    StageKind,
    candidate_partitions,
    keep_together,
    partition,
    partition_forward,
)
from .rank import fastest
from .schedule import Action, Schedule, ScheduleError, next_first_device, parse_schedule, round_robin
from .simulate import simulate, stage_durations
from .timeline import Span, Timeline

__all__ = [
    "Action",
    "CallCost",
    "CostProfile",
    "Partition",
    "Schedule",
    "ScheduleError",
    "Span",
    "Stage",
    "StageKind",
    "Timeline",
    "candidate_partitions",
    "fastest",
    "keep_together",
    "next_first_device",
    "parse_schedule",
    "partition",
    "partition_forward",
    "round_robin",
    "simulate",
    "stage_durations",
]
