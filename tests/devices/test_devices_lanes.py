"""Lanes of virtual devices: what goes first, what may be read when, and what happens when something fails."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_roundpipe.devices import transfer as transfers
from lightning_roundpipe.devices import virtual
from lightning_roundpipe.devices.chunks import Pair
from lightning_roundpipe.devices.transfer import DirectLane, Edge, Lane, Transfer
from lightning_roundpipe.devices.virtual import Clock, TimedLink, TransferGivenUp, VirtualDevice
from tests.support.engine.lazy_link import LazyLink, opened
from tests.support.flying_clock import FlyingClock

LINKS: dict[str, Callable[[], TimedLink]] = {"timed": lambda: TimedLink(chunk_bytes=16), "lazy": LazyLink}
JOIN_S = 60.0


def bulk_of(num_bytes: int) -> Tensor:
    return (torch.arange(num_bytes) % 251).to(torch.uint8)


def timed_link(clock: Clock, *, latency_ms: float = 0.0, chunk_bytes: int = 1000) -> TimedLink:
    """1000 bytes in a ms."""
    return TimedLink(1000.0, latency_ms, chunk_bytes, clock=clock)


def lane_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if " of virtual device " in thread.name]


# ---------------------------------------------------------------------------------------------------------- priorities


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    bulk=st.lists(st.lists(st.integers(0, 5000), min_size=1, max_size=4), min_size=1, max_size=5),
    activations=st.lists(st.tuples(st.floats(0.0, 1.0), st.integers(0, 3000)), max_size=6),
    chunk_bytes=st.integers(200, 2000),
    latency_ms=st.sampled_from([0.0, 0.01, 1.0]),
)
def test_any_activation_waits_for_two_chunks_and_the_activations_before_it(
    bulk: list[list[int]], activations: list[tuple[float, int]], chunk_bytes: int, latency_ms: float
) -> None:
    clock = FlyingClock()
    link = timed_link(clock, latency_ms=latency_ms, chunk_bytes=chunk_bytes)
    total_ms = sum(link.duration_ms(size) for sizes in bulk for size in sizes)
    arrivals = sorted((share * total_ms, size) for share, size in activations)
    ended: dict[int, float] = {}
    transfers: list[tuple[Transfer, list[Tensor]]] = []
    with opened(link) as device:

        def submit(sizes: list[int], key: int) -> None:
            sources = [bulk_of(size) for size in sizes]
            transfer = device.upload(sources, "", is_bulk=key < 0)
            transfers.append((transfer, sources))
            transfer.when_done(Edge.INPUTS, lambda: ended.__setitem__(key, clock.ms))

        for i, sizes in enumerate(bulk[1:]):
            clock.at(0.0, functools.partial(submit, sizes, -2 - i))
        for i, (ms, size) in enumerate(arrivals):
            clock.at(ms, functools.partial(submit, [size], i))
        submit(bulk[0], -1)
        clock.start()
        for transfer, _ in transfers:  # grows while the lane moves, and always before it is idle
            transfer.await_done()
    for transfer, sources in transfers:
        assert all(map(torch.equal, transfer.tensors, sources))
    for i, (ms, size) in enumerate(arrivals[: len([key for key in ended if key >= 0])]):
        before = sum(link.duration_ms(n) for j, (_, n) in enumerate(arrivals[:i]) if ended[j] > ms)
        assert ended[i] - ms <= 2 * link.duration_ms(chunk_bytes) + before + link.duration_ms(size) + 1e-9
    bulk_ended = [ended[-1 - i] for i in range(len(bulk))]
    assert bulk_ended == sorted(bulk_ended)


def test_bulk_goes_on_where_it_was_after_an_activation() -> None:
    clock = FlyingClock()
    ended: list[tuple[str, float]] = []
    told = threading.Semaphore(0)
    with opened(timed_link(clock)) as device:

        def submit(name: str, num_bytes: int, *, is_bulk: bool = False) -> None:
            def tell() -> None:
                ended.append((name, clock.ms))
                told.release()

            device.upload([bulk_of(num_bytes)], name, is_bulk=is_bulk).when_done(Edge.INPUTS, tell)

        clock.at(0.5, lambda: submit("next stage", 1000, is_bulk=True))
        clock.at(0.5, lambda: submit("x", 500))
        clock.at(0.6, lambda: submit("y", 250))
        clock.at(3.0, lambda: submit("z", 250))
        submit("stage", 3000, is_bulk=True)
        clock.start()
        for _ in range(5):
            assert told.acquire(timeout=JOIN_S)
        clock.ms = 10.0  # the lane is idle meanwhile
        submit("later", 500)
        assert told.acquire(timeout=JOIN_S)
    assert [name for name, _ in ended] == ["x", "y", "stage", "z", "next stage", "later"]
    assert [ms for _, ms in ended] == pytest.approx([1.5, 1.75, 3.75, 4.0, 5.0, 10.5])


def test_late_wake_ups_do_not_add_up() -> None:
    clock = FlyingClock(late_ms=0.4)
    clock.start()
    with opened(timed_link(clock, latency_ms=0.5)) as device:
        device.upload([bulk_of(10_000)], "weights", is_bulk=True).await_done()
    assert clock.ms == pytest.approx(10 * 1.5 + 0.4)


def test_bulk_arrives_chunk_by_chunk() -> None:
    clock = FlyingClock()
    seen: list[list[float]] = []
    with opened(timed_link(clock, chunk_bytes=8)) as device:
        transfer = device.upload([torch.ones(6)], "weights", is_bulk=True)
        clock.at(0.012, lambda: seen.append(transfer.tensors[0].tolist()))
        clock.start()
        transfer.await_done()
    assert [x == 1.0 for x in seen[0]] == [True, True, False, False, False, False]


def test_what_waits_for_another_lane_holds_nothing_up() -> None:
    held = Transfer([torch.ones(3)])
    with opened(TimedLink()) as device:
        behind = device.upload(held.tensors, "x", after=held)
        device.upload([torch.ones(2)], "y").await_done()
        assert not behind.is_done()
        assert behind.tensors[0].isnan().all()
        held.end()
        (copy,) = behind.wait(Edge.INPUTS)
        assert copy.tolist() == [1.0, 1.0, 1.0]


def test_hosts_clock_waits_until_then_or_an_interrupt() -> None:
    clock, interrupt = Clock(), threading.Event()
    until = clock.now_ms() + 2.0
    clock.wait_until(until, interrupt)
    assert clock.now_ms() >= until
    interrupt.set()
    clock.wait_until(clock.now_ms() + 1e9, interrupt)


# -------------------------------------------------------------------------------------------------------------- chains


@pytest.mark.parametrize("link", LINKS)
def test_a_chain_over_two_devices_needs_a_wait_at_its_end_only(link: str) -> None:
    shared = LINKS[link]()
    with opened(shared) as first, opened(shared) as second:
        x = torch.randn(100)
        transfer = first.upload([x], "x")
        for device, lane in [(first, "d2h"), (second, "h2d"), (second, "d2h"), (first, "h2d")]:
            transfer = getattr(device, lane).submit(transfer.tensors, is_bulk=False, after=transfer)
        assert torch.equal(transfer.wait(Edge.INPUTS)[0], x)


def test_without_a_wait_for_the_reader_poison_travels() -> None:
    with opened(LazyLink()) as device:
        down = device.download([torch.ones(2)], "output")
        up = device.upload(down.tensors, "input")  # without "after"
        assert up.wait(Edge.INPUTS)[0].isnan().all()
        source = torch.ones(2)
        down = device.download([source], "output")
        assert device.free([source]) is None  # without "after": a source is read when the copy is made
        assert down.wait(Edge.OFFLOADED)[0].isnan().all()


# ------------------------------------------------------------------------------------------------------------ failures


class CopyFailure(RuntimeError):
    """Raised in place of a copy."""


@pytest.fixture
def failing_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of 13 elements fail, unless they are copies of poison."""
    copy_all = transfers.copy_all

    def failing(pairs: list[Pair]) -> None:
        if any(source.numel() == 13 and not source.isnan().any() for _, source in pairs):
            raise CopyFailure("13")
        copy_all(pairs)

    for module in (transfers, virtual):
        monkeypatch.setattr(module, "copy_all", failing)


@pytest.mark.usefixtures("failing_copies")
@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("link", LINKS)
def test_an_error_in_a_copy_reaches_all_who_wait_and_no_others(link: str, waits: bool) -> None:
    with opened(LINKS[link]()) as device:
        bad = device.download([torch.ones(13)], "output")
        behind = device.upload(bad.tensors, "input", after=bad)
        good = device.download([torch.ones(2)], "output")
        on_device = torch.ones(1)
        device.free([on_device], after=bad)
        device.memory.reserve("activations", 4)
        device.memory.release("activations", 4, bad)
        for transfer in (bad, behind, bad) if waits else ():
            with pytest.raises(CopyFailure):
                transfer.wait(Edge.OFFLOADED)
            assert transfer.is_done()
    assert good.wait(Edge.OFFLOADED)[0].tolist() == [1.0, 1.0]
    with pytest.raises(CopyFailure):
        bad.await_done()
    assert device.memory.used == 0
    assert on_device.isnan().all()


@pytest.mark.usefixtures("failing_copies")
def test_an_error_in_one_chunk_fails_the_transfer() -> None:
    with opened(TimedLink(chunk_bytes=13 * 4)) as device:
        transfer = device.upload([torch.ones(20)], "weights", is_bulk=True)
        with pytest.raises(CopyFailure):
            transfer.wait(Edge.WEIGHTS)
        device.upload([torch.ones(20)[:7]], "weights", is_bulk=True).await_done()
        assert transfer.tensors[0].isnan().all()  # nothing of it moves after that


def test_an_error_behind_a_copy_fails_the_lane_for_the_rest_of_the_step() -> None:
    def fail() -> None:
        raise CopyFailure("behind")

    called: list[str] = []
    with opened(TimedLink()) as device:
        held = Transfer([torch.ones(1)])
        transfer = device.upload(held.tensors, "x", after=held)
        transfer.when_done(Edge.FREED, fail)
        transfer.when_done(Edge.FREED, lambda: called.append("the next one"))
        held.end()
        transfer.await_done()  # it was made
        with pytest.raises(CopyFailure):
            device.upload([torch.ones(1)], "y").await_done()
        assert called == ["the next one"]
        device.close()
        device.open()
        device.upload([torch.ones(1)], "y").await_done()


# ------------------------------------------------------------------------------------------------- the end of a step


def test_threads_live_as_long_as_a_step_and_only_where_something_moves() -> None:
    with opened(TimedLink()) as device:
        assert lane_threads() == []
        device.upload([torch.ones(1)], "x").await_done()
        assert lane_threads() == ["h2d of virtual device 0"]
    assert lane_threads() == []


def test_what_is_under_way_at_the_end_is_made_without_delay() -> None:
    with opened(TimedLink(latency_ms=1e9, chunk_bytes=1000)) as device:
        sources = [bulk_of(5000), bulk_of(10)]
        transfers = [device.upload([source], "x", is_bulk=len(source) > 1000) for source in sources]
        freed = [torch.ones(1), torch.ones(1)]
        for tensor, transfer in zip(freed, transfers, strict=True):
            device.free([tensor], after=transfer)
            device.memory.reserve("weights", 4)
            device.memory.release("weights", 4, transfer)
        waiter = threading.Thread(target=transfers[0].await_done)
        waiter.start()
    waiter.join(JOIN_S)
    assert not waiter.is_alive()
    for source, transfer in zip(sources, transfers, strict=True):
        assert torch.equal(transfer.wait(Edge.WEIGHTS)[0], source)
    assert all(tensor.isnan().all() for tensor in freed)
    assert device.memory.used == 0
    assert lane_threads() == []


def test_what_waits_for_something_else_at_the_end_is_given_up() -> None:
    held = Transfer([torch.ones(2)])
    with opened(TimedLink()) as device:
        transfer = device.upload(held.tensors, "inputs of unit 3", after=held)
        left = weakref.ref(device.upload(held.tensors, "x", after=held))
        freed = torch.ones(1)
        device.free([freed], after=transfer)
        errors: list[BaseException] = []

        def wait() -> None:
            try:
                transfer.wait(Edge.INPUTS)
            except TransferGivenUp as error:
                errors.append(error)

        waiter = threading.Thread(target=wait)
        waiter.start()
    waiter.join(JOIN_S)
    message = "h2d of virtual device 0: the step ended before inputs of unit 3 was made"
    assert [str(error) for error in errors] == [message]
    assert freed.isnan().all()
    held.end()  # too late, and without effect
    assert transfer.tensors[0].isnan().all()
    del held
    assert left() is None
    assert lane_threads() == []


@pytest.mark.parametrize("link", LINKS)
def test_between_steps_a_lane_is_closed(link: str) -> None:
    device = VirtualDevice(0, link=LINKS[link]())
    with pytest.raises(RuntimeError, match="no step is open: h2d of virtual device 0 cannot copy weights of a"):
        device.upload([torch.ones(1)], "weights of a")
    for _ in range(2):
        device.open()
        assert device.upload([torch.ones(1)], "x").wait(Edge.INPUTS)[0].item() == 1.0
        device.close()
        device.close()
    with pytest.raises(RuntimeError, match="no step is open"):
        device.download([torch.ones(1)], "x")


@pytest.mark.parametrize("link", LINKS)
def test_lanes_do_not_keep_what_was_copied_alive(link: str) -> None:
    with opened(LINKS[link]()) as device:
        transfers = []
        left: list[weakref.ref[Any]] = []
        for is_bulk in (True, False):
            memory = np.ones(100, dtype=np.float32)  # lives as long as a tensor that shares it
            transfer = device.upload([torch.from_numpy(memory)], "x", is_bulk=is_bulk)
            transfer.await_done()
            left.append(weakref.ref(memory))
            transfers.append(transfer)
            del memory
        device.upload([torch.ones(1)], "y").await_done()  # the lane has let go of what came before
        assert [reference() for reference in left] == [None, None]
        left = [weakref.ref(transfer) for transfer in transfers]
        del transfer, transfers
        assert [reference() for reference in left] == [None, None]


# --------------------------------------------------------------------------------------------------- the device itself


def test_traced_transfers_have_the_time_in_which_they_moved() -> None:
    clock = FlyingClock()
    clock.start()
    with opened(timed_link(clock)) as device:
        device.upload([bulk_of(100)], "before").await_done()
        device.moved = []
        device.upload([bulk_of(2500)], "weights of a", is_bulk=True).await_done()
        device.upload([], "nothing").await_done()
        device.download([bulk_of(100)], "y").await_done()
        up, down = device.moved
        assert (up.lane, up.label, down.lane, down.label) == ("h2d", "weights of a", "d2h", "y")
        assert device.elapsed_ms(up.start, up.end) == pytest.approx(2.5)
        assert 1e3 * up.start == pytest.approx(0.1)


def test_the_fast_mode_has_no_copies_of_its_own() -> None:
    device = VirtualDevice(1)
    assert device.aliases_host
    assert not device.is_shared
    assert not device.counts_activations
    assert all(isinstance(lane, DirectLane) for lane in (device.h2d, device.d2h))
    tensor = torch.ones(2)
    assert device.free([tensor]) is None
    assert tensor.tolist() == [1.0, 1.0]
    assert device.peak_memory_bytes is None
    with device.computing():
        assert device._busy.locked()
    with device.occupied():
        assert device._busy.locked()
    assert device.statistics() == {"unit_runs": 1, "h2d_bytes": 0, "d2h_bytes": 0}


def test_a_linked_device_says_what_it_is_and_what_it_had() -> None:
    with opened(LazyLink(), memory_limit=100) as device:
        assert not device.aliases_host
        assert device.is_shared
        assert device.counts_activations
        assert isinstance(device.h2d, Lane)
        device.memory.reserve("weights", 60)
        device.memory.reserve("gradients", 40)
        device.memory.release("weights", 60)
        device.memory.reserve("activations", 10)
        assert device.peak_memory_bytes == 100
        statistics = device.statistics()
    assert {kind: statistics[f"peak_{kind}_bytes"] for kind in ("weights", "gradients", "activations")} == {
        "weights": 60.0,
        "gradients": 40.0,
        "activations": 10.0,
    }
