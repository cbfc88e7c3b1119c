"""The gate: who may be on which device, in the order of the schedule.

[Note: gate]
A device admits micro-batches in the order of its list of actions (stage, micro-batch). A thread that reaches the
first unit of a stage calls :meth:`Gate.enter` and waits until its action is the head of the list; it calls
:meth:`Gate.leave` when it goes on to another stage. Leaving without having entered (a stage whose units were all
skipped) and leaving out of order are remembered, so every ticket is released on every path.

Deadlock-freedom: a thread never holds a ticket while it waits for another one, and all lists are sub-orders of one
topological order (checked by :class:`Schedule`). Should threads wait all the same (a broken schedule forced past the
validation, a lost wake-up), it is noticed: when every live thread waits and no waiting action is the head of its
list, the waiters get a :class:`PipelineStalled` error that shows the state.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..common.errors import StepAborted
from ..planning.schedule import Action, Schedule

# Waits are cut into pieces of this length, so that a wake-up that got lost costs time and never the run.
_RECHECK_S = 2.0


class PipelineStalled(RuntimeError):
    """No thread of the step can make progress; the message shows the state of the gate."""


class _Signal:
    """A :class:`threading.Event` for one waiter and a setter that holds the gate's lock; much cheaper."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        if self._lock.locked():
            self._lock.release()

    def wait(self, timeout: float) -> bool:
        return self._lock.acquire(timeout=timeout)


class Gate:
    """Admits micro-batch threads to devices in schedule order; see [Note: gate].

    Args:
        schedule: who runs where in which order.
        end_stage: called with a device's index when the last micro-batch has left a stage on it, by the thread that
            left last, before the device admits a micro-batch to its next stage.
    """

    def __init__(self, schedule: Schedule, end_stage: Callable[[int], None] = lambda device: None) -> None:
        self.schedule = schedule
        self._end_stage = end_stage
        self._closing = [False] * schedule.num_devices
        self._lock = threading.Lock()
        self._head = [0] * schedule.num_devices
        self._left: set[Action] = set()
        self._waiting: dict[Action, _Signal] = {}
        self._nearing: dict[Action, _Signal] = {}
        self._gated: dict[int, tuple[int, int, _Signal]] = {}  # waiter -> (for whom, position, event)
        self._passed: dict[int, int] = {}  # micro-batch -> call positions it has passed
        self._live = 0
        self._aborted = False
        self._stalled: str | None = None

    def device_of(self, action: Action) -> int:
        """Index of the device that runs ``action``."""
        return self.schedule.device_of(action)

    def join(self, num_threads: int) -> None:
        """Announces ``num_threads`` threads, before they start."""
        with self._lock:
            self._live += num_threads

    def retire(self, microbatch_index: int) -> None:
        """A thread is done (or failed): all its tickets are released."""
        with self._lock:
            self._passed[microbatch_index] = 1 << 60
            for stage_index in range(self.schedule.num_stages):
                self._left.add(Action(stage_index, microbatch_index))
            self._open_gates(microbatch_index)
        try:
            for device in range(self.schedule.num_devices):
                self._advance(device)
        finally:
            with self._lock:
                self._live -= 1  # only now: before the heads have moved, the others would seem to be stalled
                self._detect_stall()

    def abort(self) -> None:
        """Makes every present and future wait raise :class:`StepAborted`."""
        with self._lock:
            self._aborted = True
            self._wake_all()

    def check(self) -> None:
        """Raises:
        StepAborted: if another thread of the step failed.
        PipelineStalled: if the schedule cannot make progress.
        """
        if self._stalled is not None:
            raise PipelineStalled(self._stalled)
        if self._aborted:
            raise StepAborted

    def enter(self, action: Action) -> bool:
        """Blocks until ``action`` is the head of its device's list; whether it was not already."""
        return self._wait_until(self._is_head, action, self._waiting)

    def approach(self, action: Action) -> bool:
        """Blocks until ``action`` is at most the second in its device's list, when it is time to fetch what it needs;
        whether it was not already."""
        return self._wait_until(self._is_near, action, self._nearing)

    def _wait_until(self, is_ready: Callable[[Action], bool], action: Action, waiting: dict[Action, _Signal]) -> bool:
        """Blocks until ``is_ready``, asked with the lock held, says so; whether it did not at once."""
        with self._lock:
            self.check()
            if is_ready(action):
                return False
            event = waiting[action] = _Signal()
            self._detect_stall()
        try:
            while not event.wait(_RECHECK_S):
                with self._lock:
                    if is_ready(action):
                        break
        finally:
            with self._lock:
                waiting.pop(action, None)
        self.check()
        return True

    def leave(self, action: Action) -> None:
        """Releases the ticket of ``action``, entered or not."""
        with self._lock:
            self._left.add(action)
        self._advance(self.schedule.device_of(action))

    def pass_position(self, microbatch_index: int, position: int) -> None:
        """Notes that a micro-batch has run (or skipped) all call positions below ``position``.

        Takes the lock only if there are waiters: they announce themselves before they look, so that one of both sees
        the other.
        """
        self._passed[microbatch_index] = position
        if self._gated:
            with self._lock:
                self._open_gates(microbatch_index)

    def await_position(self, microbatch_index: int, other: int, position: int) -> bool:
        """Blocks until micro-batch ``other`` has passed ``position``: for units that write buffers, in order.

        Returns:
            Whether it had not already.
        """
        self.check()
        if self._passed.get(other, 0) > position:
            return False
        event = _Signal()
        with self._lock:
            self.check()
            self._gated[microbatch_index] = (other, position, event)
            self._detect_stall()
        try:
            while self._passed.get(other, 0) <= position:
                if event.wait(_RECHECK_S):
                    break
        finally:
            with self._lock:
                self._gated.pop(microbatch_index, None)
        self.check()
        return True

    def describe(self) -> str:
        """The state in words: per device the head of its list, then who waits for what."""
        lines = []
        for device, (actions, head) in enumerate(zip(self.schedule.devices, self._head, strict=True)):
            at = actions[head] if head < len(actions) else None
            state = "done" if at is None else f"waits for stage {at.stage_index} of micro-batch {at.microbatch_index}"
            lines.append(f"device {device}: {head} of {len(actions)} actions done, {state}")
        for action in sorted((*self._waiting, *self._nearing)):
            lines.append(
                f"micro-batch {action.microbatch_index} waits for its turn in stage {action.stage_index} "
                f"on device {self.schedule.device_of(action)}"
            )
        for waiter, (other, position, _) in sorted(self._gated.items()):
            lines.append(f"micro-batch {waiter} waits until micro-batch {other} has passed call {position}")
        return "\n".join(lines)

    def _is_head(self, action: Action) -> bool:
        device = self.schedule.device_of(action)
        actions, head = self.schedule.devices[device], self._head[device]
        return not self._closing[device] and head < len(actions) and actions[head] == action

    def _is_near(self, action: Action) -> bool:
        device = self.schedule.device_of(action)
        head = self._head[device]
        return action in self._left or action in self.schedule.devices[device][head : head + 2]

    def _advance(self, device: int) -> None:
        """Moves the head past actions that were left; a device between two stages is closed."""
        while True:
            with self._lock:
                if self._closing[device] or not self._advance_within_stage(device):
                    return
                self._closing[device] = True
            try:
                if not self._aborted:
                    self._end_stage(device)
            finally:
                with self._lock:
                    self._closing[device] = False
                    self._wake_head(device)

    def _advance_within_stage(self, device: int) -> bool:
        """Whether a stage ended on the way."""
        actions, head = self.schedule.devices[device], self._head[device]
        while head < len(actions) and actions[head] in self._left:
            head += 1
            if head == len(actions) or actions[head].stage_index != actions[head - 1].stage_index:
                self._head[device] = head
                return True
        self._head[device] = head
        self._wake_head(device)
        return False

    def _wake_head(self, device: int) -> None:
        actions, head = self.schedule.devices[device], self._head[device]
        if head < len(actions) and (event := self._waiting.get(actions[head])) is not None:
            event.set()
        if self._nearing:
            for action in actions[head : head + 2]:
                if (event := self._nearing.get(action)) is not None:
                    event.set()

    def _open_gates(self, microbatch_index: int) -> None:
        passed = self._passed[microbatch_index]
        for other, position, event in self._gated.values():
            if other == microbatch_index and passed > position:
                event.set()

    def _detect_stall(self) -> None:
        num_waiting = len(self._waiting) + len(self._gated) + len(self._nearing)
        if self._live <= 0 or any(self._closing) or num_waiting < self._live or self._aborted:
            return
        if any(self._is_head(action) for action in self._waiting) or any(map(self._is_near, self._nearing)):
            return
        if any(self._passed.get(other, 0) > position for other, position, _ in self._gated.values()):
            return
        self._stalled = (
            "the schedule cannot make progress: every micro-batch thread waits and none is next on its device.\n"
            + self.describe()
        )
        self._wake_all()

    def _wake_all(self) -> None:
        for event in (*self._waiting.values(), *self._nearing.values()):
            event.set()
        for _, _, event in self._gated.values():
            event.set()
