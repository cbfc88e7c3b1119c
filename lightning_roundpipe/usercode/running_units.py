"""How many units run at the moment, for what must not happen beside one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from ..common.errors import StepAborted

RECHECK_S = 2.0  # how often a thread that waits looks whether the step has failed


class RunningUnits:
    """Counts the units that run in a step; see [Note: exclusive sections] in :mod:`usercode.lock`.

    Args:
        aborted: tells whether waiting has become pointless; then it ends in :class:`StepAborted`.
    """

    def __init__(self, aborted: Callable[[], bool]) -> None:
        self._aborted = aborted
        self._changed = threading.Condition()  # guards the next two
        self._number = 0
        self._is_alone = False  # whether a thread wants none, or has it

    @contextlib.contextmanager
    def one_running(self) -> Iterator[None]:
        """Around a unit."""
        self._begin()
        try:
            yield
        finally:
            self._end()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside :meth:`one_running`: the unit does not count until this ends."""
        self._end()
        try:
            yield
        finally:
            self._begin()

    @contextlib.contextmanager
    def none_running(self) -> Iterator[None]:
        """Around what no unit may run beside; not inside :meth:`one_running`."""
        with self._changed:
            self._await(lambda: not self._is_alone)
            self._is_alone = True  # from now on no unit begins
        try:
            with self._changed:
                self._await(lambda: not self._number)
            yield
        finally:
            with self._changed:
                self._is_alone = False
                self._changed.notify_all()

    def _begin(self) -> None:
        with self._changed:
            self._await(lambda: not self._is_alone)
            self._number += 1

    def _end(self) -> None:
        with self._changed:
            self._number -= 1
            self._changed.notify_all()

    def _await(self, condition: Callable[[], bool]) -> None:
        while not self._changed.wait_for(condition, RECHECK_S):
            if self._aborted():
                raise StepAborted
