"""Where the micro-batches of a step meet: what user code does for the whole batch, in the middle of the step.

[Note: barriers]
With manual optimization ``training_step`` itself calls what concerns the whole batch: ``manual_backward``,
``optimizer.step``, ``scheduler.step``. Every micro-batch comes to such a call; there it stops until all have come, the
call is made once, on the thread that runs the step, and all go on with what it returned or raised. What a micro-batch
does from one barrier to the next is a *segment*: a run over a schedule, with a plan of its own.

A call that need not be waited for (``zero_grad``: its effect shows at the next backward) may be *deferred* to the next
barrier, so that it does not come between a forward and its backward.

A call may come with a closure (``optimizer.step(closure)``): then each call of it is made by all micro-batches, as
further segments, while the barrier is held.

[Note: exchanges]
In an *exchange* every micro-batch brings tensors, and gets others that are made of those of all. So gradients meet as
well: the backward of a micro-batch stops where it comes to the exchange, and goes on when all have come there::

    micro-batch 0    units --> z0 --+          +--> units, loss 0      loss 0 --> dz --+         +--> dz0 --> units
                                    | exchange |                                       | added up|
    micro-batch 1    units --> z1 --+          +--> units, loss 1      loss 1 --> dz --+         +--> dz1 --> units

To a micro-batch it is a call like that of a unit: it ends the graph before it, its results are cut, and its turn in the
backward is between those of the calls before and after it. All micro-batches come to it, also one whose loss is None or
weighs nothing: the losses of others depend on its rows.

A step has to be prepared for calls whose backward comes in a later segment. That it exchanges anything shows where its
first micro-batch is recorded; if later ones begin to do it, the step is run again.
"""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ..common.errors import StepAborted, UnpreparedError
from ..common.threads import InterruptibleEvent
from ..usercode.lock import current

_CLOSURE_ENDS = "the end of the closure"
_RECHECK_S = 2.0


class BarrierError(RuntimeError):
    """The micro-batches of one batch do not make the same calls."""


class LateBarrierError(UnpreparedError):
    """Micro-batches meet in a step of a kind that had no barriers so far. From now on it is prepared for them."""

    remedy = "call it in the first step as well"


@dataclass(eq=False)
class Collective:
    """A call that concerns the whole batch, as one micro-batch makes it; see [Note: barriers].

    Attributes:
        name: what users call it, for messages.
        key: the same in all micro-batches that make the same call; part of the identity of the segment after it.
        perform: makes the call, on the thread that runs the step; its result goes to all micro-batches. That of the
            first micro-batch is taken.
        value: of this micro-batch.
        closure: see [Note: barriers].
        is_deferred: whether the micro-batches go on without waiting for it.
        takes_gradients: whether those that have come are for this call; else they wait for the next one that takes any,
            or for the end of the step.
        tensors: of an exchange, on the host: what this micro-batch brings, see [Note: exchanges]. ``perform`` gives
            (tensors, whether they have gradients) for each micro-batch then.
        backward: of an exchange: performed where the backward comes to it. The values are the gradients for what the
            micro-batches got, by its index; gives those for what they have brought, for each, None for none.
    """

    name: str
    key: Hashable
    perform: Callable[[Barrier], Any]
    value: Any = None
    closure: Callable[[], Any] | None = None
    is_deferred: bool = False
    takes_gradients: bool = True
    tensors: Sequence[Tensor] = ()
    backward: Callable[[Barrier], Sequence[Sequence[Tensor | None]]] | None = None


@dataclass
class Barrier:
    """What all micro-batches have brought.

    Attributes:
        values: those of the collectives, in micro-batch order.
        gradients: master weight -> weighted sum of its gradients (host, the weight's shape and dtype), if a backward
            ends here.
        call_closures: lets all micro-batches call their closures; their results, in micro-batch order.
    """

    values: list[Any]
    gradients: dict[nn.Parameter, Tensor]
    call_closures: Callable[[], list[Any]]


def meet(
    collective: Collective, roots: Sequence[tuple[Tensor, float]] = (), *, retain_graph: bool = False
) -> tuple[bool, Any]:
    """Brings the micro-batch of the calling thread to a barrier: (True, what came out of it).

    Outside of steps that meet nothing happens: (False, None).

    Args:
        roots: losses to run backward from, and their shares; the backward comes before the barrier.
        retain_graph: whether what was differentiated may be differentiated again.

    Raises:
        BaseException: what the call has raised.
    """
    state = current()
    if state is None or state.meet is None:
        return False, None
    return True, state.meet(collective, list(roots), retain_graph)


class Attendance:
    """One micro-batch's way from barrier to barrier; what its thread and that of the step tell each other.

    Attributes:
        arrival: what the micro-batch has come for; None if it has ended.
        deferred: what it has come by since the last barrier.
        halted: set when its thread waits at a barrier or has ended.
    """

    def __init__(self) -> None:
        self.arrival: Collective | None = None
        self.deferred: list[Collective] = []
        self.halted = InterruptibleEvent()
        self._resumed = threading.Event()
        self._go_on = returning(None)

    @property
    def has_ended(self) -> bool:
        """Whether :meth:`end` has been called."""
        return self.arrival is None and self.halted.is_set()

    def await_outcome(self, arrival: Collective, aborted: threading.Event) -> Callable[[], Any]:
        """For the thread of the micro-batch: stops here, until :meth:`resume`; gives what was given there.

        Raises:
            StepAborted: if ``aborted`` is set.
        """
        self.arrival = arrival
        self._resumed.clear()
        self.halted.set()
        while not self._resumed.wait(_RECHECK_S) and not aborted.is_set():
            pass
        if aborted.is_set():
            raise StepAborted
        return self._go_on

    def end(self) -> None:
        """For the thread of the micro-batch: the last thing that it does."""
        self.arrival, self._go_on = None, returning(None)
        self.halted.set()

    def resume(self, go_on: Callable[[], Any]) -> None:
        """Lets the micro-batch go on, with a call of ``go_on``."""
        self.halted.clear()
        self._go_on = go_on
        self._resumed.set()


def returning(value: Any) -> Callable[[], Any]:
    """Goes on with a result."""
    return lambda: value


def raising(error: BaseException, index: int) -> Callable[[], Any]:
    """Goes on with an exception: each micro-batch has its own, because tracebacks grow on the way."""

    def go_on() -> Any:
        own = error
        if index:
            try:
                own = copy.copy(error).with_traceback(error.__traceback__)
            except Exception:  # exceptions that cannot be copied
                own = error
        raise own

    return go_on


def closure_end(value: Any) -> Collective:
    """To where micro-batches come when they have called their closures."""
    return Collective(_CLOSURE_ENDS, _CLOSURE_ENDS, lambda barrier: None, value)


def ends_closure(arrival: Collective | None) -> bool:
    """Whether a micro-batch has called its closure."""
    return arrival is not None and arrival.key == _CLOSURE_ENDS


def agreed(attendances: Sequence[Attendance]) -> tuple[list[list[Collective]], list[Collective] | None]:
    """What all micro-batches have come for: (deferred calls, the call); a list per call, one entry per micro-batch.

    None if all are over.

    Raises:
        BarrierError: if they have not come for the same.
    """
    arrivals = [attendance.arrival for attendance in attendances]
    deferred = [attendance.deferred for attendance in attendances]
    ways = [
        [*(one.key for one in before), None if arrival is None else arrival.key]
        for before, arrival in zip(deferred, arrivals, strict=True)
    ]
    for index, way in enumerate(ways):
        if way != ways[0]:
            here, there = (_names(deferred[i], arrivals[i]) for i in (0, index))
            raise BarrierError(
                f"the micro-batches of one batch have gone different ways in their step: micro-batch 0 to {here}, "
                f"micro-batch {index} to {there}. All must make the same calls of whole_batch, and with manual "
                "optimization of manual_backward, optimizers and schedulers: do not let them depend on the data, or "
                "use RoundPipeStrategy(num_microbatches=1)."
            )
    for attendance in attendances:
        attendance.deferred = []
    present = [arrival for arrival in arrivals if arrival is not None]
    return [list(calls) for calls in zip(*deferred, strict=True)], present or None


def _names(deferred: list[Collective], arrival: Collective | None) -> str:
    names = [*(one.name for one in deferred), "the end of the step" if arrival is None else arrival.name]
    return ", then ".join(names)


@dataclass(frozen=True)
class Segment:
    """Identifies a segment by the way to it: equal in every step that goes the same way.

    Attributes:
        step: key of the step.
        place: the closures that it is in, the last call before it, and which of these calls in the step that was.
    """

    step: Hashable
    place: tuple[Hashable, ...]

    def is_round_of_same_loop(self, other: Segment) -> bool:
        """Whether they differ by nothing but which of the equal calls they follow."""
        return self.step == other.step and self.place[:-1] == other.place[:-1]


@dataclass
class Place:
    """Where a step is, between two barriers."""

    step: Hashable
    closures: tuple[Hashable, ...] = ()
    last: Hashable = None
    seen: Counter[Hashable] = field(default_factory=Counter)

    @property
    def key(self) -> Hashable:
        """Of the plan of the segment that begins here: that of the step, for its first segment."""
        if not self.closures and self.last is None:
            return self.step
        return Segment(self.step, (*self.closures, self.last, self.seen[self.last]))

    def passed(self, collective: Collective) -> None:
        """A barrier was held."""
        self.last = collective.key
        self.seen[self.last] += 1

    def in_closure_of(self, collective: Collective) -> Place:
        """Where its closure begins. The same in every call of it."""
        return Place(self.step, (*self.closures, collective.key))
