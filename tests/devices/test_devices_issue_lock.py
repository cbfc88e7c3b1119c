"""The issue lock: who issues next, and what becomes of a unit that does not end."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from lightning_roundpipe.devices import issue_lock
from lightning_roundpipe.devices.issue_lock import IssueLock, Pace

FOR_EVER_S = 600.0


class Queue(deque[Any]):
    """Tells when a thread has begun to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.joined = threading.Semaphore(0)

    def append(self, run: Any) -> None:
        super().append(run)
        self.joined.release()


def lock_of(patience_s: float) -> IssueLock:
    lock = IssueLock()
    lock.patience_s = patience_s
    lock._waiting = Queue()
    return lock


def waiting_in(lock: IssueLock, run: Callable[[], object]) -> threading.Thread:
    """A thread that calls ``run`` when it has got the lock, and waits for it now."""

    def issue() -> None:
        with lock.issuing(Pace()):
            run()

    thread = threading.Thread(target=issue)
    thread.start()
    assert isinstance(lock._waiting, Queue)
    assert lock._waiting.joined.acquire(timeout=60)
    return thread


def overtake(lock: IssueLock, pace: Pace) -> None:
    """A run at this pace that is overtaken: another one begins and ends meanwhile."""
    with lock.issuing(pace):
        passed = threading.Event()
        thread = waiting_in(lock, passed.set)
        assert passed.wait(60)
        thread.join()


def test_runs_get_it_one_after_the_other_in_the_order_in_which_they_have_asked() -> None:
    lock, order, inside = lock_of(FOR_EVER_S), [], []

    def run(name: str) -> None:
        inside.append(name)
        order.append((name, len(inside)))
        inside.remove(name)

    with lock.issuing(Pace()):
        threads = [waiting_in(lock, lambda name=name: run(name)) for name in "abc"]  # type: ignore[misc]
        assert not order
    for thread in threads:
        thread.join()
    assert order == [("a", 1), ("b", 1), ("c", 1)]
    assert lock._holder is None


def test_an_error_in_a_run_hands_it_on() -> None:
    lock = lock_of(FOR_EVER_S)

    def fail() -> None:
        with lock.issuing(Pace()):
            threads.append(waiting_in(lock, lambda: None))
            raise ValueError("of the unit")

    threads: list[threading.Thread] = []
    with pytest.raises(ValueError, match="of the unit"):
        fail()
    threads[0].join()
    assert lock._holder is None


def test_a_run_that_does_not_end_is_overtaken_and_the_lock_works_as_before() -> None:
    lock, pace = lock_of(0.001), Pace()
    overtake(lock, pace)
    assert pace.num_strikes == 1
    assert lock._holder is None
    lock.patience_s = FOR_EVER_S
    with lock.issuing(pace):
        thread = waiting_in(lock, lambda: None)
    thread.join()
    assert pace.num_strikes == 0, "strikes count without a break"


def test_while_the_holder_changes_all_who_wait_are_patient() -> None:
    lock, held = lock_of(0.001), threading.Event()
    with lock.issuing(Pace()):
        first = waiting_in(lock, lambda: held.wait(60))  # overtakes, and does not end either
        second_has_it = threading.Event()
        second = waiting_in(lock, second_has_it.set)
        assert second_has_it.wait(60)
        held.set()
        first.join()
        second.join()
    assert lock._holder is None


def test_a_unit_that_is_always_overtaken_runs_without_it_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(issue_lock, "_NUM_RUNS_WITHOUT", 2)
    lock, pace = lock_of(0.001), Pace()
    for _ in range(issue_lock._NUM_STRIKES):
        assert pace.num_without == 0
        overtake(lock, pace)
    lock.patience_s = FOR_EVER_S
    for _ in range(2):
        with lock.issuing(pace), lock.issuing(Pace()):
            pass  # the second one does not wait
    with lock.issuing(pace):
        assert lock._holder is not None
