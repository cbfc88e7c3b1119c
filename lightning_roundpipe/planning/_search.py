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
        backward_bytes: Size of each call in the fused stage or a B stage.
        memory_limit: Bytes that the calls of a stage may take together, no single call above it; None for no limit.
    """

    def __init__(
        self,
        *,
        forward_ms: Sequence[float],
        backward_ms: Sequence[float] | None,
        forward_bytes: Sequence[int],
        backward_bytes: Sequence[int],
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
        self._memory_limit = memory_limit

    def best(self, num_devices: int, num_microbatches: int) -> tuple[list[int], list[int]]:
        """Return the cuts of the F stages and of the B stages that minimise the objective of `partition`.

        Cuts are call positions ``[0, ..., a]``; the fused stage begins at a. Without a backward, the first list ends
        with the number of calls.
        """
        limits = self._limits()
        best_limit = limits[0]
        best_score = stage_weight(self._count(best_limit), num_devices, num_microbatches) * best_limit
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
        return self._cuts(best_limit)

    def spread(self, at_most: int) -> list[tuple[list[int], list[int]]]:
        """Return the greedy cuts for `at_most` of the possible limits, spread evenly."""
        limits = self._limits()
        step = max(1, -(-len(limits) // at_most))
        return [self._cuts(limit) for limit in limits[::step]]

    def _limits(self) -> list[int]:
        """All times that the longest stage can have, ascending: sums over neighbouring calls, each call fits."""
        prefixes = [self._forward_times, self._backward_times] if self._is_training else [self._forward_times]
        longest_call = max(b - a for a, b in pairwise(self._backward_times))
        limits: set[int] = set()
        for prefix in prefixes:
            for start, begin in enumerate(prefix):
                first = bisect_left(prefix, begin + longest_call, start + 1)
                limits.update(end - begin for end in prefix[first:])
        return sorted(limits)

    def _cuts(self, limit: int) -> tuple[list[int], list[int]]:
        stop = self._fused_start(limit) if self._is_training else self._num_calls
        forward = self._fill(self._forward_times, self._forward_sizes, stop, limit)
        if not self._is_training:
            return forward, []
        return forward, self._fill(self._backward_times, self._backward_sizes, stop, limit)

    def _count(self, limit: int) -> int:
        """Fewest stages that all take at most `limit`."""
        forward, backward = self._cuts(limit)
        # n cuts make n - 1 stages, and the fused stage is one more.
        return len(forward) + len(backward) - 1

    def _fused_start(self, limit: int) -> int:
        times, sizes = self._backward_times, self._backward_sizes
        start = bisect_left(times, times[-1] - limit)
        if self._memory_limit is not None:
            start = max(start, bisect_left(sizes, sizes[-1] - self._memory_limit))
        # Trailing calls of no cost must not leave the fused stage empty.
        return min(start, self._num_calls - 1)

    def _fill(self, times: list[int], sizes: list[int], stop: int, limit: int) -> list[int]:
        """Cut calls ``[0, stop)`` greedily into stages within the limits, and return the cuts, 0 and stop included."""
        cuts = [0]
        position = 0
        while position < stop:
            end = bisect_right(times, times[position] + limit, position + 1, stop + 1) - 1
            if self._memory_limit is not None:
                end = bisect_right(sizes, sizes[position] + self._memory_limit, position + 1, end + 1) - 1
            cuts.append(end)
            position = end
        return cuts


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


def _prefix_sums(values: Sequence[int]) -> list[int]:
    return list(accumulate(values, initial=0))


def _to_ticks(values: Sequence[float]) -> list[int]:
    """Scale floats to integers by one common factor, without rounding: every float is an integer over a power of 2."""
    ratios = [value.as_integer_ratio() for value in values]
    denominator = max(denominator for _, denominator in ratios)
    return [numerator * (denominator // own) for numerator, own in ratios]
