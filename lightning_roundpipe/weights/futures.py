"""Weights whose update is under way: code that looks at one waits for it.

[Note: parameter futures]
An optimizer step that runs behind the pipeline leaves weights that are not what they will be. Everything that looks at
one must see the finished value: the upload for the next forward, and as well checkpoints, callbacks, hooks, loggers and
any other code of the user. Weights that are updated together are a *bucket*, and each bucket of an :class:`Update` has
a :class:`ParameterFuture`, which is in one of four states: ::

    UPDATING -> [UNSEEN] --> READY       a look at a weight waits, then goes on
        |          |          | ^
        +--------- fail ---> FAILED      a look at a weight raises the error, until the training thread has got it

UNSEEN is a bucket whose low-precision copies the update has made as well ([Note: working copies] in
:mod:`weights.low_precision`): they are right if nothing has looked at the weights until a step begins, because who
looks may write, and a write through ``.data`` leaves no trace.

While a future is not ready, the class of its weights is :class:`PendingParameter`, whose ``__torch_function__`` asks
the future before anything reads or changes the weight, and before anything gets hold of its gradient, which the update
still reads. Then it is a plain parameter again. Shape, dtype and other things that an update does not change can be
looked at without a wait. Tensors and arrays that share the memory of the weight and were made before the update began
(``view = weight.detach()``) cannot be noticed.

An error fails all futures of the update, also those that were finished, and those of updates behind it. When the
training thread has got the error, all of them become ready: what follows then, such as hooks for exceptions and the
tear-down, finds the weights as they are. Training itself does not go on (:meth:`Training.check`).

Classes of weights are set without a lock: a signal handler that looks at a weight may run at any place, also while the
update begins on the same thread. Each operation on :data:`_futures` and on a class is atomic; what has set an entry or
a class looks again whether it is still right; and :meth:`Update.begin` may be called again in the middle of itself.
"""

from __future__ import annotations

import contextlib
import enum
import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..common.threads import InterruptibleEvent, Surroundings
from .events import tell
from .harmless import HARMLESS

# An interrupt may end a wait of one thread in its middle, and leave others in theirs: they look again.
_RECHECK_S = 1.0


class State(enum.Enum):
    """Of a bucket of weights; see [Note: parameter futures]."""

    UPDATING = "updating"
    UNSEEN = "updated, and not looked at since"
    READY = "ready"
    FAILED = "failed"


_LEGAL = {
    (State.UPDATING, State.UNSEEN),
    (State.UPDATING, State.READY),
    (State.UPDATING, State.FAILED),
    (State.UNSEEN, State.READY),
    (State.UNSEEN, State.FAILED),
    (State.READY, State.FAILED),
    (State.FAILED, State.READY),
}


class Training:
    """The error that has ended the updates of a training, and what the thread that trains knows of it.

    Attributes:
        error: None as long as nothing went wrong.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._thread = threading.get_ident()
        self._is_known = False
        self._failed: list[ParameterFuture] = []
        self._lock = threading.RLock()  # a signal handler may come here while its thread is here

    def fail(self, error: BaseException, futures: Iterable[ParameterFuture]) -> None:
        """On the thread of an update: a look at these weights raises ``error``, unless training knows it already."""
        with self._lock:
            self.error = error
            self._failed.extend(futures)
            for future in self._failed:
                future.turn(State.READY if self._is_known else State.FAILED)

    def look(self) -> None:
        """On any thread: something looks at a weight.

        Raises:
            BaseException: what went wrong, unless the thread that trains knows of it.
        """
        if self.error is not None and not self._is_known:
            self.check()

    def check(self) -> None:
        """Training goes on, or comes to its end.

        Raises:
            BaseException: what went wrong, unless this is the tear-down after it.
        """
        error, handled = self.error, sys.exc_info()[1]
        if error is None:
            return
        if threading.get_ident() == self._thread:
            with self._lock:
                self._is_known = True
                while self._failed:
                    self._failed.pop().turn(State.READY)
        while handled is not None and handled is not error:
            handled = handled.__cause__ or handled.__context__
        if handled is None:
            raise error


class ParameterFuture:
    """The weights of a bucket, whose update is going to come; see [Note: parameter futures]."""

    def __init__(self, parameters: Sequence[nn.Parameter], update: Update, training: Training) -> None:
        self.parameters = list(parameters)
        self.state = State.UPDATING
        self._update = update
        self._training = training
        self._done = InterruptibleEvent()

    def show(self) -> None:
        """From now on a look at the weights asks this future, as long as it is not ready."""
        for parameter in self.parameters:
            _futures[id(parameter)] = self
            if self.state is State.READY:
                self._hide(parameter)
            _classify(parameter)

    def _hide(self, parameter: nn.Parameter) -> None:
        if _futures.get(id(parameter)) is self:
            _futures.pop(id(parameter), None)  # another thread may have done so

    def turn(self, state: State) -> None:
        """Takes another state; threads that wait go on, unless it is UNSEEN."""
        before = self.state  # at the same time, another thread may turn it to the same
        if state is before:
            return
        assert (before, state) in _LEGAL, f"from {before} to {state}"
        self.state = state
        if state is State.FAILED:
            self.show()
        elif state is State.READY:
            for parameter in self.parameters:
                self._hide(parameter)
                _classify(parameter)
        if state is not State.UNSEEN:
            self._done.set()

    def wake(self) -> None:
        """Lets threads that wait go on, also if nothing has looked at the weights."""
        self._done.set()

    def wait(self) -> None:
        """On any thread: blocks until the weights are updated.

        Raises:
            BaseException: what went wrong.
            RuntimeError: in an update, which would wait for itself.
        """
        if self.state is State.UPDATING and threading.get_ident() in _updating:
            raise RuntimeError(
                "an optimizer looks at a weight in another way than through its param_groups: its step cannot be taken "
                "apart. Leave out is_separable = True, or use optimizer_overlap='off'"
            )
        self.await_end()
        if self.state is State.UNSEEN:
            self.turn(State.READY)
        self._training.look()

    def await_end(self) -> None:
        """As :meth:`wait`, whatever comes of the update."""
        self._update.begin()
        while not self._done.wait(_RECHECK_S):
            pass


class Update:
    """An optimizer step, bucket by bucket, on the thread that calls :meth:`run`: after those that it was given before.

    Args:
        works: the weights of each bucket, and what updates them.
        finish: is called for each bucket when it is written, and gives it its next state; None makes it ready.
    """

    def __init__(
        self,
        works: Sequence[tuple[Sequence[nn.Parameter], Callable[[], None]]],
        training: Training,
        finish: Callable[[ParameterFuture], None] | None = None,
    ) -> None:
        self._training = training
        self._futures = [ParameterFuture(parameters, self, training) for parameters, _ in works]
        self._works = deque(work for _, work in works)
        self._finish = finish
        self._surroundings = Surroundings("cpu")
        # The first word decides whether the updates are made. To put one is atomic, and may be done several times.
        self._may_begin: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._has_begun = False
        self._has_ended = InterruptibleEvent()

    def begin(self) -> None:
        """Lets the updates begin: from now on a look at the weights waits. Who is going to wait calls this as well: it
        may be a signal handler that has interrupted the first call."""
        if not self._has_begun:
            for future in self._futures:
                future.show()
            self._may_begin.put(True)
            self._has_begun = True

    def cancel(self) -> None:
        """No thread could be started, or it was interrupted: the updates are not made, if they have not begun."""
        self._may_begin.put(False)

    def run(self) -> None:
        """On the thread of the updates."""
        may_begin = self._may_begin.get()
        _updating[threading.get_ident()] = self
        try:
            with self._surroundings.entered():
                for future in self._futures:
                    work = self._works.popleft()
                    if may_begin:
                        self._run_one(future, work)
                    else:
                        future.turn(State.READY)
                    del work  # and with it the gradients
        except BaseException as error:  # must reach the thread that trains
            self._training.fail(error, self._futures)
        finally:
            self._futures = []  # each of them holds this update
            self._has_ended.set()
            del _updating[threading.get_ident()]

    def _run_one(self, future: ParameterFuture, work: Callable[[], None]) -> None:
        if (error := self._training.error) is None:
            try:
                work()
                tell("updated", future.parameters)
                if self._finish is not None:
                    self._finish(future)
                else:
                    future.turn(State.READY)
            except BaseException as raised:  # must reach the threads that wait
                error = raised
        if error is not None and future.state is State.UPDATING:
            unmade = [future for future in self._futures if future.state is State.UPDATING]
            tell("not_updated", [parameter for future in unmade for parameter in future.parameters])
            self._training.fail(error, self._futures)

    def await_end(self) -> None:
        """Blocks until it has ended, and those before it."""
        self.begin()
        while not self._has_ended.wait(_RECHECK_S):
            pass


class PendingParameter(nn.Parameter):
    """See [Note: parameter futures]."""

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> nn.Parameter:  # type: ignore[misc]
        """A plain parameter: ``type(weight)(tensor)`` makes one that no update knows."""
        return nn.Parameter(data, requires_grad)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in HARMLESS:
            with unwaited():
                return func(*args, **kwargs)
        for parameter in _pending_in((args, kwargs)):
            if (future := _futures.get(id(parameter))) is not None:
                future.wait()
            _classify(parameter)  # perhaps made one by torch.utils.swap_tensors
        return func(*args, **kwargs)


_futures: dict[int, ParameterFuture] = {}
_updating: dict[int, Update] = {}  # that are made, by thread


def _classify(parameter: nn.Parameter) -> None:
    """Gives ``parameter`` the class that it should have; other threads may do so at the same time."""
    is_pending = id(parameter) in _futures
    while True:
        parameter.__class__ = PendingParameter if is_pending else nn.Parameter
        if (id(parameter) in _futures) is is_pending:
            return
        is_pending = not is_pending


def _pending_in(value: Any) -> Iterator[nn.Parameter]:
    if isinstance(value, Tensor):
        if type(value) is PendingParameter:
            yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _pending_in(entry)
    elif isinstance(value, (list, tuple, set)):
        for entry in value:
            yield from _pending_in(entry)


def unwaited() -> AbstractContextManager[Any]:
    """While open, the calling thread does not wait: for what does not disturb an update."""
    return cast(AbstractContextManager[Any], torch._C.DisableTorchFunctionSubclass())


@contextlib.contextmanager
def replaced(values: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
    """While open, the parameters have these values, and a look at them does not wait; updates go on with the others."""
    before: dict[nn.Parameter, Tensor] = {}
    try:
        for parameter, value in values.items():
            parameter.__class__ = nn.Parameter
            before[parameter] = parameter.data
            parameter.data = value
        yield
    finally:
        for parameter, data in before.items():
            parameter.data = data
        for parameter in values:
            _classify(parameter)


def can_be_pending(parameter: nn.Parameter) -> bool:
    """Whether the update of ``parameter`` may be under way while others run: a plain parameter on the host."""
    return (
        type(parameter) in (nn.Parameter, PendingParameter)
        and parameter.device.type == "cpu"
        and not parameter.is_inference()
    )


def is_pending(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether one would have to wait for any of ``parameters``."""
    if not _futures:
        return False
    futures = [_futures.get(id(p)) for p in parameters if type(p) is PendingParameter]
    return any(future is not None and future.state is not State.UNSEEN for future in futures)


def await_update(parameter: nn.Parameter) -> None:
    """Blocks until ``parameter`` is updated, if it is to be.

    Raises:
        BaseException: what went wrong.
    """
    future = _futures.get(id(parameter)) if type(parameter) is PendingParameter else None
    if future is not None:
        future.wait()


def take_unseen() -> list[nn.Parameter]:
    """Weights that nothing has looked at since they were updated; from now on plain parameters."""
    unseen = [future for future in dict.fromkeys(_futures.values()) if future.state is State.UNSEEN]
    for future in unseen:
        future.turn(State.READY)
    return [parameter for future in unseen for parameter in future.parameters]


def _finish_before_fork() -> None:
    """A child has no thread that ends an update."""
    if threading.get_ident() not in _updating:
        for future in list(_futures.values()):
            future.await_end()
        for update in list(_updating.values()):
            update.await_end()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_finish_before_fork)
