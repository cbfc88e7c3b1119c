"""What torch notes about modes, for the whole process."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from torch.utils import _python_dispatch

from lightning_roundpipe.common.dispatch import ThreadsDispatchMode


def notes() -> dict[str, bool]:
    return {name: value for name, value in vars(_python_dispatch).items() if name.startswith("_is_in_")}


def test_no_mode_is_noted_after_threads_have_left_in_the_order_in_which_they_came() -> None:
    entered, entered_too, left = (threading.Event() for _ in range(3))

    def first() -> None:
        with ThreadsDispatchMode():
            entered.set()
            assert entered_too.wait(30)
        left.set()

    def second() -> None:
        assert entered.wait(30)
        with ThreadsDispatchMode():
            entered_too.set()
            assert left.wait(30)

    before = notes()
    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(first), threads.submit(second)]:
            done.result()
    assert notes() == before
