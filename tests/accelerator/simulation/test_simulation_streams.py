"""Streams run late and in order, events order them, and what nothing orders is a race."""

from __future__ import annotations

import threading
from types import ModuleType

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.accelerator


def test_event_behind_work_is_over_after_the_work(sim: ModuleType) -> None:
    event = sim.Event()
    with sim.held():
        event.record()
        assert not event.query()
        assert not sim.current_stream().query()
    event.synchronize()
    assert event.query()


def test_stream_that_is_held_goes_on_and_fails_when_the_host_waits_for_it(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.accelerator.streams._HELD_S", 0.0)
    with pytest.raises(RuntimeError, match="waited for a stream that was held"), sim.held():
        sim.synchronize(0)


def test_reader_without_a_wait_finds_poison_and_is_a_race(sim: ModuleType) -> None:
    side, x = sim.Stream("sim:0"), torch.ones(64, device="sim:0")
    sim.synchronize(0)
    with sim.held():
        late = x * 2
        with sim.stream(side):
            found = (late + 1).cpu()
    assert found.isnan().all()
    assert sim.stats()["races"] > 0


def test_reader_that_waits_finds_the_value_and_is_no_race(sim: ModuleType) -> None:
    side, x = sim.Stream("sim:0"), torch.ones(64, device="sim:0")
    late = x * 2
    side.wait_stream(sim.current_stream(0))
    with sim.stream(side):
        found = (late + 1).cpu()
    sim.synchronize(0)
    assert (found == 3).all()
    assert sim.stats()["races"] == 0


def test_race_is_found_where_the_write_was_over_in_time(sim: ModuleType) -> None:
    side, after, x = sim.Stream("sim:0"), sim.Stream("sim:0"), torch.ones(64, device="sim:0")
    sim.synchronize(0)
    late = x * 2
    after.wait_stream(sim.current_stream(0))  # a witness: reads the value, so the write was before
    with sim.stream(after):
        torch.empty(64, pin_memory=True).copy_(late, non_blocking=True)
    with sim.stream(side):
        _ = late + 1
    assert sim.stats()["races"] == 1


def test_race_report_names_both_operators_and_the_line(sim: ModuleType) -> None:
    side, x = sim.Stream("sim:0"), torch.ones(64, device="sim:0")
    with sim.traced() as reports, sim.held():
        late = x * 2
        with sim.stream(side):
            _ = late + 1
    ((kind, text, stack),) = [report for report in reports if "aten::mul" in report[1]]
    assert kind == "races"
    assert "aten::add" in text
    assert "_ = late + 1" in stack


def test_two_readers_are_no_race_and_a_writer_after_one_of_them_is(sim: ModuleType) -> None:
    first, second, x = sim.Stream("sim:0"), sim.Stream("sim:0"), torch.ones(64, device="sim:0")
    sim.synchronize(0)
    with sim.stream(first):
        _ = x + 1
    with sim.stream(second):
        _ = x + 1
        assert sim.stats()["races"] == 0
        x.add_(1)
    assert sim.stats()["races"] == 1


def test_wait_for_a_stream_orders_what_that_stream_has_waited_for(sim: ModuleType) -> None:
    first, second = sim.Stream("sim:0"), sim.Stream("sim:0")
    x = torch.ones(64, device="sim:0")
    first.wait_stream(sim.current_stream(0))
    second.wait_stream(first)
    with sim.stream(second):
        _ = x + 1
    assert sim.stats()["races"] == 0


def test_error_on_the_device_comes_with_the_next_synchronisation_once(sim: ModuleType) -> None:
    nn.functional.embedding(torch.tensor([9], device="sim:0"), torch.ones(3, 3, device="sim:0"))
    with pytest.raises(RuntimeError, match="asynchronously"):
        sim.synchronize(0)
    sim.synchronize(0)


def test_new_thread_begins_on_device_zero(sim: ModuleType) -> None:
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(sim.current_device()))
    with sim.device(1):
        thread.start()
        thread.join()
    assert seen == [0]
