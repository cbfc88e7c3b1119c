"""Threads of a step: where they come from, what they take over from the caller, and how they are waited for.

::

    Workers (idle)  --take-->  Worker  --begin(work)-->  work ... halts ... goes on ... ends  --give_back-->  Workers

A thread *halts* when its micro-batch stands at a barrier, or ends; :func:`run_threads` waits until all have halted.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

# Waits are cut into pieces, so that the waiting thread notices interrupts.
_RECHECK_S = 0.2
_PAUSE_S = 0.001
_MAX_PAUSES = 1000  # the system may have given the number of a thread to another one


class Surroundings:
    """Thread-local modes of torch that another thread takes over from the one that makes this."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = torch.is_autocast_enabled(device_type)
        self._dtype = torch.get_autocast_dtype(device_type)

    @contextlib.contextmanager
    def entered(self) -> Any:
        # The autocast weight cache is shared by all threads and cleared when any of them leaves autocast; what it
        # caches under no_grad would also cut gradients of the recomputation. It stays off.
        torch.set_autocast_cache_enabled(False)
        with contextlib.ExitStack() as stack:
            if self._inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self._grad and not self._inference))
            if self._autocast:
                stack.enter_context(torch.autocast(self._device_type, dtype=self._dtype, cache_enabled=False))
            yield

    def in_backward(self) -> contextlib.AbstractContextManager[Any]:
        """Without autocast: Lightning leaves it before ``loss.backward()``, where it would cast what autograd computes
        in float32 (the backward of a region without autocast, functions of the user).
        """
        if not self._autocast:
            return contextlib.nullcontext()
        return torch.autocast(self._device_type, dtype=self._dtype, enabled=False, cache_enabled=False)


@contextlib.contextmanager
def intra_op_threads_kept() -> Iterator[None]:
    """Around the start of a thread that sets its number of intra-op threads, which threads that start later would get.

    A thread gets its number with its first operator that is split. So no other one may start meanwhile.
    """
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def set_intra_op_threads(num_threads: int) -> None:
    """Gives the calling thread a number of intra-op threads of its own."""
    torch.get_num_threads()  # else the number of new threads would take its place with the first operator
    torch.set_num_threads(num_threads)


class InterruptibleEvent:
    """As :class:`threading.Event`; Ctrl-C and signal handlers may stop a wait anywhere.

    ``threading.Event.wait`` releases a lock and takes it again in Python. If the interrupt comes between the two, a
    RuntimeError ("release unlocked lock") takes the place of the KeyboardInterrupt, and a handler that waits for the
    same event waits for ever. Here one call of C waits. Where several threads wait or set it, it is not cleared.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._lock = threading.Lock()  # locked while it is not set
        self._lock.acquire()

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._is_set

    def set(self) -> None:
        """Sets it, and lets threads that wait go on."""
        self._is_set = True
        self._release()

    def clear(self) -> None:
        """Takes back that it was set, between two waits."""
        self._is_set = False
        self._lock.acquire(blocking=False)

    def wait(self, timeout_s: float = -1.0) -> bool:
        """Blocks until it is set, or this time in seconds has passed (-1: for good); whether it is set."""
        # A release that came only when the event had been cleared is none: then it is locked again now.
        if not self._is_set and self._lock.acquire(timeout=timeout_s) and self._is_set:
            self._release()  # for others that wait; this thread may be in the middle of another wait for it
        return self._is_set

    def _release(self) -> None:
        with contextlib.suppress(RuntimeError):  # another thread has done so
            self._lock.release()


class Worker:
    """A thread that runs one function after another, and keeps nothing of them; a daemon that starts with the first.

    Its methods are for the thread that runs a step, but for those that give it work once it was started.

    Args:
        num_threads: intra-op threads; None for the number of the thread that starts it.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        self._num_threads = num_threads
        self._make()

    def _make(self) -> None:
        self._todo: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._todo,), daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs. In a forked process it does not."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Starts the thread, unless it runs."""
        if self._thread.is_alive():
            return
        if self._thread.ident is not None:  # it was closed, or started before the process was forked
            self._make()
        if self._num_threads is None:
            self._thread.start()
            return
        with intra_op_threads_kept():
            self._thread.start()
            self._todo.put(functools.partial(set_intra_op_threads, self._num_threads))
            self.done().wait()

    def begin(self, work: Callable[[], object], name: str) -> None:
        """Lets the thread, under this name, call ``work``, which raises nothing, after the functions before."""
        self._thread.name = name
        self.start()
        self._todo.put(work)

    def call(self, work: Callable[[], object], name: str) -> None:
        """As :meth:`begin`; blocks until ``work`` has been done.

        Raises:
            BaseException: what it has raised.
        """
        errors: list[BaseException] = []

        def caught() -> None:
            try:
                work()
            except BaseException as error:  # must reach the caller
                errors.append(error)

        self.begin(caught, name)
        self.done().wait()
        if errors:
            raise errors.pop()

    def done(self) -> InterruptibleEvent:
        """Set by the thread, if it is alive, when it has called all functions that were given until now."""
        event = InterruptibleEvent()
        self._todo.put(event.set)
        return event

    def close(self) -> None:
        """Ends the thread and waits for its end. It may be started again."""
        if self._thread.ident is not None:
            self._todo.put(None)
            self._thread.join()
            _await_end(self._thread.native_id)


def _await_end(native_id: int | None) -> None:
    """Blocks until a thread that was joined has left the system, where that can be seen.

    Destructors of C++ run on it after Python has ended it. Those that take the interpreter lock, as torch's for objects
    that it keeps by thread, would abort a process that ends meanwhile.
    """
    pause = threading.Event()  # user code may have replaced the clock
    for _ in range(_MAX_PAUSES):
        if not os.path.exists(f"/proc/self/task/{native_id}"):
            return
        pause.wait(_PAUSE_S)


def _work(todo: queue.SimpleQueue[Callable[[], object] | None]) -> None:
    torch.get_num_threads()  # a new thread has that number only now: matrix products would use all cores before
    while (work := todo.get()) is not None:
        work()
        del work


class Workers:
    """Threads for one step after another: to start one costs more than a unit call.

    Used by the thread that runs a step.

    Args:
        num_threads: intra-op threads of each; None for the number from when it began.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        self._idle: list[Worker] = []
        self._own_threads = num_threads
        self._num_threads = 0  # from when those that are idle began

    def take(self) -> Worker:
        """An idle thread, until :meth:`give_back`."""
        if self._own_threads is None and self._num_threads != torch.get_num_threads():
            self.close()
            self._num_threads = torch.get_num_threads()
        return self._idle.pop() if self._idle else Worker(self._own_threads)

    def give_back(self, workers: Sequence[Worker], *, are_done: bool = False) -> None:
        """They may be taken again, when they are done, so that nothing of a step is left.

        Args:
            are_done: whether that is known: to ask would wake each of them.
        """
        try:
            for worker, done in [] if are_done else [(worker, worker.done()) for worker in workers]:
                while not done.wait(_RECHECK_S) and worker.is_alive:
                    pass
        finally:  # an interrupt ends the wait; each does one thing after the other, and is ended with the others
            self._idle += reversed(workers)

    def close(self) -> None:
        """Ends all idle threads."""
        while self._idle:
            self._idle.pop().close()


def run_threads(
    workers: Sequence[Worker],
    go_on: Sequence[Callable[[], None]],
    halted: Sequence[InterruptibleEvent],
    fail: Callable[[BaseException], None],
) -> None:
    """Lets threads go on, and waits until all have halted; an interrupt of the waiting thread stops them first.

    Args:
        workers: the threads that begin now; those that go on after a barrier come before them in ``halted``.
        go_on: lets a thread begin or go on, for each of them.
        halted: set by each thread as the last thing that it does for now.
        fail: makes the threads stop.
    """
    try:
        for let_go_on in go_on:
            let_go_on()
        for event in reversed(halted):  # the last one mostly halts last: to be woken once is enough
            while not event.wait(_RECHECK_S):
                pass
    except BaseException as interrupt:
        fail(interrupt)
        for worker, event in zip(workers, halted[len(halted) - len(workers) :], strict=True):
            done = worker.done()  # set at once by a thread that was not told to begin
            while not (event.is_set() or done.wait(_PAUSE_S)) and worker.is_alive:
                pass
        raise
