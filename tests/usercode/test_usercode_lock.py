"""The user-code lock and its exclusive sections: who waits for whom, and that no thread waits for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from lightning_roundpipe.common.errors import StepAborted
from lightning_roundpipe.usercode import lock as lock_module
from lightning_roundpipe.usercode.lock import UserCodeLock, UserCodeState

JOIN_S = 60.0


@pytest.fixture
def lock() -> UserCodeLock:
    return UserCodeLock((), lambda: False)


@pytest.fixture
def aborted_lock(monkeypatch: pytest.MonkeyPatch) -> UserCodeLock:
    monkeypatch.setattr(lock_module, "RECHECK_S", 0.001)
    return UserCodeLock((), lambda: True)


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_an_exclusive_section_is_reentrant_and_excludes_user_code(lock: UserCodeLock) -> None:
    state, other = UserCodeState(0, 0), UserCodeState(1, 0)
    order: list[str] = []

    def run_user_code() -> None:
        lock.acquire(other)
        order.append("other")
        lock.release(other)

    with lock.exclusive():
        thread = in_thread(run_user_code)
        with lock.exclusive(), lock.in_user_code(state):
            assert lock.is_held_by(state)
        assert lock.is_held_by(state)
        order.append("section")
    thread.join(JOIN_S)
    assert order == ["section", "other"]
    assert not lock.is_held_by(state)


def test_a_unit_that_is_alone_waits_for_those_that_run_and_the_next_ones_wait_for_it(lock: UserCodeLock) -> None:
    inside, may_end = threading.Event(), threading.Event()
    order: list[str] = []

    def run(name: str, section: AbstractContextManager[Any], *, waits: bool = False) -> None:
        with section:
            inside.set()
            if waits:
                may_end.wait(JOIN_S)
            order.append(name)

    first = in_thread(lambda: run("first", lock.unit_running(), waits=True))
    assert inside.wait(JOIN_S)
    alone = in_thread(lambda: run("alone", lock.exclusive(alone=True)))
    units = lock._units
    with units._changed:
        assert units._changed.wait_for(lambda: units._is_alone, JOIN_S)
    late = in_thread(lambda: run("late", lock.unit_running()))
    lock.acquire(UserCodeState(0, 0))  # a thread that waits to be alone does not hold the lock: hooks of units need it
    lock.release(lock._holder)
    may_end.set()
    for thread in (first, alone, late):
        thread.join(JOIN_S)
    assert order == ["first", "alone", "late"]


@pytest.mark.parametrize("what", ["lock", "exclusive", "alone", "unit"])
def test_waiting_ends_when_the_step_is_aborted(aborted_lock: UserCodeLock, what: str) -> None:
    lock = aborted_lock
    waits: dict[str, tuple[AbstractContextManager[Any], Callable[[], AbstractContextManager[Any]]]] = {
        "lock": (lock.exclusive(), lambda: lock.in_user_code(UserCodeState(0, 0))),
        "exclusive": (lock.exclusive(), lock.exclusive),
        "alone": (lock.unit_running(), lambda: lock.exclusive(alone=True)),
        "unit": (lock.exclusive(alone=True), lock.unit_running),
    }
    held, wait = waits[what]
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with wait():
                pass
        except StepAborted as error:
            errors.append(error)

    with held:
        in_thread(run).join(JOIN_S)
    assert len(errors) == 1
    with lock.unit_running():
        pass
    with lock.exclusive(alone=True):  # what the wait had taken was given back
        pass
