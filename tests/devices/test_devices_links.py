"""Links: what is measured on links of known speed, and what follows from figures."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_roundpipe.devices import links
from lightning_roundpipe.devices.links import Way, groups_of, machine_with, measured, settled
from lightning_roundpipe.devices.pool import DevicePool
from lightning_roundpipe.devices.virtual import Clock, TimedLink
from lightning_roundpipe.integration.pool import machine_of
from lightning_roundpipe.options import RoundPipeOptions
from lightning_roundpipe.planning.costs import DeviceTraits, Machine, SharedLink
from tests.support.flying_clock import FlyingClock
from tests.support.shared_bus import SharedBus

HOST = torch.device("cpu")
# Bytes per ms: so slow that copies are small.
FAST = 1e5
LEAST_BYTES = 2**14


@pytest.fixture(autouse=True)
def smaller_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_LEAST_BYTES", LEAST_BYTES)
    torch.set_num_threads(1)


def pool_of(num_devices: int, link: TimedLink | None, memory_limit: int | None = None) -> DevicePool:
    return DevicePool([HOST] * num_devices, link=link, memory_limit=memory_limit)


def measured_in(pool: DevicePool, clock: Clock, added: float | None = None, budget_ms: float = 1e9) -> Machine:
    """In the time of a clock."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(links, "_BUDGET_MS", budget_ms)
        monkeypatch.setattr(links, "_now_ms", clock.now_ms)
        return measured(pool, added)


def measured_on(bus: SharedBus, num_devices: int, budget_ms: float = 1e9) -> Machine:
    return measured_in(pool_of(num_devices, bus), bus.clock, budget_ms=budget_ms)


# --- measuring ---------------------------------------------------------------------------------------------------


def test_a_timed_link_is_measured_as_it_is() -> None:
    """Through the threads of its lanes; the chunks of a copy have a latency each."""
    clock = FlyingClock()
    clock.start()
    pool = pool_of(2, TimedLink(2 * FAST, 0.05, clock=clock))
    machine = measured_in(pool, clock)
    assert machine.transfer_latency_ms == pytest.approx(0.05, rel=0.05)
    for index in range(2):
        traits = machine.traits[index]
        assert traits.h2d_bytes_per_ms == pytest.approx(2 * FAST, rel=0.02)
        assert traits.d2h_bytes_per_ms == pytest.approx(2 * FAST, rel=0.02)
    assert machine.is_uniform
    assert machine.num_devices == 2
    assert all(device.moved is None for device in pool.devices)


def test_slow_links_and_directions_show() -> None:
    machine = measured_on(SharedBus([2.5 * FAST, 2.4 * FAST, 0.6 * FAST], [2 * FAST] * 3), 3)
    ups = [machine.traits[index].h2d_bytes_per_ms for index in range(3)]
    assert ups[0] == ups[1] == pytest.approx(2.4 * FAST, rel=0.02)
    assert ups[2] == pytest.approx(0.6 * FAST, rel=0.02)
    assert machine.d2h_bytes_per_ms == pytest.approx(2 * FAST, rel=0.02)
    assert machine.transfer_latency_ms == pytest.approx(0.01, rel=0.1)
    assert machine.shared_links == ()
    assert not machine.is_uniform


@settings(derandomize=True, deadline=None, max_examples=12)
@given(
    sizes=st.lists(st.integers(1, 3), min_size=2, max_size=2).filter(lambda sizes: sum(sizes) > 2),
    width=st.floats(1.0, 1.5),
    speed=st.floats(0.5, 2.0),
)
def test_devices_behind_one_switch_are_found(sizes: Sequence[int], width: float, speed: float) -> None:
    """With what they reach together, and so the host reaches all of it."""
    ends = list(itertools.accumulate(sizes))
    groups = [tuple(range(end - size, end)) for end, size in zip(ends, sizes, strict=True) if size > 1]
    link, count = speed * FAST, ends[-1]
    machine = measured_on(SharedBus([link] * count, [link] * count, dict.fromkeys(groups, width * link)), count)
    assert [shared.devices for shared in machine.shared_links] == groups
    for shared in machine.shared_links:
        assert shared.bytes_per_ms == pytest.approx(width * link, rel=0.05)
    reached = 2 * link * (sum(size == 1 for size in sizes) + width * len(groups))
    assert machine.host_bytes_per_ms == pytest.approx(reached, rel=0.05)
    assert machine.is_uniform


def test_a_slow_host_is_no_shared_link() -> None:
    link = FAST
    machine = measured_on(SharedBus([link] * 4, [link] * 4, host_bytes_per_ms=1.5 * FAST), 4)
    assert machine.host_bytes_per_ms == pytest.approx(1.5 * FAST, rel=0.02)
    assert machine.shared_links == ()


@pytest.mark.parametrize(("added", "expected"), [(300.0, 300.0), (1.5, 2.0), (None, 2.0)])
def test_the_host_has_the_larger_bandwidth_of_additions_and_copies(added: float | None, expected: float) -> None:
    bus = SharedBus([FAST], [FAST])
    given = None if added is None else added * FAST
    machine = measured_in(pool_of(1, bus), bus.clock, given)
    assert machine.host_bytes_per_ms == pytest.approx(expected * FAST, rel=0.02)


def test_what_there_is_no_time_for_is_not_known() -> None:
    for budget_ms in (0.0, 1.0, 100.0, 150.0, 1e9):
        bus = SharedBus([FAST] * 3, [FAST] * 3, {(0, 1, 2): FAST})
        machine = measured_on(bus, 3, budget_ms)
        if budget_ms == 0.0:
            assert machine == Machine(3)
            continue
        assert machine.h2d_bytes_per_ms == pytest.approx(FAST, rel=0.02), "one link is enough for all"
        assert machine.is_uniform
        if budget_ms == 1.0:
            assert (machine.host_bytes_per_ms, machine.shared_links) == (math.inf, ())
    assert [shared.devices for shared in machine.shared_links] == [(0, 1, 2)]


@pytest.mark.parametrize("memory_limit", [7 * LEAST_BYTES, 16 * LEAST_BYTES])
def test_a_device_with_little_memory_gets_small_copies_or_none(memory_limit: int) -> None:
    bus = SharedBus([FAST], [FAST])
    pool = pool_of(1, bus, memory_limit)
    machine = measured_in(pool, bus.clock)
    assert (machine == Machine(1)) is (memory_limit == 7 * LEAST_BYTES)
    assert pool[0].memory.used == 0


def test_devices_that_share_the_hosts_memory_have_no_links() -> None:
    assert measured(pool_of(2, None)) == Machine(2)


# --- figures -----------------------------------------------------------------------------------------------------

SPEEDS = st.lists(st.floats(1.0, 100.0), min_size=1, max_size=8)


def ways(speeds: Sequence[float], lane: str = "h2d") -> dict[Way, float]:
    return {(index, lane): speed for index, speed in enumerate(speeds)}


@settings(derandomize=True, deadline=None)
@given(SPEEDS, st.randoms(use_true_random=False))
def test_settled_speeds_are_near_their_own_in_their_order_and_few(speeds: list[float], random: object) -> None:
    same = settled(ways(speeds))
    assert all(abs(same[way] - speed) <= 0.1 * same[way] for way, speed in ways(speeds).items())
    assert set(same.values()) <= set(speeds)
    for a, b in itertools.product(same, same):
        if speeds[a[0]] <= speeds[b[0]]:
            assert same[a] <= same[b]
    values = sorted(set(same.values()))
    assert all(b > 1.1 * a or b - a > 0.1 * a for a, b in itertools.pairwise(values))
    turned = settled(ways(speeds[::-1]))
    assert [turned[len(speeds) - 1 - index, lane] for index, lane in same] == list(same.values())


def test_two_kinds_of_slots_have_two_speeds_and_directions_their_own() -> None:
    ups, downs = [25.1, 24.9, 12.4, 12.6, 25.3, 12.5], [12.0, 24.0, 24.1, 24.2, 24.3, 24.4]
    same = settled(ways(ups) | ways(downs, "d2h"))
    assert [same[index, "h2d"] for index in range(6)] == [25.1, 25.1, 12.6, 12.6, 25.1, 12.6]
    assert [same[index, "d2h"] for index in range(6)] == [12.0, 24.1, 24.1, 24.1, 24.1, 24.1]


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(lambda pair: pair[0] < pair[1]), max_size=15))
def test_groups_are_what_chains_of_pairs_connect(pairs: list[tuple[int, int]]) -> None:
    reached = {a: {a} for pair in pairs for a in pair}
    for _ in range(10):
        for a, b in pairs:
            reached[a] |= reached[b]
            reached[b] |= reached[a]
    assert groups_of(pairs) == sorted({tuple(sorted(group)) for group in reached.values()})


def test_a_machine_has_the_speeds_of_most_and_its_devices_what_differs() -> None:
    shared = SharedLink((0, 1), 40.0)
    made = machine_with(3, ways([25.0, 25.1, 6.0]) | ways([20.0], "d2h"), 0.01, None, [shared])
    assert made == Machine(
        3,
        h2d_bytes_per_ms=25.0,
        d2h_bytes_per_ms=20.0,
        transfer_latency_ms=0.01,
        devices=(
            DeviceTraits(1.0, None, 25.0, 20.0),
            DeviceTraits(1.0, None, 25.0, 20.0),
            DeviceTraits(1.0, None, 6.0, 20.0),
        ),
        shared_links=(shared,),
    )
    assert machine_with(3, {}, 0.01, 1.0, [shared]) == Machine(3), "nothing was measured"


@pytest.mark.parametrize("slow", [25.1, 6.0])
@pytest.mark.parametrize("limits", [[7, 7, 7], [7, 14, 7]])
def test_what_was_measured_goes_into_a_machine_with_the_memory_of_the_pool(slow: float, limits: list[int]) -> None:
    found = machine_with(3, ways([25.0, 25.1, slow]), 0.01, None, [SharedLink((0, 1), 40.0)])
    pool = pool_of(3, TimedLink(), memory_limit=7)
    for device, limit in zip(pool.devices, limits, strict=True):
        device.memory.limit = limit
    made = machine_of(pool, RoundPipeOptions(), found)
    assert made.traits == tuple(
        replace(traits, memory_bytes=limit) for traits, limit in zip(found.traits, limits, strict=True)
    )
    assert bool(made.devices) is (slow == 6.0 or limits[1] == 14)
    assert replace(made, device_memory_bytes=None, devices=found.devices) == found
