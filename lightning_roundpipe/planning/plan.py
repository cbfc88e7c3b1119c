"""The plan of a run: the partition with the shortest simulated step.

```
limits on a stage's time -> greedy cuts -> with tapers -> neighbours of the best
                                 |              |                 |
                                 +--------------+-----------------+--> ring_ms: the fastest, the fewest stages of those
```

[Note: how the plan is found]
The formula that `partition` minimises takes every stage for as long as the longest one, every lap of the ring for
full, and transfers for free. The simulator knows better, but can only be asked. So partitions are made by the greedy
filling of `partition` for a row of limits on the time of a stage, from a single call to the whole model; then with
tapers, that is, shorter stages near the first call, with which the ring fills (forward) and drains (backward) in less
time; then by moving, splitting and joining stages of the best one. Whatever `ring_ms` finds fastest wins, the fewest
stages among equals. The formula's own partition is one of the candidates, so the result is never worse than it. A host
memory that is shared by all lanes is known to `simulate` alone: then the fastest few are run there.

Memory: the weights and gradients of a stage may take half of what the activations leave of a device, so that the next
stage can be uploaded meanwhile. A single call may take all of it, at the price of that overlap. Activations are those
of the micro-batch that is in the stage, and what the last calls of a stage gave: until a micro-batch has its turn in
the next stage, that waits on the device that made it, for as many micro-batches as are in a round.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from .builders import ring_ms, round_robin
from .costs import CallCost, CostProfile, Machine
from .cuts import StageSearch
from .partition import Partition, assemble, no_calls, pieces
from .quantities import format_bytes
from .simulate import simulate
from .stages import StageCost, StageTable

_NUM_LIMITS = 24
_NUM_VARIED = 16
_NUM_VARIATIONS = 200
_NUM_NEIGHBOURS = 2_000
_NUM_SIMULATED = 4
_NUM_FAILURES = 60
_NUM_EVENED = 6
# How much is tried in all: simulated actions, which take about 0.2 microseconds each. The last attempts get at least
# their share of it.
_NUM_ACTIONS = 90_000
_NUM_ACTIONS_PER_CALL = 800
_LEAST_SHARE = 0.2

Cuts = tuple[Sequence[int], Sequence[int]]
_Key = tuple[tuple[int, ...], tuple[int, ...]]


class StageMemoryError(ValueError):
    """A call that does not fit on a device, whatever the plan.

    Attributes:
        fits_if_split: Whether its weights and gradients alone would fit, so that smaller micro-batches help.
    """

    def __init__(self, message: str, *, fits_if_split: bool = True) -> None:
        super().__init__(message)
        self.fits_if_split = fits_if_split


def plan_training(
    profile: CostProfile,
    machine: Machine,
    *,
    num_microbatches: int,
    round_size: int | None = None,
    hop_ms: float = 0.0,
) -> Partition:
    """Return the training partition with the shortest simulated step; see [Note: how the plan is found].

    Deterministic. Takes a fraction of a millisecond per call of the model.

    Args:
        profile: The costs of the calls of one micro-batch, in call order.
        machine: What it runs on.
        num_microbatches: M, the micro-batches of a step, at least 1.
        round_size: Micro-batches that walk through the stages together; None for all.
        hop_ms: Time in ms of an activation's way to another device, besides the machine's links.

    Raises:
        ValueError: If a number is out of range.
        StageMemoryError: If a call needs more memory than a device has; the message says how much, and what helps.
    """
    return _plan(profile, machine, num_microbatches, round_size, hop_ms, is_training=True)


def plan_evaluation(
    profile: CostProfile,
    machine: Machine,
    *,
    num_microbatches: int,
    round_size: int | None = None,
    hop_ms: float = 0.0,
) -> Partition:
    """Return the forward-only partition with the shortest simulated step; arguments and errors as `plan_training`."""
    return _plan(profile, machine, num_microbatches, round_size, hop_ms, is_training=False)


def _plan(
    profile: CostProfile,
    machine: Machine,
    num_microbatches: int,
    round_size: int | None,
    hop_ms: float,
    *,
    is_training: bool,
) -> Partition:
    if not profile.calls:
        return no_calls(is_training=is_training)
    waiting = waiting_bytes(profile, num_microbatches, round_size)
    limit = stage_memory_limit(profile, machine, is_training=is_training, waiting_bytes=waiting)
    if machine.device_memory_bytes is not None:
        machine = replace(machine, device_memory_bytes=max(0, machine.device_memory_bytes - waiting))
    search = StageSearch(profile.calls, is_training=is_training, memory_limit=limit, counts_graphs=is_training)
    return _explore(search, _Score(profile, machine, num_microbatches, round_size, hop_ms, is_training=is_training))


def stage_memory_limit(
    profile: CostProfile, machine: Machine, *, is_training: bool, waiting_bytes: int = 0
) -> int | None:
    """Bytes that the weights and gradients of a stage should take at most on a device; None for no limit.

    Args:
        profile: The costs of the calls of one micro-batch.
        machine: What it runs on.
        is_training: Whether there is a backward.
        waiting_bytes: Activations on a device that wait for their next stage.

    Raises:
        StageMemoryError: If a single call does not fit.
    """
    memory = machine.device_memory_bytes
    if memory is None:
        return None
    for position, call in enumerate(profile.calls):
        needed = needed_bytes(call, is_training=is_training) + waiting_bytes
        if needed > memory:
            beside = f", beside {format_bytes(waiting_bytes)} of activations that wait for their next stage"
            raise StageMemoryError(
                f"Call {position}, {describe_need(call, is_training=is_training)}{beside if waiting_bytes else ''}. "
                f"That is {format_bytes(needed - memory)} over the {format_bytes(memory)} that a device has for it. "
                "Smaller micro-batches (more of them) take less for activations, finer units less for weights and "
                "gradients: RoundPipeStrategy(num_microbatches=..., units=[...]).",
                fits_if_split=call.state_bytes(is_training=is_training) <= memory,
            )
    activations = max((call.activation_bytes(is_training=is_training) for call in profile.calls), default=0)
    return max(0, memory - waiting_bytes - activations) // 2


def waiting_bytes(profile: CostProfile, num_microbatches: int, round_size: int | None) -> int:
    """Return the bytes of activations on a device that wait for their next stage; see [Note: how the plan is found]."""
    largest = max((call.output_bytes for call in profile.calls[:-1]), default=0)  # the loss follows the last one
    return largest * min(num_microbatches, round_size or num_microbatches)


def needed_bytes(call: CallCost, *, is_training: bool) -> int:
    """Return what a device has to hold while the call runs for one micro-batch, in bytes."""
    return call.state_bytes(is_training=is_training) + call.activation_bytes(is_training=is_training)


def describe_need(call: CallCost, *, is_training: bool) -> str:
    """Return what a call needs on a device, for people."""
    gradients = f"gradients {format_bytes(call.gradient_bytes)}, " if is_training else ""
    return (
        f"{call.name!r} needs {format_bytes(needed_bytes(call, is_training=is_training))} on a device: weights "
        f"{format_bytes(call.weight_bytes)}, {gradients}activations of one micro-batch "
        f"{format_bytes(call.activation_bytes(is_training=is_training))}"
    )


class _Score:
    """Simulated times of candidates, which are cuts as `pieces` takes them."""

    def __init__(
        self,
        profile: CostProfile,
        machine: Machine,
        num_microbatches: int,
        round_size: int | None,
        hop_ms: float,
        *,
        is_training: bool,
    ) -> None:
        if num_microbatches < 1:
            raise ValueError(f"num_microbatches must be >= 1, got {num_microbatches}: pass how many there are.")
        if round_size is not None and round_size < 1:
            raise ValueError(f"round_size must be >= 1, got {round_size}: pass None for one round.")
        self.num_calls, self.num_devices = len(profile.calls), machine.num_devices
        self.num_actions = 0
        self.is_training = is_training
        self._machine, self._hop_ms = machine, hop_ms
        self.num_microbatches, self._round_size = num_microbatches, round_size
        self._table = StageTable(profile, is_training=is_training)
        self._known: dict[_Key, float] = {}

    def of(self, cuts: Cuts) -> float:
        """The simulated time of a step with these cuts, in ms."""
        key = (tuple(cuts[0]), tuple(cuts[1]))
        time_ms = self._known.get(key)
        if time_ms is None:
            costs = self._costs(key)
            self.num_actions += len(costs) * self.num_microbatches
            ms = ring_ms(
                costs,
                self._machine,
                num_microbatches=self.num_microbatches,
                round_size=self._round_size,
                hop_ms=self._hop_ms,
            )
            time_ms = self._known[key] = max(ms, self._host_ms(costs))
        return time_ms

    def _host_ms(self, costs: Sequence[StageCost]) -> float:
        """The least time in ms that the host memory needs for a step."""
        num_rounds = -(-self.num_microbatches // (self._round_size or self.num_microbatches))
        # Where every device comes back to its own stage, its weights stay there.
        num_uploads = num_rounds
        if self.num_devices % len(costs) == 0:
            num_uploads = min(num_rounds, self.num_devices // len(costs))
        moved = (
            num_uploads * cost.resident_bytes + self.num_microbatches * (cost.input_bytes + cost.output_bytes)
            for cost in costs
        )
        return sum(moved) / self._machine.host_bytes_per_ms

    def budget(self, num_tries: int, share: float) -> Iterator[None]:
        """Yield until so many have been tried, or simulating has taken this share of the time that is left for it."""
        total = max(_NUM_ACTIONS, _NUM_ACTIONS_PER_CALL * self.num_calls)
        stop = self.num_actions + share * max(total - self.num_actions, _LEAST_SHARE * total)
        for _ in range(num_tries):
            if self.num_actions >= stop:
                return
            yield

    def fits(self, cuts: Cuts) -> bool:
        """Whether every stage of several calls keeps within the memory: two of its kind, and its activations."""
        memory = self._machine.device_memory_bytes
        if memory is None:
            return True
        for kind, start, stop in pieces(self.num_calls, *cuts):
            cost = self._table.cost(kind, start, stop)
            if stop - start > 1 and 2 * cost.resident_bytes + cost.workspace_bytes > memory:
                return False
        return True

    def ranked(self) -> list[_Key]:
        """The candidates, the fastest first, the fewest stages among equals."""
        return sorted(self._known, key=lambda key: (self._known[key], len(key[0]) + len(key[1]), key))

    def best(self) -> Partition:
        """The fastest candidate."""
        ranked = self.ranked()
        if self._machine.host_bytes_per_ms == math.inf:
            return assemble(self.num_calls, *ranked[0])
        (first, *_), (formula, *_) = ranked, self._known
        num_simulated = min(_NUM_SIMULATED, _NUM_ACTIONS // (len(self._costs(first)) * self.num_microbatches))
        finalists = dict.fromkeys((first, *ranked[1:num_simulated], formula))
        return assemble(self.num_calls, *min(finalists, key=self._simulated_ms))

    def _costs(self, cuts: Cuts) -> list[StageCost]:
        return [self._table.cost(*piece) for piece in pieces(self.num_calls, *cuts)]

    def _simulated_ms(self, cuts: Cuts) -> float:
        costs = self._costs(cuts)
        schedule = round_robin(
            len(costs), self.num_microbatches, self._machine.num_devices, round_size=self._round_size
        )
        return simulate(schedule, costs, self._machine, hop_ms=self._hop_ms).step_ms


def _explore(search: StageSearch, score: _Score) -> Partition:
    """The best of the formula's partition, those for a row of limits, random variations of them, and neighbours."""
    score.of(search.best(score.num_devices, score.num_microbatches))
    limits = search.limits_between(_NUM_LIMITS)
    times = {limit: score.of(search.cuts(limit)) for limit in limits}
    good = sorted(limits, key=times.__getitem__)[:_NUM_VARIED]
    rng = random.Random(0)
    if score.is_training:
        for limit in good[:_NUM_EVENED]:
            if score.fits(even := search.evened(search.cuts(limit))):
                score.of(even)
        for _ in score.budget(_NUM_VARIATIONS, share=0.5):
            longest_taper = 2 * score.num_devices
            score.of(
                search.cuts(
                    rng.choice(good),
                    forward_taper=rng.randrange(longest_taper),
                    backward_taper=rng.randrange(longest_taper),
                )
            )
    starts = iter(score.ranked())
    now, num_failures = next(starts), 0
    for _ in score.budget(_NUM_NEIGHBOURS, share=1.0):
        if num_failures == _NUM_FAILURES:
            now, num_failures = next(starts, now), 0
        cuts = _neighbour([list(row) for row in now], rng, score.num_calls, score.is_training)
        num_failures += 1
        if cuts is not None and score.fits(cuts) and score.of(cuts) <= score.of(now):
            num_failures *= score.of(cuts) == score.of(now)
            now = tuple(cuts[0]), tuple(cuts[1])
    return score.best()


def _neighbour(rows: list[list[int]], rng: random.Random, num_calls: int, is_training: bool) -> Cuts | None:
    """Change cuts a little; None where the random choice cannot be made."""
    choice = rng.random()
    if choice < 0.1 and is_training:
        return _move_fused_stage(rows, rows[0][-1] + rng.choice((-1, 1)), num_calls)
    row = rows[rng.randrange(2)] if is_training else rows[0]
    if len(row) < 2:
        return None
    if choice < 0.8:  # one call less for a stage, one more for another: the cuts between them move
        first, last = sorted(rng.choices(range(1, len(row)), k=2))
        step = rng.choice((-1, 1))
        row[first:last] = [cut + step for cut in row[first:last]]
        return None if any(a >= b for a, b in pairwise(row)) else (rows[0], rows[1])
    index = rng.randrange(len(row) - 1)
    if choice < 0.9:
        if row[index + 1] - row[index] < 2:
            return None
        row.insert(index + 1, rng.randrange(row[index] + 1, row[index + 1]))
    elif index == 0:
        return None
    else:
        del row[index]
    return rows[0], rows[1]


def _move_fused_stage(rows: list[list[int]], start: int, num_calls: int) -> Cuts | None:
    """Let the fused stage begin at call `start`, next to where it begins now."""
    if not 0 <= start < num_calls:
        return None
    for row in rows:
        if len(row) == 1:
            row.append(start)
        elif row[-2] == start:
            row.pop()
        else:
            row[-1] = start
    return rows[0], rows[1]
