"""Cut a row of calls into neighbouring pieces: `StageSearch` for RoundPipe's stages, `balanced_cuts` for stages of
pipelines that bind them to devices.

```
forward times    3  2  2  1  4  2      limit t = 7
F stages       [ 3  2  2][1  4 ]       filled up to t, one after the other
fused                          [2]     as many of the last calls as fit, forward and backward
```

[Note: greedy stages]
Once an upper limit t on the time of every stage is fixed, the fewest stages follow greedily: give the fused stage as
many of the last calls as fit (the fewer calls remain, the fewer stages they need, forward and backward), then fill the
F stages and the B stages one after the other. (RoundPipe paper, arXiv 2604.27085, section on partitioning: tries all
O(L^2) times of possible stages. Here ``search`` tries a row of them, and lets the simulator judge.)

Times are whole ticks of about a nanosecond: sums are then exact, equal stages have equal times, and no stage misses a
limit by a rounding error.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

from .costs import CallCost

_TICKS_PER_MS = 2**20
# Of the F stages and of the B stages; see `partition.pieces`.
Cuts = tuple[Sequence[int], Sequence[int]]


class StageSearch:
    """Times and sizes of the calls as prefix sums, and the greedy filling on top of them; see [Note: greedy stages].

    Args:
        calls: The calls; at least one.
        is_training: Whether there are a fused stage and B stages; otherwise, F stages cover all calls.
        memory_limit: Bytes that the weights (and gradients, in the fused and B stages) of a stage may take together; a
            single call may be above it. None for no limit.
        counts_graphs: Whether half of the graphs of the fused stage's calls, which it keeps all, counts as well.
    """

    def __init__(
        self, calls: Sequence[CallCost], *, is_training: bool, memory_limit: int | None, counts_graphs: bool = False
    ) -> None:
        num_calls = len(calls)
        ticks = _to_ticks([*(c.forward_ms for c in calls), *(c.backward_ms for c in calls if is_training)])
        forward = ticks[:num_calls]
        backward = [f + b for f, b in zip(forward, ticks[num_calls:], strict=True)] if is_training else forward
        weights = [call.weight_bytes for call in calls]
        states = [call.state_bytes(is_training=is_training) for call in calls]
        fused = states
        if counts_graphs:
            # Activations may take the half of the memory that weights leave.
            graphs = (call.workspace_bytes + call.output_bytes for call in calls)
            fused = [size + (graph + 1) // 2 for size, graph in zip(states, graphs, strict=True)]
        self._is_training, self._num_calls, self._memory_limit = is_training, num_calls, memory_limit
        self._forward_times, self._backward_times = _prefix_sums(forward), _prefix_sums(backward)
        self._forward_sizes, self._backward_sizes = _prefix_sums(weights), _prefix_sums(states)
        self._fused_sizes = _prefix_sums(fused)

    def limits_between(self, num_limits: int) -> list[int]:
        """Return times from the shortest call's to that of all calls, in a geometric row, ascending."""
        times = self._backward_times
        low = max(1, min((b - a for a, b in pairwise(times) if b > a), default=1))
        high = max(low, times[-1])
        ratio = (high / low) ** (1 / max(1, num_limits - 1))
        return sorted({round(low * ratio**i) for i in range(num_limits - 1)} | {high})

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


def balanced_cuts(times_ms: Sequence[float], num_parts: int) -> tuple[int, ...]:
    """Return how many neighbouring calls each part holds, the longest part as short as possible.

    The minimum is exact. Among the splits that reach it, every part comes close to the mean of what is left for it and
    the parts after it, so that the last ones are not left with next to nothing.

    Args:
        times_ms: Time of each call, in ms.
        num_parts: Number of parts, none of them empty.

    Raises:
        ValueError: If there are fewer calls than parts, or a number is out of range.
    """
    if not 1 <= num_parts <= len(times_ms):
        raise ValueError(
            f"{len(times_ms)} calls cannot be cut into num_parts={num_parts} parts: every part needs a call of its own."
        )
    if any(not 0 <= time < float("inf") for time in times_ms):
        raise ValueError(f"times_ms must be finite and >= 0, got {list(times_ms)}: measure them again.")
    prefix = _prefix_sums(_to_ticks(times_ms))
    limit = _least_limit(prefix, num_parts)
    latest_starts = _fill_from_the_back(prefix, num_parts, limit)
    counts = []
    start = 0
    for part in range(num_parts):
        num_after = num_parts - 1 - part
        low = max(start + 1, latest_starts[num_after])
        high = min(bisect_right(prefix, prefix[start] + limit) - 1, len(times_ms) - num_after)
        end = _fair_end(prefix, start, range(low, high + 1), num_after + 1)
        counts.append(end - start)
        start = end
    return tuple(counts)


def _least_limit(prefix: list[int], num_parts: int) -> int:
    """The least time of the longest part, by bisection over whole ticks; empty parts would not lower it."""
    low = max(max(b - a for a, b in pairwise(prefix)), -(-prefix[-1] // num_parts))
    high = prefix[-1]
    while low < high:
        middle = (low + high) // 2
        if _fill_from_the_back(prefix, num_parts, middle)[num_parts] == 0:
            high = middle
        else:
            low = middle + 1
    return low


def _fill_from_the_back(prefix: list[int], num_parts: int, limit: int) -> list[int]:
    """For k = 0 to `num_parts`, the first call from which on k parts within the limit suffice."""
    starts = [len(prefix) - 1]
    for _ in range(num_parts):
        starts.append(bisect_left(prefix, prefix[starts[-1]] - limit))
    return starts


def _fair_end(prefix: list[int], start: int, ends: range, num_left: int) -> int:
    """The end whose part comes closest to the mean of the `num_left` parts from `start` on, the first among equals."""
    rest = prefix[-1] - prefix[start]  # in whole ticks, which floats could not hold
    above = bisect_left(prefix, prefix[start] + rest // num_left)
    nearby = {min(max(end, ends[0]), ends[-1]) for end in (above - 1, above, above + 1)}
    return min(sorted(nearby), key=lambda end: abs((prefix[end] - prefix[start]) * num_left - rest))


def _prefix_sums(values: Iterable[int]) -> list[int]:
    return list(accumulate(values, initial=0))


def _to_ticks(values: Iterable[float]) -> list[int]:
    return [round(value * _TICKS_PER_MS) for value in values]


def single_calls(num_calls: int, *, is_training: bool) -> Cuts:
    """The cuts between all calls."""
    return (range(num_calls), range(num_calls)) if is_training else (range(num_calls + 1), (0,))


def neighbour_cuts(rows: list[list[int]], rng: random.Random, num_calls: int, is_training: bool) -> Cuts | None:
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
