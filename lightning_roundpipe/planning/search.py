"""The search for a plan: stages, splits and rounds together, by the time of a simulated step.

```
limits on a stage's time -> greedy cuts -> r = 1, r = N, and between -> tapers -> neighbours of the best
                                 |                   |                    |              |
                                 +-------------------+--------------------+--------------+--> dispatch_ms: the fastest
```

[Note: how the plan is found]
The formula that the paper minimises takes every stage for as long as the longest one, every lap of the ring for full,
and transfers for free. The simulator knows better, but can only be asked. So partitions are made by the greedy filling
of `StageSearch` for a row of limits on the time of a stage, from a single call to the whole model; then with tapers,
that is, shorter stages near the first call, with which the ring fills (forward) and drains (backward) in less time;
then by moving, splitting and joining stages of the best one. Whatever `dispatch_ms` finds fastest wins, the fewest
stage runs among equals.

On how many devices a stage is at a time follows from few numbers, which are tried one after the other (`Split`). The
*load*: a stage run must compute at least so many times as long as its weights or its gradients travel, so that stages
with heavy weights and little work are on fewer devices than others: on a number that divides that of all devices, so
that all get equally many stage runs. The most devices for any stage. And whether the first stages are on more of them,
so that the pipeline fills faster, or the last ones, so that it drains faster. Where devices wait for each other even
so, the shortest stages there can be, single calls, are tried as well.

Where nothing has to travel and all devices are alike, no cost is needed to choose: the numbers of micro-batches and
devices alone decide, so that gradients are added up in the same order whatever was measured. r is the largest number
that divides the devices into rings and the micro-batches of each round into equal groups. (Of the round sizes only the
first one is taken then, so that a plan may be a little slower than one without splits and in other rounds.)

Devices without a memory limit are the host's own cores, and what is kept on them takes the memory of the host, of which
the planner knows nothing. There the cuts are those for r = 1, with which few graphs are kept, and how many devices a
stage is on is chosen afterwards: otherwise the fastest plan would be one fused stage, all of its graphs kept.

The host's memory, links that devices share and the network are known to `simulate` alone: then the fastest few that
differ in the number of stage runs are run there. If splits do not save clearly more than the search could have missed,
plans without them are searched as if there were no others, and the faster one wins.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .costs import CostProfile, Machine
from .cuts import Cuts, StageSearch, neighbour_cuts, single_calls
from .dispatch import dispatch, dispatch_ms
from .partition import pieces
from .simulate import simulate
from .stages import ADDITION_PASSES, StageCost, StageTable

_NUM_LIMITS = 24
_NUM_VARIED = 16
_NUM_VARIATIONS = 200
_NUM_NEIGHBOURS = 2_000
_NUM_SIMULATED = 4
_NUM_SIMULATED_ACTIONS = 4_000
_NUM_FAILURES = 60
_NUM_EVENED = 6
_NUM_SPLIT = 3
_LOADS = (0.7, 1.0, 1.4, 2.0, 4.0)
# How much is tried in all: simulated actions, which take about 0.2 microseconds each, and stage runs, which take as
# long as several of them. The last attempts get at least their share of it.
_NUM_ACTIONS = 60_000
_NUM_ACTIONS_PER_CALL = 500
_ACTIONS_PER_RUN = 8
_LEAST_SHARE = 0.2
_UNSPLIT_SHARE = 1.5  # where no stage is split, and stage runs are few enough not to be counted
# What splits must save at least, or plans without them are searched as if there were no others.
_CLEAR = 0.08


class Split(NamedTuple):
    """On how many devices stages are at a time; see [Note: how the plan is found].

    Attributes:
        most: Devices for any stage, in the middle of the step.
        load: How long a stage run with gradients computes at least, over the time for which they or weights travel.
        forward_load: The same for one without gradients.
        fills, drains: How many stages from the begin, or from the end, are on all devices; as many are on half of them,
            then on a third, and so on.
    """

    most: int
    load: float = 0.0
    forward_load: float = 0.0
    fills: int = 0
    drains: int = 0


class Candidate(NamedTuple):
    """Cuts as `pieces` takes them, and how they run."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    split: Split
    round_size: int

    @classmethod
    def of(cls, cuts: Cuts, split: Split, round_size: int) -> Candidate:
        """The candidate with these cuts."""
        return cls(tuple(cuts[0]), tuple(cuts[1]), split, round_size)


_UNSPLIT = Split(1)


class Score:
    """Simulated times of candidates.

    Args:
        profile, machine, num_microbatches: As for `plan_training`.
        is_training: Whether there is a backward.
        may_split: Whether a stage may be on several devices at a time.
    """

    def __init__(
        self,
        profile: CostProfile,
        machine: Machine,
        num_microbatches: int,
        is_training: bool,
        may_split: bool,
    ) -> None:
        self._profile = profile
        self.num_calls, self.num_devices = len(profile.calls), machine.num_devices
        self.num_microbatches = num_microbatches
        self.num_actions = 0
        self.is_training = is_training
        self.may_split = may_split and machine.num_devices > 1 and num_microbatches > 1
        self._machine = machine
        self._table = StageTable(profile, is_training=is_training)
        self._known: dict[tuple[object, ...], float] = {}
        self._tried: dict[Candidate, tuple[float, int]] = {}  # the time in ms, and how many stage runs there are
        self._lane_bytes_per_ms = _lane_bytes_per_ms(machine)
        self.has_ways = not (machine.is_uniform and math.isinf(self._lane_bytes_per_ms))  # that decide on splits
        self.has_links = math.isfinite(self._lane_bytes_per_ms)
        self._memory = machine.memories[-1] if machine.memories else None
        self.has_limit = self._memory is not None
        # With a number that divides that of the devices, every device gets a stage run as often as the others.
        self._even = [
            max((d for d in range(1, n + 1) if machine.num_devices % d == 0), default=0)
            for n in range(machine.num_devices + 1)
        ]

    @property
    def num_tried(self) -> int:
        """How many candidates have a time."""
        return len(self._tried)

    def of(self, candidate: Candidate) -> float:
        """The simulated time of a step, in ms."""
        tried = self._tried.get(candidate)
        if tried is None:
            costs = self._costs(candidate)
            splits = self._splits(costs, candidate.split, candidate.round_size)
            num_runs = sum(splits) * -(-self.num_microbatches // candidate.round_size)
            key = candidate.forward, candidate.backward, splits, candidate.round_size
            if key not in self._known:
                self._known[key] = self._time(costs, splits, candidate.round_size, num_runs)
            tried = self._tried[candidate] = self._known[key], num_runs
        return tried[0]

    def _time(self, costs: Sequence[StageCost], splits: Sequence[int], round_size: int, num_runs: int) -> float:
        num_actions = len(costs) * self.num_microbatches
        if not self._machine.is_uniform:
            num_actions *= self.num_devices
        elif min(splits) == self.num_devices:  # of one device
            num_actions, num_runs = num_actions // self.num_devices, num_runs // self.num_devices
        self.num_actions += num_actions + (_ACTIONS_PER_RUN * num_runs if self.may_split else 0)
        counts = {"num_microbatches": self.num_microbatches, "round_size": round_size}
        ms = dispatch_ms(costs, self._machine, splits=splits, **counts)
        return max(ms, self._host_ms(costs, splits, round_size))

    def splits(self, candidate: Candidate) -> tuple[int, ...]:
        """On how many devices at a time each stage is."""
        return self._splits(self._costs(candidate), candidate.split, candidate.round_size)

    def _splits(self, costs: Sequence[StageCost], split: Split, round_size: int) -> tuple[int, ...]:
        num_devices, num_stages = min(self.num_devices, round_size), len(costs)
        most = min(split.most, num_devices)
        counts = [most] * num_stages
        loads = split.forward_load, split.load
        if any(loads) and math.isfinite(self._lane_bytes_per_ms):
            for stage, cost in enumerate(costs):
                load = loads[cost.gradient_bytes > 0]
                travel_ms = load * max(cost.weight_bytes, cost.gradient_bytes) / self._lane_bytes_per_ms
                if travel_ms * most > round_size * cost.duration_ms:
                    counts[stage] = self._even[max(1, int(round_size * cost.duration_ms / travel_ms))]
        for ends, order in ((split.fills, 1), (split.drains, -1)):
            for index in range(min(num_devices * ends, num_stages)):
                stage = index if order > 0 else -1 - index
                counts[stage] = max(counts[stage], num_devices // (index // ends + 1))
        return tuple(counts)

    def _host_ms(self, costs: Sequence[StageCost], splits: Sequence[int], round_size: int) -> float:
        """The least time in ms that the host memory needs for a step."""
        if math.isinf(self._machine.host_bytes_per_ms):
            return 0.0
        num_rounds = -(-self.num_microbatches // round_size)
        num_runs = sum(splits)
        # Where every device comes back to its own stage, its weights stay there.
        num_uploads = min(num_rounds, self.num_devices // num_runs) if self.num_devices % num_runs == 0 else num_rounds
        moved = 0.0
        for cost, count in zip(costs, splits, strict=True):
            num_times = num_uploads * count
            moved += num_times * cost.resident_bytes + self.num_microbatches * (cost.input_bytes + cost.output_bytes)
            moved += ADDITION_PASSES * (num_times - 1) * cost.gradient_bytes
        return moved / self._machine.host_bytes_per_ms

    def budget(self, num_tries: int, share: float) -> Iterator[None]:
        """Yield until so many have been tried, or simulating has taken this share of the time that is left for it."""
        total = max(_NUM_ACTIONS, _NUM_ACTIONS_PER_CALL * self.num_calls) * (1.0 if self.may_split else _UNSPLIT_SHARE)
        stop = self.num_actions + share * max(total - self.num_actions, _LEAST_SHARE * total)
        for _ in range(num_tries):
            if self.num_actions >= stop:
                return
            yield

    def without_splits(self) -> Score:
        """The same, with nothing tried yet and every stage on one device at a time."""
        return Score(self._profile, self._machine, self.num_microbatches, self.is_training, False)

    def fits(self, cuts: Cuts) -> bool:
        """Whether every stage of several calls keeps within the memory: two of its kind, and its activations."""
        memory = self._memory
        if memory is None:
            return True
        for kind, start, stop in pieces(self.num_calls, *cuts):
            cost = self._table.cost(kind, start, stop)
            if stop - start > 1 and 2 * cost.resident_bytes + cost.workspace_bytes > memory:
                return False
        return True

    def ranked(self) -> list[Candidate]:
        """The candidates, the fastest first, the fewest stage runs among equals; those that split if they may."""
        tried = [c for c in self._tried if self.may_split or c.split == _UNSPLIT]
        return sorted(tried, key=lambda candidate: (self._tried[candidate], candidate))

    def best(self, split: Split | None = None) -> tuple[Candidate, float]:
        """The fastest candidate, of those that are split in a way if one is given, and its simulated time in ms."""
        ranked = [candidate for candidate in self.ranked() if split in (None, candidate.split)]
        machine = self._machine
        if math.isinf(machine.host_bytes_per_ms) and not machine.shared_links and machine.num_ranks == 1:
            return ranked[0], self._tried[ranked[0]][0]
        best, best_ms = ranked[0], self._simulated_ms(ranked[0])
        num_actions = len(self._costs(best)) * self.num_microbatches
        num_simulated = min(_NUM_SIMULATED, max(2, _NUM_SIMULATED_ACTIONS // num_actions))
        fastest: dict[int, Candidate] = {}  # of those with as many stage runs
        for candidate in ranked:
            fastest.setdefault(self._tried[candidate][1], candidate)
        for candidate in list(fastest.values())[1:num_simulated]:
            # With what is shared it takes at least as long as without.
            if self._tried[candidate][0] < best_ms and (ms := self._simulated_ms(candidate)) < best_ms:
                best, best_ms = candidate, ms
        return best, best_ms

    def _costs(self, candidate: Candidate) -> list[StageCost]:
        return [self._table.cost(*piece) for piece in pieces(self.num_calls, candidate.forward, candidate.backward)]

    def _simulated_ms(self, candidate: Candidate) -> float:
        costs = self._costs(candidate)
        counts = {"num_microbatches": self.num_microbatches, "round_size": candidate.round_size}
        schedule = dispatch(costs, self._machine, splits=self.splits(candidate), **counts)
        return simulate(schedule, costs, self._machine).step_ms


def _lane_bytes_per_ms(machine: Machine) -> float:
    """What the slowest lane reaches while all of its direction are busy."""
    return min(
        machine.host_bytes_per_ms / machine.num_devices,
        *(min(device.h2d_bytes_per_ms, device.d2h_bytes_per_ms) for device in machine.traits),
        *(link.bytes_per_ms / len(link.devices) for link in machine.shared_links),
    )


def explore(search: StageSearch, score: Score, round_sizes: Sequence[int]) -> tuple[Candidate, float, float]:
    """Return the fastest plan, its time in ms, and that of the fastest one found that splits no stage.

    Args:
        search: Makes cuts within the memory that the first round size leaves.
        score: Tells their times.
        round_sizes: What may be tried; the first one for everything, the others for the fastest.
    """
    if not score.may_split:
        _search(search, score, round_sizes, (_UNSPLIT,))
        best, best_ms = score.best()
        return best, best_ms, best_ms
    if not score.has_ways:
        return _explore_rings(search, score, round_sizes[0])
    _search(search, score, round_sizes, (_UNSPLIT, Split(score.num_devices)) if score.has_limit else (_UNSPLIT,))
    best, best_ms = score.best()
    score.may_split = False
    _try_rounds(score, round_sizes)
    single, single_ms = score.best()
    if best_ms > (1 - _CLEAR) * single_ms:
        unsplit = score.without_splits()
        _search(search, unsplit, round_sizes, (_UNSPLIT,))
        single, single_ms = unsplit.best()
    return (best, best_ms, single_ms) if best_ms < single_ms else (single, single_ms, single_ms)


def _explore_rings(search: StageSearch, score: Score, size: int) -> tuple[Candidate, float, float]:
    """The same where nothing has to travel and all devices are alike: counts alone decide on r."""
    # The most rings of equally many devices that equal groups of each round's micro-batches can have.
    rings = Split(math.gcd(score.num_devices, size, score.num_microbatches))
    if score.has_limit:
        _search(search, score, (size,), (rings,))
    else:
        unsplit = score.without_splits()
        _search(search, unsplit, (size,), (_UNSPLIT,))
        for candidate in unsplit.ranked()[:_NUM_SPLIT]:
            score.of(candidate._replace(split=rings))
    best, best_ms = score.best(rings)
    return best, best_ms, score.of(best._replace(split=_UNSPLIT))


def _search(search: StageSearch, score: Score, round_sizes: Sequence[int], splits: Sequence[Split]) -> None:
    """Try candidates: cuts for a row of limits with each of the splits, and what comes of the fastest."""
    size = round_sizes[0]
    limits = search.limits_between(_NUM_LIMITS)
    times: dict[int, float] = {}
    for limit in limits:
        cuts = search.cuts(limit)
        for split in splits:
            ms = score.of(Candidate.of(cuts, split, size))
            times[limit] = min(ms, times.get(limit, ms))
    good = sorted(limits, key=times.__getitem__)[:_NUM_VARIED]
    split = splits[0]
    if len(splits) > 1:
        _try_splits(score, score.ranked()[:_NUM_SPLIT])
        if min(score.splits(score.ranked()[0])) < score.num_devices:
            # Devices wait for each other, so that many short stages pay: the shortest are single calls.
            single = single_calls(score.num_calls, is_training=score.is_training)
            _try_splits(score, [Candidate.of(single, Split(score.num_devices), size)])
        split = score.ranked()[0].split
    rng = random.Random(0)
    if score.is_training:
        for limit in good[:_NUM_EVENED]:
            if score.fits(even := search.evened(search.cuts(limit))):
                score.of(Candidate.of(even, split, size))
        for _ in score.budget(_NUM_VARIATIONS, share=0.5):
            longest_taper = 2 * score.num_devices
            tapered = search.cuts(
                rng.choice(good),
                forward_taper=rng.randrange(longest_taper),
                backward_taper=rng.randrange(longest_taper),
            )
            score.of(Candidate.of(tapered, split, size))
    _improve(score, rng)
    if score.may_split and score.has_ways:
        _try_splits(score, score.ranked()[:_NUM_SPLIT])
    _try_rounds(score, round_sizes)


def _try_rounds(score: Score, round_sizes: Sequence[int]) -> None:
    """Try the other round sizes for the fastest."""
    for size in round_sizes[1:]:
        score.of(score.ranked()[0]._replace(round_size=size))


def _try_splits(score: Score, starts: Sequence[Candidate]) -> None:
    """Try other splits of these, one number after the other."""
    for start in starts:
        now = start
        most = [count for count in range(score.num_devices, 1, -1) if score.num_devices % count == 0]
        for others in (
            [{"load": load, "forward_load": load} for load in _LOADS] if score.has_links else [],
            [{"most": count} for count in most],
            [{"forward_load": load} for load in (0.0, *_LOADS)] if score.has_links else [],
            [{"fills": fills, "drains": drains} for fills in (0, 1, 2) for drains in (0, 1, 2) if fills or drains],
        ):
            base = now.split if now.split.most > 1 else Split(score.num_devices)
            tried = [now, *(now._replace(split=base._replace(**other)) for other in others)]
            now = min(tried, key=score.of)


def _improve(score: Score, rng: random.Random) -> None:
    """Try neighbours of the fastest, then of the next fastest, and so on, while there are some that were not tried."""
    most_known = max(_NUM_FAILURES, score.num_calls)  # in a row: then it is assumed that all were tried
    starts = iter(score.ranked())
    now, num_failures, num_tried, num_known = next(starts), 0, 0, 0
    for _ in score.budget(_NUM_NEIGHBOURS, share=1.0):
        num_known = 0 if score.num_tried > num_tried else num_known + 1
        num_tried = score.num_tried
        if num_known > most_known:
            return
        if num_failures == _NUM_FAILURES:
            now, num_failures = next(starts, now), 0
        cuts = neighbour_cuts([list(now.forward), list(now.backward)], rng, score.num_calls, score.is_training)
        num_failures += 1
        if cuts is None or not score.fits(cuts):
            continue
        other = Candidate.of(cuts, now.split, now.round_size)
        if score.of(other) <= score.of(now):
            num_failures *= score.of(other) == score.of(now)
            now = other
