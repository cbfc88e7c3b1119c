"""Threads with a number of intra-op threads of their own."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_roundpipe.common.thread_locals import AutogradLocal
from lightning_roundpipe.common.threads import InterruptibleEvent, Worker, Workers
from tests.common.instructions import call_with

lists_native_threads = pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="needs the list of native threads, which only Linux has"
)


def threads_of(worker: Worker) -> int:
    found: list[int] = []
    worker.begin(lambda: found.append(torch.get_num_threads()), "asked")
    assert worker.done().wait(60)
    return found[0]


def test_a_worker_keeps_its_number_and_changes_no_others(fixed_global_state: None) -> None:
    torch.set_num_threads(1)
    workers = Workers(3)
    worker = workers.take()
    worker.start()
    assert torch.get_num_threads() == 1
    torch.set_num_threads(2)
    assert threads_of(worker) == 3
    found: list[int] = []
    other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    other.start()
    other.join()
    assert found == [2]
    workers.give_back([worker])
    assert workers.take() is worker, "the caller's number is not its own"
    workers.give_back([worker])
    workers.close()
    assert not worker.is_alive


@lists_native_threads
def test_the_first_product_of_a_worker_uses_its_number_of_threads(fixed_global_state: None) -> None:
    torch.set_num_threads(1)
    worker, weight, started = Worker(), torch.ones(32, 32), []

    def multiply() -> None:
        before = set(os.listdir("/proc/self/task"))
        torch.nn.functional.linear(weight, weight)
        started.extend(set(os.listdir("/proc/self/task")) - before)

    worker.call(multiply, "multiplies")
    worker.close()
    assert not started, "threads of OpenMP, for a second core"


def test_a_call_ends_when_the_work_has_been_done_and_raises_what_it_raises() -> None:
    worker, done = Worker(1), []
    worker.call(lambda: done.append(threading.current_thread().name), "called")
    assert done == ["called"]
    with pytest.raises(ZeroDivisionError):
        worker.call(lambda: 1 // 0, "called")
    worker.close()


@lists_native_threads
def test_a_closed_worker_has_left_with_what_torch_keeps_for_its_thread() -> None:
    gone: list[str] = []

    class Slow:
        def __del__(self) -> None:
            time.sleep(0.05)  # long enough to be seen
            gone.append("gone")

    worker = Worker()
    worker.call(lambda: AutogradLocal[Slow]("roundpipe_test").set(Slow()), "keeps")
    worker.close()
    assert gone == ["gone"]


def called_at(instruction: int, handler: Callable[[], object], call: Callable[[], object]) -> bool:
    """``call()``, with ``handler()`` before an instruction of it, counted from 1; whether there are so many."""
    num_instructions = 0

    def count() -> None:
        nonlocal num_instructions
        num_instructions += 1
        if num_instructions == instruction:
            handler()

    call_with(count, call)
    return num_instructions >= instruction


def interrupted(wait: Callable[[], object], instruction: int) -> bool:
    """Ctrl-C at an instruction of ``wait``; whether there are so many."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    try:
        called_at(instruction, interrupt, wait)
    except KeyboardInterrupt:
        return True
    return False


@pytest.mark.parametrize("is_set", [False, True])
def test_an_event_may_be_interrupted_anywhere(is_set: bool) -> None:
    event, num_places = InterruptibleEvent(), 0
    if is_set:
        event.set()
    while interrupted(lambda: event.wait(1e-6), num_places + 1):
        num_places += 1
        assert event.is_set() is event.wait(1e-6) is is_set
    assert num_places > 3


def test_an_event_tells_when_it_is_set() -> None:
    event, heard = InterruptibleEvent(), list[bool]()
    for _ in range(100):
        event.clear()
        assert not event.is_set()
        thread = threading.Thread(target=lambda: heard.append(event.wait(60)))
        thread.start()
        event.set()
        thread.join()
        assert event.is_set()
        event.set()
        assert event.wait()
    assert heard == [True] * 100


def test_an_event_lets_all_go_on_that_wait() -> None:
    event, heard = InterruptibleEvent(), list[bool]()
    threads = [threading.Thread(target=lambda: heard.append(event.wait(60))) for _ in range(3)]
    for thread in threads:
        thread.start()
    event.set()
    for thread in threads:
        thread.join()
    assert heard == [True] * 3


@pytest.mark.parametrize("call", [InterruptibleEvent.set, lambda event: event.wait(1e-6)], ids=["set", "wait"])
def test_an_event_may_be_set_while_it_is_set_and_waited_for(call: Callable[[InterruptibleEvent], object]) -> None:
    """Another thread sets it at any place; before that, it has released it already."""
    for num_released in range(2):
        for instruction in range(1, 100):
            event = InterruptibleEvent()
            for _ in range(num_released):
                event._lock.release()
            if not called_at(instruction, event.set, lambda event=event: call(event)):
                break
            assert event.wait(1e-6)
        assert instruction > 3


def test_a_release_that_comes_after_the_event_was_cleared_is_none() -> None:
    """The thread that sets it was interrupted in the middle, and the one that waits has seen it and gone on."""
    event = InterruptibleEvent()
    event._lock.release()
    assert not event.wait(1e-6)
    assert event._lock.locked()
    event.set()
    assert event.wait()


def test_a_worker_whose_thread_is_gone_gets_another_one() -> None:
    """As in a process that was forked."""
    worker, seen = Worker(1), list[int]()
    worker.begin(sys.exit, "ends")
    worker._thread.join()
    worker.begin(lambda: seen.append(torch.get_num_threads()), "goes on")
    assert worker.done().wait(60)
    worker.close()
    assert seen == [1]


def test_an_interrupt_of_the_wait_for_workers_keeps_them_to_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any) -> bool:
        raise KeyboardInterrupt

    workers, may_end = Workers(1), threading.Event()
    worker = workers.take()
    worker.begin(lambda: may_end.wait(60), "busy")
    with monkeypatch.context() as patched:
        patched.setattr(InterruptibleEvent, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            workers.give_back([worker])
    may_end.set()

    workers.close()

    assert not worker.is_alive
