"""The books on a device's memory: limits, what is waited for, what is evicted, and what is said when nothing helps."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_roundpipe.devices.memory import KINDS, DeviceMemory, DeviceOutOfMemoryError, Kind
from lightning_roundpipe.devices.transfer import Done, Edge
from lightning_roundpipe.devices.virtual import TimedLink
from tests.support.engine.lazy_link import LazyLink, opened

JOIN_S = 60.0
MIB = 2**20


class Leaving:
    """Something that memory waits for.

    Args:
        on_wait: called when a thread waits for it, before it has passed.
    """

    def __init__(self, on_wait: Callable[[], None] = lambda: None) -> None:
        self.has_passed = False
        self.num_waits = 0
        self._on_wait = on_wait

    def is_done(self) -> bool:
        return self.has_passed

    def await_done(self) -> None:
        self.num_waits += 1
        self._on_wait()
        self.has_passed = True


def test_the_message_says_what_is_there_and_what_does_not_fit() -> None:
    memory = DeviceMemory("virtual device 1", 10 * MIB)
    memory.reserve("weights", 6 * MIB)
    memory.reserve("gradients", 2 * MIB)
    memory.reserve("activations", MIB // 2)
    with pytest.raises(DeviceOutOfMemoryError) as caught:
        memory.reserve("activations", 3 * MIB)
    assert str(caught.value) == (
        "virtual device 1 is out of memory: 3.00 MiB of activations do not fit beside what is there "
        "(weights 6.00 MiB, gradients 2.00 MiB, activations 512 KiB) within its limit of 10.0 MiB."
    )


@pytest.mark.parametrize(
    ("weights", "kind", "num_bytes", "fits_if_split"),
    [(6, "weights", 5, False), (6, "gradients", 5, False), (6, "activations", 5, True), (0, "activations", 50, True)],
)
def test_smaller_activations_help_where_weights_and_gradients_fit(
    weights: int, kind: Kind, num_bytes: int, fits_if_split: bool
) -> None:
    memory = DeviceMemory("device", 10)
    memory.reserve("weights", weights)
    with pytest.raises(DeviceOutOfMemoryError) as caught:
        memory.reserve(kind, num_bytes)
    assert caught.value.fits_if_split is fits_if_split


# ----------------------------------------------------------------------------------------------------------- leaving


def test_memory_on_its_way_back_is_waited_for_in_order_and_no_longer_than_needed() -> None:
    memory = DeviceMemory("device", 100)
    leaving = [Leaving() for _ in range(3)]
    for each in leaving:
        memory.reserve("weights", 30)
        memory.release("weights", 30, each)
    memory.evict = lambda: pytest.fail("nothing had to be evicted")
    memory.reserve("activations", 50)
    assert [each.num_waits for each in leaving] == [1, 1, 0]
    assert memory.used == 80


def test_what_leaves_is_waited_for_before_anything_is_evicted_and_the_evicted_too() -> None:
    memory = DeviceMemory("device", 100)
    order: list[str] = []
    memory.reserve("weights", 100)
    memory.release("weights", 50, Leaving(lambda: order.append("waited")))
    evicted = [None, Leaving(lambda: order.append("waited for the evicted"))]

    def evict() -> bool:
        order.append("evict")
        if evicted:
            memory.release("weights", 25, evicted.pop())
            return True
        return False

    memory.evict = evict
    assert not memory.try_reserve("gradients", 100)
    assert not memory.try_reserve("gradients", 100, ahead=True)
    assert order == [], "to try is not to wait, nor to evict"
    memory.reserve("gradients", 100)
    assert order == ["waited", "evict", "waited for the evicted", "evict"]
    assert memory.used == 100
    with pytest.raises(DeviceOutOfMemoryError):
        memory.reserve("weights", 1)


def test_room_that_comes_back_while_nothing_is_evicted_is_used() -> None:
    memory = DeviceMemory("device", 100)
    memory.reserve("weights", 100)

    def evict() -> bool:
        memory.release("weights", 100)  # by another thread
        return False

    memory.evict = evict
    memory.reserve("activations", 100)
    assert memory.used == 100


def test_at_the_end_of_a_step_only_weights_are_left() -> None:
    memory = DeviceMemory("device")
    leaving = [Leaving() for _ in range(3)]
    for each, kind in zip(leaving, KINDS, strict=False):
        memory.reserve(kind, 1)
        memory.release(kind, 1, each)
    for kind in KINDS:  # a step that failed left these
        memory.reserve(kind, 5)
    memory.end_step()
    assert [each.num_waits for each in leaving] == [0, 0, 0]  # lanes have seen to that
    assert memory.used == 5
    for each in leaving:
        each.has_passed = True
    memory.reserve("weights", 5)
    assert memory.used == 10  # and it leaves once only


def test_an_error_in_what_is_waited_for_is_raised_and_the_books_stay_right() -> None:
    def fail() -> None:
        leaving.has_passed = True
        raise OSError("the copy failed")

    memory = DeviceMemory("device", 100)
    leaving = Leaving(fail)
    memory.reserve("weights", 100)
    memory.release("weights", 100, leaving)
    with pytest.raises(OSError, match="the copy failed"):
        memory.reserve("weights", 50)
    memory.reserve("weights", 50)
    assert memory.used == 50


# ---------------------------------------------------------------------------------------------------------- headroom


@pytest.mark.parametrize("kind", ["weights", "gradients"])
def test_weights_and_gradients_evict_and_wait_until_the_headroom_is_free(kind: Kind) -> None:
    memory = DeviceMemory("device", 100)
    memory.headroom = 40
    leaving = Leaving()
    memory.reserve("activations", 10)  # is part of the headroom
    memory.reserve("weights", 50)
    memory.release("weights", 10, leaving)
    evictions = 0

    def evict() -> bool:
        nonlocal evictions
        evictions += 1
        memory.release("weights", 10)
        return True

    memory.evict = evict
    memory.reserve(kind, 30)
    assert leaving.num_waits == 1
    assert evictions == 1
    assert memory.used == 10 + 30 + 30


def test_activations_take_the_headroom_and_lose_nothing_for_it() -> None:
    memory = DeviceMemory("device", 100)
    memory.headroom = 40
    memory.reserve("weights", 60)
    memory.evict = lambda: pytest.fail("there was room")
    memory.reserve("activations", 40)
    assert memory.used == 100


def test_a_step_leaves_no_headroom_to_the_next() -> None:
    memory = DeviceMemory("device", 100)
    memory.headroom = 40
    memory.end_step()
    assert memory.try_reserve("weights", 100, ahead=True)


def test_room_is_made_of_all_that_is_not_in_use_and_all_that_is_leaving() -> None:
    memory = DeviceMemory("device", 100)
    memory.reserve("weights", 90)
    leaving = [Leaving() for _ in range(3)]
    memory.release("weights", 20, leaving[0])
    idle = leaving[1:]

    def evict() -> bool:
        if not idle:
            return False
        memory.release("weights", 20, idle.pop())
        return True

    memory.evict = evict
    memory.make_room()
    assert [each.has_passed for each in leaving] == [True] * 3
    assert memory.used == 30


def test_what_has_run_out_of_memory_keeps_more_free_from_then_on() -> None:
    memory = DeviceMemory("device", 100)
    memory.make_room()
    assert not memory.try_reserve("weights", 96, ahead=True)
    assert memory.try_reserve("weights", 95, ahead=True)
    memory.reserve("weights", 5)  # must be there
    memory.release("weights", 100)
    kept_free = []
    for _ in range(5):
        kept_free.append(memory.spare)
        memory.make_room()
    assert kept_free == [5, 10, 20, 40, 50], "twice as much each time, and never more than half"
    assert memory.try_reserve("weights", 50, ahead=True)
    unlimited = DeviceMemory("device")
    unlimited.make_room()
    assert unlimited.try_reserve("weights", 1, ahead=True)


@pytest.mark.parametrize(("booked", "num_times"), [(0, 0), (50, 0), (51, 5)])
def test_there_is_room_to_make_until_half_is_kept_free_and_only_if_that_was_booked(booked: int, num_times: int) -> None:
    memory = DeviceMemory("device", 100)
    memory.reserve("weights", booked)
    memory.end_step()
    found = 0
    while memory.has_room_to_make:
        memory.make_room()
        found += 1
    assert found == num_times
    assert not DeviceMemory("device").has_room_to_make


# ------------------------------------------------------------------------------------------------------- with devices


@pytest.mark.parametrize(
    "link", [LazyLink(), TimedLink(bytes_per_ms=1e4, latency_ms=0.1, chunk_bytes=1000)], ids=["lazy", "timed"]
)
def test_room_comes_from_copies_that_are_waited_for(link: TimedLink) -> None:
    kept = []
    with opened(link, memory_limit=4000) as device:
        for step in range(20):
            device.memory.reserve("activations", 3000)  # waits for the one before
            on_device = torch.full((750,), float(step))
            kept.append(device.download([on_device], "output", is_bulk=step % 2 == 0))
            device.memory.release("activations", 3000, device.free([on_device], after=kept[-1]))
        copies = [transfer.wait(Edge.OFFLOADED)[0] for transfer in kept]
        assert device.peak_memory_bytes == 3000
        assert device.memory.try_reserve("activations", 4000)  # everything has come back
    assert [copy.tolist() for copy in copies] == [[float(step)] * 750 for step in range(20)]
    assert device.memory.used == 0


# -------------------------------------------------------------------------------------------------------- properties

Operation = tuple[str, Kind, int]


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    operations=st.lists(
        st.tuples(
            st.sampled_from(["reserve", "try", "ahead", "release", "leave", "pass"]),
            st.sampled_from(KINDS),
            st.integers(0, 60),
        ),
        max_size=40,
    ),
    headroom=st.integers(0, 40),
)
def test_the_books_agree_with_a_plain_count(operations: list[Operation], headroom: int) -> None:
    limit = 100
    memory = DeviceMemory("device", limit)
    memory.headroom = headroom
    booked: list[tuple[Kind, int]] = []  # in use
    leaving: list[tuple[Leaving, Kind, int]] = []
    peak, peaks = 0, dict.fromkeys(KINDS, 0)
    for name, kind, num_bytes in operations:
        there = sum(n for _, n in booked) + sum(n for each, _, n in leaving if not each.has_passed)
        if name in ("reserve", "try", "ahead"):
            if name == "reserve":
                try:
                    memory.reserve(kind, num_bytes)
                    was_booked = True
                except DeviceOutOfMemoryError:
                    was_booked = False
                must_fit = num_bytes == 0 or sum(n for _, n in booked) + num_bytes <= limit
            else:
                was_booked = memory.try_reserve(kind, num_bytes, ahead=name == "ahead")
                active = sum(n for k, n in booked if k == "activations")
                free = max(0, headroom - active) if name == "ahead" else 0
                must_fit = num_bytes == 0 or there + num_bytes + free <= limit
            assert was_booked == must_fit
            if was_booked:
                booked.append((kind, num_bytes))
        elif name == "pass" and leaving:
            leaving[num_bytes % len(leaving)][0].has_passed = True
        elif booked and name in ("release", "leave"):
            kind, size = booked.pop(num_bytes % len(booked))
            each = Leaving() if name == "leave" and kind != "activations" else None
            memory.release(kind, size, each)
            if each is not None:
                leaving.append((each, kind, size))
        memory.try_reserve("weights", 0)  # takes off what has passed
        there = sum(n for _, n in booked) + sum(n for each, _, n in leaving if not each.has_passed)
        peak = max(peak, there)
        assert memory.used == there <= limit
        assert memory.peak == peak
        for each_kind in KINDS:
            now = sum(n for k, n in booked if k == each_kind) + sum(
                n for w, k, n in leaving if k == each_kind and not w.has_passed
            )
            peaks[each_kind] = max(peaks[each_kind], now)
        assert memory.peaks == peaks


def test_threads_never_have_more_than_the_limit_together() -> None:
    limit, num_threads, num_rounds = 1000, 8, 300
    memory = DeviceMemory("device", limit)
    counting = threading.Lock()
    there = [0]
    most = [0]
    errors: list[BaseException] = []
    barrier = threading.Barrier(num_threads)

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            barrier.wait(JOIN_S)
            for _ in range(num_rounds):
                kind, num_bytes = rng.choice(KINDS), rng.randrange(1, 400)
                if not memory.try_reserve(kind, num_bytes, ahead=rng.random() < 0.3):
                    continue
                with counting:
                    there[0] += num_bytes
                    most[0] = max(most[0], there[0])
                with counting:  # before the books, so that the count is never above them
                    there[0] -= num_bytes
                leaving = rng.choice([None, Leaving(), Done([])])
                memory.release(kind, num_bytes, leaving)
                if isinstance(leaving, Leaving):
                    leaving.has_passed = True
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
        assert not thread.is_alive()
    assert errors == []
    assert memory.try_reserve("weights", limit)  # everything has come back
    memory.release("weights", limit)
    assert memory.used == 0
    assert 0 < most[0] <= memory.peak <= limit
