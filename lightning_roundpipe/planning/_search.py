"""The search behind `partition`: the longest stage's time decides everything else.

Once an upper limit t on the time of every stage is fixed, the fewest stages follow greedily: give the fused stage as
many of the last calls as fit (the fewer calls remain, the fewer stages they need, forward and backward), then fill the
F stages and the B stages one after the other. The count falls as t grows, and the best t is the time of some possible
stage, so it is enough to try those. Neither the greedy filling nor the choice of t loses an optimum: the result is
exact.

RoundPipe paper, arXiv 2604.27085, section on partitioning: O(L^2) limits, O(L) per limit. Because the count falls
monotonically, most of the limits are skipped here without being tried.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise


class StageSearch:
    """Times and sizes of the calls as prefix sums, and the greedy filling on top of them.

    Times are integers over a common denominator: sums are then exact, equal stages have equal times, and no stage
    misses a limit by a rounding error.

    Args:
        forward_ms: Forward time of each call, in ms; at least one call.
        backward_ms: Backward time without recompute, in ms; None for a search over F stages only.
        forward_bytes: Size of each call in an F stage.
        backward_bytes: Size of each call in a B stage.
        fused_bytes: Size of each call in the fused stage; `backward_bytes` if left out.
        memory_limit: Bytes that the calls of a stage may take together; a single call may be above it. None for no
            limit.
    """

    def __init__(
        self,
        *,
        forward_ms: Sequence[float],
        backward_ms: Sequence[float] | None,
        forward_bytes: Sequence[int],
        backward_bytes: Sequence[int],
        fused_bytes: Sequence[int] | None = None,
        memory_limit: int | None,
    ) -> None:
        num_calls = len(forward_ms)
        ticks = _to_ticks([*forward_ms, *(backward_ms or ())])
        forward = ticks[:num_calls]
        self._is_training = backward_ms is not None
        backward = [f + b for f, b in zip(forward, ticks[num_calls:], strict=True)] if self._is_training else forward
        self._num_calls = num_calls
        self._forward_times = _prefix_sums(forward)
        self._backward_times = _prefix_sums(backward)
        self._forward_sizes = _prefix_sums(forward_bytes)
        self._backward_sizes = _prefix_sums(backward_bytes)
        self._fused_sizes = _prefix_sums(backward_bytes if fused_bytes is None else fused_bytes)
        self._memory_limit = memory_limit

    def best(self, num_devices: int, num_microbatches: int) -> tuple[list[int], list[int]]:
        """Return the cuts of the F stages and of the B stages that minimise the objective of `partition`.

        Cuts are call positions ``[0, ..., a]``; the fused stage begins at a. Without a backward, the first list ends
        with the number of calls.
        """
        good_limit, good_score = self._good_limit(num_devices, num_microbatches)
        limits = self._limits(self._longest_limit(good_score, num_devices, num_microbatches))
        best_limit = limits[0]
        best_score = stage_weight(self._count(best_limit), num_devices, num_microbatches) * best_limit
        if good_score < best_score:
            best_limit, best_score = good_limit, good_score
        index = 1
        while index < len(limits):
            # A longer t_max has to be paid for with fewer stages; this many are still as good as the best so far.
            affordable = _most_stages(best_score // limits[index], num_devices, num_microbatches)
            if affordable < 1:
                break
            index = _first_at_most(limits, index, self._count, affordable)
            if index == len(limits):
                break
            score = stage_weight(self._count(limits[index]), num_devices, num_microbatches) * limits[index]
            if score <= best_score:  # "equal" too: a later limit means fewer stages
                best_limit, best_score = limits[index], score
            index += 1
        return self.cuts(best_limit)

    def limits_between(self, num_limits: int) -> list[int]:
        """Return times from the shortest call's to that of all calls, in a geometric row, ascending."""
        times = self._backward_times
        low = max(1, min((b - a for a, b in pairwise(times) if b > a), default=1))
        high = max(low, times[-1])
        octaves = (math.log2(high) - math.log2(low)) / max(1, num_limits - 1)
        return sorted({_times_power_of_two(low, i * octaves) for i in range(num_limits)} | {high})

    def _limits(self, high: int) -> list[int]:
        """All times up to `high` that the longest stage can have: sums over neighbouring calls, each call fits."""
        prefixes = [self._forward_times, self._backward_times] if self._is_training else [self._forward_times]
        longest_call = self._longest_call()
        limits: set[int] = set()
        for prefix in prefixes:
            for start, begin in enumerate(prefix):
                first = bisect_left(prefix, begin + longest_call, start + 1)
                last = bisect_right(prefix, begin + high, first)
                limits.update(end - begin for end in prefix[first:last])
        return sorted(limits)

    def _longest_call(self) -> int:
        return max(b - a for a, b in pairwise(self._backward_times))

    def _good_limit(self, num_devices: int, num_microbatches: int) -> tuple[int, int]:
        """The best of a few limits and its score, which the best of all does not exceed."""
        longest_call = self._longest_call()
        rows = [limit for limit in self.limits_between(24) if limit >= longest_call]
        scores = [stage_weight(self._count(limit), num_devices, num_microbatches) * limit for limit in rows]
        score = min(scores)
        return rows[scores.index(score)], score

    def _longest_limit(self, score: int, num_devices: int, num_microbatches: int) -> int:
        """A time above which no limit is better than `score`; with layers of unequal times there are O(L^2) of them.

        A limit t has at least the score t N M. And S stages of at most t hold all the work, of which the fused stage
        saves no more than t of forwards: put into `stage_weight`, this bounds t, once for S >= N and once for S < N.
        """
        n, m = num_devices, num_microbatches
        work = self._forward_times[-1] + (self._backward_times[-1] if self._is_training else 0)
        saved = 1 if self._is_training else 0
        total = self._backward_times[-1]
        bounds = [
            (score - constant) // slope if slope > 0 else total
            for constant, slope in ((m * work, n * (n - 1) - saved * m), (n * work, n * (m - 1) - saved * n))
        ]
        return max(self._longest_call(), min(max(bounds), score // (n * m)))

    def cuts(self, limit: int, *, forward_taper: int = 0, backward_taper: int = 0) -> tuple[list[int], list[int]]:
        """Return greedy cuts whose stages take at most `limit`, but for calls that take longer by themselves.

        Args:
            limit: Time of the longest stage, in ticks; see `limits_between`.
            forward_taper, backward_taper: A taper of r makes the r stages of a kind that are nearest to the first call
                shorter, in equal steps: the ring fills and drains faster.
        """
        stop = self._fused_start(limit) if self._is_training else self._num_calls
        forward = self._fill(self._forward_times, self._forward_sizes, stop, limit, forward_taper)
        if not self._is_training:
            return forward, []
        return forward, self._fill(self._backward_times, self._backward_sizes, stop, limit, backward_taper)

    def evened(self, cuts: tuple[list[int], list[int]]) -> tuple[list[int], list[int]]:
        """Return as many cuts, moved to where they make stages of one kind as equal as possible.

        Greedy stages are all full but the last one. Without regard to memory.
        """
        forward, backward = cuts
        return _even_cuts(self._forward_times, forward), _even_cuts(self._backward_times, backward)

    def _count(self, limit: int) -> int:
        """Fewest stages that all take at most `limit`."""
        forward, backward = self.cuts(limit)
        # n cuts make n - 1 stages, and the fused stage is one more.
        return len(forward) + len(backward) - 1

    def _fused_start(self, limit: int) -> int:
        times, sizes = self._backward_times, self._fused_sizes
        start = bisect_left(times, times[-1] - limit)
        if self._memory_limit is not None:
            start = max(start, bisect_left(sizes, sizes[-1] - self._memory_limit))
        # At least the last call, also where it is over a limit by itself or costs nothing.
        return min(start, self._num_calls - 1)

    def _fill(self, times: list[int], sizes: list[int], stop: int, limit: int, taper: int) -> list[int]:
        """Cut calls ``[0, stop)`` greedily into stages within the limits, and return the cuts, 0 and stop included."""
        cuts = [0]
        position = 0
        while position < stop:
            share = limit * len(cuts) // (taper + 1) if len(cuts) <= taper else limit
            end = bisect_right(times, times[position] + share, position + 1, stop + 1) - 1
            if self._memory_limit is not None:
                end = bisect_right(sizes, sizes[position] + self._memory_limit, position + 1, end + 1) - 1
            position = max(end, position + 1)
            cuts.append(position)
        return cuts


def _even_cuts(times: list[int], cuts: list[int]) -> list[int]:
    """Cuts of the calls before the last cut into as many stages, each at its share of the time, or close to it."""
    num_stages = len(cuts) - 1
    made = [0]
    for index in range(1, num_stages):
        share = times[cuts[-1]] * index // num_stages
        low, high = made[-1] + 1, cuts[-1] - (num_stages - index)  # every stage has a call
        end = min(max(bisect_left(times, share), low), high)
        if end > low and share - times[end - 1] < times[end] - share:
            end -= 1
        made.append(end)
    return [*made, cuts[-1]] if num_stages else cuts


def stage_weight(num_stages: int, num_devices: int, num_microbatches: int) -> int:
    """Return the objective of `partition` for a t_max of 1: N times the makespan of equal stages of length 1."""
    if num_stages < num_devices:
        return num_devices * (num_microbatches + num_stages - 1)
    return num_microbatches * num_stages + num_devices * (num_devices - 1)


def _most_stages(weight: int, num_devices: int, num_microbatches: int) -> int:
    """Return the largest number of stages whose `stage_weight` is at most `weight`; below 1 if there is none."""
    if weight < num_devices * (num_microbatches + num_devices - 1):
        return weight // num_devices - num_microbatches + 1
    return (weight - num_devices * (num_devices - 1)) // num_microbatches


def _first_at_most(limits: list[int], start: int, count: Callable[[int], int], target: int) -> int:
    """Return the first index >= start whose limit needs at most `target` stages, or ``len(limits)``.

    Gallops before it bisects: the answer is nearly always close to the start.
    """
    low = high = start
    step = 1
    while high < len(limits) and count(limits[high]) > target:
        low = high + 1
        high += step
        step *= 2
    return bisect_left(limits, True, low, min(high, len(limits)), key=lambda limit: count(limit) <= target)


def _times_power_of_two(value: int, exponent: float) -> int:
    """``value * 2 ** exponent`` for integers of any size, which ticks are."""
    whole = math.floor(exponent)
    return (value * round(2 ** (exponent - whole + 32)) << whole) >> 32


def _prefix_sums(values: Sequence[int]) -> list[int]:
    return list(accumulate(values, initial=0))


def _to_ticks(values: Sequence[float]) -> list[int]:
    """Scale floats to integers by one common factor, without rounding: every float is an integer over a power of 2."""
    ratios = [value.as_integer_ratio() for value in values]
    denominator = max(denominator for _, denominator in ratios)
    return [numerator * (denominator // own) for numerator, own in ratios]
