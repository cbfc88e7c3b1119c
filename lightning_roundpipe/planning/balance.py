"""Cut a row of calls into a given number of parts of equal time: the stages of schedules that bind them to devices."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

from ._search import _to_ticks


def balanced_cuts(times_ms: Sequence[float], num_parts: int) -> tuple[int, ...]:
    """Return how many neighbouring calls each part holds, the longest part as short as possible.

    The minimum is exact. Among the splits that reach it, every part comes close to the mean of what is left for it and
    the parts after it, so that the last ones do not end up empty-handed.

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
    prefix = list(accumulate(_to_ticks(times_ms), initial=0))
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
