"""Partitions into stages, as planners of an engine give them; and the search for plans in few attempts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from lightning_roundpipe.engine.runner import Planner
from lightning_roundpipe.planning import CostProfile, Machine, Partition, Schedule, Stage, StageKind, StepPlan, search

Make = Callable[[int, int, int, int], Schedule]


@dataclass(frozen=True)
class Scheduled(StepPlan):
    """A plan whose steps have schedules that a test makes: any that :class:`Schedule` accepts.

    Attributes:
        make: (number of stages, of micro-batches, of devices, device that is next) -> schedule.
        after: (device that is next) -> device that is next after the step. If that is never the same, each step gets
            a new schedule.
    """

    make: Make | None = field(default=None, compare=False)
    after: Callable[[int], int] = field(default=lambda first: first + 1, compare=False)

    def schedule(
        self, profile: CostProfile, machine: Machine, num_microbatches: int, *, first_device: int = 0, **_: object
    ) -> Schedule:
        assert self.make is not None
        return self.make(self.partition.num_stages, num_microbatches, machine.num_devices, first_device)

    def next_first_device(self, schedule: Schedule, first_device: int) -> int:
        return self.after(first_device)


def scheduled(partition: Partition, make: Make, **options: Callable[[int], int]) -> Scheduled:
    """A plan of this partition; see :class:`Scheduled`."""
    return Scheduled(partition, (1,) * partition.num_stages, make=make, **options)


def cut_at(count: int, training: bool, forward: Sequence[int], backward: Sequence[int], fused: int) -> Partition:
    """Stages that begin at the given calls; for evaluation, ``backward`` and ``fused`` play no role."""
    if not training:
        pieces = [(StageKind.FORWARD, *piece) for piece in pairwise([0, *forward, count])]
    else:
        pieces = [(StageKind.FORWARD, *piece) for piece in _pieces(forward, fused)]
        pieces.append((StageKind.FUSED, fused, count))
        pieces.extend((StageKind.BACKWARD, *piece) for piece in reversed(_pieces(backward, fused)))
    return Partition(count, tuple(Stage(i, *piece) for i, piece in enumerate(pieces)))


def _pieces(cuts: Sequence[int], stop: int) -> list[tuple[int, int]]:
    return list(pairwise([0, *(c for c in cuts if c < stop), stop])) if stop else []


def everything_kept(
    costs: CostProfile, machine: Machine | None = None, num_microbatches: int = 1, training: bool = True
) -> Partition:
    """One stage, fused."""
    count = len(costs.calls)
    return Partition(count, (Stage(0, StageKind.FUSED, 0, count),))


def everything_recomputed(
    costs: CostProfile, machine: Machine | None = None, num_microbatches: int = 1, training: bool = True
) -> Partition:
    """The last call is fused, every other one has a stage for its forward and one for its backward."""
    count = len(costs.calls)
    return cut_at(count, training, range(1, count), range(1, count), max(0, count - 1))


def recomputed_elsewhere(
    costs: CostProfile, machine: Machine | None = None, num_microbatches: int = 1, training: bool = True
) -> Partition:
    """One forward stage, the last call fused, a backward stage for every other call: on two devices, every second one
    is recomputed where its forward was not."""
    count = len(costs.calls)
    return cut_at(count, training, () if training else range(1, count), range(1, count), max(0, count - 1))


def two_calls_fused(
    costs: CostProfile, machine: Machine | None = None, num_microbatches: int = 1, training: bool = True
) -> Partition:
    """The last two calls are fused, every other one has a stage for its forward and one for its backward."""
    count = len(costs.calls)
    return cut_at(count, training, range(1, count), range(1, count), count - 2)


def any_partition(num_calls: int, training: bool, rng: random.Random) -> Partition:
    """Stages cut anywhere, forward and backward in different places."""
    if num_calls == 0 or not training:
        kind = StageKind.FUSED if training else StageKind.FORWARD
        return Partition(num_calls, (Stage(0, kind, 0, num_calls),))
    fused = rng.randrange(num_calls)
    forward, backward = (
        sorted(rng.sample(range(1, fused), rng.randint(0, fused - 1))) if fused > 1 else [] for _ in range(2)
    )
    return cut_at(num_calls, training, forward, backward, fused)


def planner(seed: int) -> Planner:
    """The same stages, cut anywhere, for every number of micro-batches."""

    def plan(costs: CostProfile, machine: Machine, num_microbatches: int, training: bool) -> Partition:
        return any_partition(len(costs.calls), training, random.Random(seed))

    return plan


def search_briefly(set_attribute: Callable[[object, str, int], None]) -> None:
    """Plans are searched for in few attempts: results of trainings are those of any plan.

    Args:
        set_attribute: ``setattr``, or that of a ``MonkeyPatch``.
    """
    for name, count in {"_NUM_LIMITS": 8, "_NUM_VARIATIONS": 5, "_NUM_NEIGHBOURS": 20, "_NUM_SIMULATED": 1}.items():
        set_attribute(search, name, count)
