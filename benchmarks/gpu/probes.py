"""What a training process is asked while it trains: its threads, the interpreter lock, what the GPU does."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks._report import median, rounded
from lightning_roundpipe.planning import Timeline

Interval = tuple[float, float]

_THREADS = Path("/proc/self/task")
_SAMPLES_OF_IDLE = 200
# Above what a sleep is late by itself: a thread that gives the interpreter lock up at once costs less.
_MARGIN_S = 50e-6


class LockSampler:
    """Asks for the interpreter lock at random times, about every millisecond, on a thread of its own.

    Sleeping needs no lock, and to go on after it does. So a sleep that ends late has found the lock taken, or all cores
    busy. How late sleeps are when nothing runs is measured first, in an idle process, and counts as in time.
    """

    def __init__(self) -> None:
        self._random = random.Random(0)
        idle = sorted(self._late_s() for _ in range(_SAMPLES_OF_IDLE))
        self._in_time_s = idle[int(0.95 * len(idle))] + _MARGIN_S
        self._late: list[float] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="lock-sampler", daemon=True)

    def start(self) -> None:
        """Until :meth:`stop`."""
        self._thread.start()

    def stop(self) -> dict[str, float]:
        """Share of the times at which the lock was taken, and for how long a thread waited for it then."""
        self._is_over.set()
        self._thread.join()
        late = [seconds for seconds in self._late if seconds > self._in_time_s]
        return {
            "share_taken": rounded(len(late) / max(1, len(self._late))),
            "median_wait_us": median(late or [0.0]) * 1e6,
            "longest_wait_us": rounded(max(late, default=0.0) * 1e6),
            "num_samples": len(self._late),
            "in_time_us": rounded(self._in_time_s * 1e6),
        }

    def _sample(self) -> None:
        while not self._is_over.is_set():
            self._late.append(self._late_s())

    def _late_s(self) -> float:
        asked_s = self._random.uniform(0.5e-3, 1.5e-3)
        started = time.perf_counter()
        time.sleep(asked_s)
        return time.perf_counter() - started - asked_s


def thread_seconds() -> dict[str, float]:
    """CPU time of this process's threads by kind; nothing where the system does not tell.

    "host" are those that issue work: the main thread, those of micro-batches, and autograd's.
    """
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    found: dict[str, float] = {}
    try:
        for thread in _THREADS.iterdir():
            try:
                nanoseconds = int((thread / "schedstat").read_text(encoding="ascii").split()[0])
                name = names.get(int(thread.name)) or (thread / "comm").read_text(encoding="utf-8").strip()
            except OSError:  # has ended meanwhile, or is not told
                continue
            kind = _kind_of(int(thread.name), name, is_python=int(thread.name) in names)
            found[kind] = found.get(kind, 0.0) + nanoseconds / 1e9
    except OSError:
        return {}
    return found


def _kind_of(thread_id: int, name: str, *, is_python: bool) -> str:
    if thread_id == os.getpid() or name.startswith(("roundpipe-microbatch", "pt_autograd")):
        return "host"
    return "other_python" if is_python else "native"


def device_figures(events: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """What the GPU did, from the events of a trace of torch's profiler; None if it did nothing.

    ``busy_share``: of the time from its first kernel or copy to the last, the share in which a kernel runs. Copies by
    direction and kind of host memory: bytes, and GB/s while such copies are under way.
    """
    kernels: list[Interval] = []
    copies: dict[str, list[tuple[Interval, int]]] = {}
    for event in events:
        if event.get("ph") != "X":
            continue
        interval = (float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0.0)))
        if event.get("cat") == "kernel":
            kernels.append(interval)
        elif event.get("cat") == "gpu_memcpy" and (kind := _copy_kind(str(event["name"]))) is not None:
            copies.setdefault(kind, []).append((interval, int(event["args"]["bytes"])))
    computing = merged(kernels)
    moving = {kind: merged(interval for interval, _ in found) for kind, found in copies.items()}
    everything = merged([*computing, *(interval for found in moving.values() for interval in found)])
    if not everything:
        return None
    whole_us = everything[-1][1] - everything[0][0]
    all_copies = merged(interval for found in moving.values() for interval in found)
    by_kind = {}
    for kind, found in copies.items():
        num_bytes, taken_us = sum(size for _, size in found), length(moving[kind])
        rate = rounded(num_bytes / (taken_us * 1e3)) if taken_us else None
        by_kind[kind] = {"bytes": num_bytes, "copies": len(found), "gb_per_s": rate}
    return {
        "busy_share": rounded(length(computing) / whole_us),
        "copies_under_kernels": rounded(common(all_copies, computing) / length(all_copies)) if all_copies else None,
        "pageable_bytes": sum(figures["bytes"] for kind, figures in by_kind.items() if kind.endswith("pageable")),
        "copies": by_kind,
        "kernels": len(kernels),
    }


def _copy_kind(name: str) -> str | None:
    """Such as "h2d pageable", from the profiler's "Memcpy HtoD (Pageable -> Device)"; None between devices."""
    for direction in ("h2d", "d2h"):
        if direction.replace("2", "to") in name.lower():
            return f"{direction} {'pageable' if 'pageable' in name.lower() else 'page-locked'}"
    return None


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as disjoint intervals, ascending."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def overlap(timeline: Timeline) -> float:
    """Share of the time in which lanes are busy, in which the same device computes."""
    moving = covered = 0.0
    for device in range(timeline.num_devices):
        busy = timeline.intervals(device)
        for lane in ("h2d", "d2h"):
            spans = timeline.intervals(device, lane)
            moving += length(spans)
            covered += common(spans, busy)
    return covered / moving


def common(one: Sequence[Interval], other: Sequence[Interval]) -> float:
    """Time that is in both of two lists of disjoint, ascending intervals."""
    total, i, j = 0.0, 0, 0
    while i < len(one) and j < len(other):
        total += max(0.0, min(one[i][1], other[j][1]) - max(one[i][0], other[j][0]))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return total
