"""Choose between partitions by running them in the simulator.

The formula that `partition` minimises takes every stage for as long as the longest, and every lap of the ring for full.
The simulator knows better, so the plan of a run is the candidate with the shortest simulated step.
"""

from __future__ import annotations

from collections.abc import Sequence

from .costs import CostProfile
from .partition import Partition
from .schedule import round_robin
from .simulate import simulate, stage_durations


def fastest(
    candidates: Sequence[Partition],
    profile: CostProfile,
    *,
    num_devices: int,
    num_microbatches: int,
    round_size: int | None = None,
) -> Partition:
    """The candidate whose round-robin schedule has the shortest simulated makespan; the first among equals.

    Args:
        candidates: At least one partition of the calls of `profile`.
        profile: Times in ms; without transfers.
        num_devices, num_microbatches, round_size: As for `round_robin`.

    Raises:
        ValueError: If there is no candidate.
    """
    if not candidates:
        raise ValueError("no candidate partition: pass at least one, for instance from candidate_partitions()")

    def makespan_ms(candidate: Partition) -> float:
        durations = stage_durations(candidate, profile)
        schedule = round_robin(candidate.num_stages, num_microbatches, num_devices, round_size=round_size)
        return simulate(schedule, lambda action: durations[action.stage_index]).makespan_ms

    return min(candidates, key=makespan_ms)
