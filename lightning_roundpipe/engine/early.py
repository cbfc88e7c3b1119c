"""Work on gradients that are complete while the backward of other units is still running.

[Note: early updates]
The gradients of the last units are complete long before ``optimizer.step`` is called. Their update begins at once, *on
the assumption* that the optimizer will be called with just these gradients and with the options that it has now. What
an update overwrites is kept. When the optimizer is called, the assumption is checked, weight by weight: the gradient is
the same tensor, unchanged, and so are the options. Then the update stays, and only the others are still to be made.
Else it is taken back, and made again as it should be. It is taken back as well if the step fails, and if anybody looks
at one of these weights, or at the optimizer's state, before the optimizer is called (see [Note: pending weights] in
:mod:`pending`). So nobody can tell an early update from one that was made in time; but for the memory that is set aside
for what it overwrites, which limits how many there are. One mistaken assumption ends them: what a model does once it
does again.

Where gradients are clipped by their norm, no update can begin before the last gradient. Then their norms are taken
early, which is what takes time in clipping.

One thread does all of this, so that nothing of it is interrupted half-way, whatever becomes of the others.
"""

from __future__ import annotations

import contextlib
import enum
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .optimizer_state import GuardedState
from .overwritten import Buffers, Overwritten, can_be_restored, changed_by_update
from .pending import Share, unwaited, updating
from .threads import Surroundings
from .transfer import num_bytes_of
from .update_part import Options, Part, options_of

# What is updated at a time, in bytes of weights.
SHARE_BYTES = 16 * 2**20

Collect = Callable[[], Mapping[nn.Parameter, Tensor]]


class Early(enum.Enum):
    """What is done with gradients as soon as they are complete."""

    NOTHING = "nothing"
    NORMS = "norms"
    UPDATES = "updates"


class _EarlyShare(Share):
    """Weights that are updated too early for whoever looks at them: the update is taken back then."""

    owns_gradients = False

    def __init__(self, parameters: Sequence[nn.Parameter], take_back: Callable[[], None]) -> None:
        super().__init__(parameters)
        self._take_back = take_back

    def _await_end(self) -> None:
        self._take_back()
        super()._await_end()


@dataclass(frozen=True)
class _Begun:
    """An early update.

    Attributes:
        gradients: that it was made with, and their versions.
        marks: of the weights.
    """

    share: Share
    gradients: Mapping[nn.Parameter, tuple[Tensor, int]]
    marks: Mapping[nn.Parameter, tuple[int, int]]
    overwritten: Sequence[Overwritten]

    def is_right(self, has_options: Callable[[nn.Parameter], bool]) -> bool:
        """Whether the optimizer was called as it was assumed."""
        return all(
            is_same(*gradient, parameter.grad)
            and self.marks[parameter] == _mark_of(parameter)
            and has_options(parameter)
            for parameter, gradient in self.gradients.items()
        )


class _Order:
    """Something that the thread is to do, before anything else."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action
        self._error: BaseException | None = None
        self._done = threading.Event()

    def carry_out(self) -> None:
        """In the thread."""
        try:
            self._action()
        except BaseException as error:  # goes to who gave the order
            self._error = error
        self._done.set()

    def cancel(self) -> None:
        """There is nothing to be done."""
        self._done.set()

    def wait(self) -> None:
        """Blocks until it is done."""
        self._done.wait()
        if self._error is not None:
            raise self._error


class EarlyWork:
    """See [Note: early updates].

    Args:
        num_threads: intra-op threads.

    Attributes:
        is_mistaken: whether an assumption was wrong: then there are no early updates any more.
        num_kept, num_taken_back: weights, so far.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self.is_mistaken = False
        self._buffers = Buffers()
        self._kind = Early.NOTHING
        self._optimizer: Optimizer | None = None
        self._options: dict[nn.Parameter, Options] = {}
        self._wake = threading.Condition()
        self._offers: deque[tuple[Sequence[nn.Parameter], Collect]] = deque()
        self._orders: deque[_Order] = deque()
        self._begun: list[_Begun] = []
        self._norms: dict[int, tuple[Tensor, int, Tensor]] = {}
        self._is_stopped = True
        self.num_kept = 0
        self.num_taken_back = 0

    @property
    def is_open(self) -> bool:
        """Whether gradients are wanted."""
        return self._kind is not Early.NOTHING

    @contextlib.contextmanager
    def during(self, kind: Early, optimizer: Optimizer, state: GuardedState) -> Iterator[set[nn.Parameter]]:
        """Around the closure of a step of ``optimizer``; gives the weights that need no update when it is left."""
        kept: set[nn.Parameter] = set()
        if kind is Early.NOTHING or (kind is Early.UPDATES and self.is_mistaken):
            yield kept
            return
        options = options_of(optimizer)
        has_state = {p for p in options if state.lend(p) is not None or p in state.stateless}
        self._options = {p: o for p, o in options.items() if p in has_state and not _has_hooks(p)}
        self._optimizer, self._kind = optimizer, kind
        ready = threading.Event()
        arguments = ready, Surroundings.of_this_thread("cpu")
        thread = threading.Thread(target=self._run, args=arguments, name="roundpipe-early", daemon=True)
        try:
            self._start(thread, ready)
            yield kept
            self._order(lambda: self._check(options_of(optimizer), kept)).wait()
        finally:
            self._kind = Early.NOTHING
            if thread.ident is not None:
                self._order(self._finish).wait()
                thread.join()
            self._optimizer, self._options = None, {}
            self._norms.clear()

    def offer(self, masters: Sequence[nn.Parameter], collect: Collect) -> None:
        """The gradients of ``masters`` are complete.

        Args:
            collect: waits for them.
        """
        if self.is_open:
            with self._wake:
                self._offers.append((masters, collect))
                self._wake.notify()

    def take_back(self) -> None:
        """Undoes what has begun: it should not have, and nothing else will."""
        self._order(lambda: self._undo(is_mistake=True)).wait()

    def start_again(self) -> None:
        """Undoes what has begun: all gradients come once more."""
        self._order(lambda: self._undo(is_mistake=False)).wait()

    def stop_taking(self) -> None:
        """The training step is over: what has not begun waits for the call of the optimizer."""
        self._order(lambda: None).wait()

    def known_norm(self, gradient: Tensor) -> Tensor | None:
        """The 2-norm of ``gradient`` if it was taken early."""
        known = self._norms.get(gradient.data_ptr())
        return known[2] if known is not None and is_same(known[0], known[1], gradient) else None

    def set_aside(self, num_bytes: int) -> None:
        """So much memory on the host may be used for what is overwritten; none at first."""
        self._buffers.limit_bytes = num_bytes

    @property
    def host_bytes(self) -> int:
        """What of that is used."""
        return self._buffers.num_bytes

    # --- the thread ------------------------------------------------------------------------------------------------

    def _start(self, thread: threading.Thread, ready: threading.Event) -> None:
        before = torch.get_num_threads()
        self._is_stopped = False
        try:
            thread.start()
            ready.wait()
        finally:
            self._is_stopped = thread.ident is None  # no thread could be started
            torch.set_num_threads(before)  # the thread has set what new threads would begin with

    def _order(self, action: Callable[[], None]) -> _Order:
        """Lets the thread do this next; what was offered until now is not wanted any more."""
        order = _Order(action)
        with self._wake:
            if self._is_stopped:
                order.cancel()
            else:
                self._offers.clear()
                self._orders.append(order)
                self._wake.notify()
        return order

    def _run(self, ready: threading.Event, surroundings: Surroundings) -> None:
        torch.set_num_threads(self._num_threads)
        ready.set()
        with updating(), surroundings.entered(), torch.no_grad():
            while not self._is_stopped:
                self._next().carry_out()

    def _next(self) -> _Order:
        with self._wake:
            self._wake.wait_for(lambda: self._orders or self._is_enough())
            if self._orders:
                return self._orders.popleft()
            offers = [self._offers.popleft()]  # no more than a share, for which an order has to wait
            while self._offers and num_bytes_of([p for masters, _ in offers for p in masters]) < SHARE_BYTES:
                offers.append(self._offers.popleft())
        return _Order(lambda: self._take(offers))

    def _finish(self) -> None:
        try:
            self._undo(is_mistake=False)
        finally:
            with self._wake:
                self._is_stopped = True
                while self._orders:
                    self._orders.popleft().cancel()

    def _is_enough(self) -> bool:
        return num_bytes_of([p for masters, _ in self._offers for p in masters]) >= SHARE_BYTES

    def _take(self, offers: Sequence[tuple[Sequence[nn.Parameter], Collect]]) -> None:
        # What goes wrong here goes wrong again: for whoever needs the gradients, or when the optimizer is called.
        gradients = {p: g for _, collect in offers for p, g in collect().items() if g.layout is torch.strided}
        if self._kind is Early.NORMS:
            found = torch._foreach_norm(list(gradients.values()), 2.0) if gradients else ()
            for gradient, norm in zip(gradients.values(), found, strict=True):
                self._norms[gradient.data_ptr()] = gradient, gradient._version, norm
        elif not self.is_mistaken:
            self._update(gradients)

    def _update(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        optimizer = self._optimizer
        assert optimizer is not None
        state = optimizer.state
        assert isinstance(state, GuardedState)
        overwritten = {p: kept for p in gradients if (kept := self._kept_of(p, state)) is not None}
        if not overwritten:
            return
        used = {p: gradients[p] for p in overwritten}
        share = _EarlyShare(list(used), self.take_back)
        part = Part(optimizer, used, self._options, state)
        versions = {p: (gradient, gradient._version) for p, gradient in used.items()}
        marks = {p: _mark_of(p) for p in used}
        begun = _Begun(share, versions, marks, list(overwritten.values()))
        share.begin()
        for one in begun.overwritten:
            one.save()
        self._begun.append(begun)
        try:
            part.step()
        except BaseException:
            self._undo(is_mistake=True)
            raise

    def _kept_of(self, parameter: nn.Parameter, home: GuardedState) -> Overwritten | None:
        """What an update of ``parameter`` will overwrite; None if there is no memory left to keep it in, or the weight
        cannot be updated early for other reasons."""
        if type(parameter) is not nn.Parameter or parameter not in self._options:
            return None
        state = home.lend(parameter)
        if not can_be_restored(state):
            return None
        buffers = self._buffers.lend(changed_by_update(parameter, state))
        return None if buffers is None else Overwritten(parameter, home, buffers)

    def _undo(self, is_mistake: bool) -> None:
        self.is_mistaken |= is_mistake and bool(self._begun)
        while self._begun:
            self._restore(self._begun.pop())

    def _restore(self, begun: _Begun) -> None:
        for overwritten in begun.overwritten:
            overwritten.restore()
        self.num_taken_back += len(begun.gradients)
        self._let_go(begun)
        begun.share.end(is_undone=True)

    def _let_go(self, begun: _Begun) -> None:
        for overwritten in begun.overwritten:
            self._buffers.take_back(overwritten.buffers)

    def _check(self, now: Mapping[nn.Parameter, Options], kept: set[nn.Parameter]) -> None:
        """The optimizer was called: what of the assumptions is right."""
        equal: dict[tuple[int, int], bool] = {}

        def has_options(parameter: nn.Parameter) -> bool:
            if parameter not in now:
                return False
            pair = self._options[parameter], now[parameter]
            key = id(pair[0]), id(pair[1])
            if key not in equal:
                equal[key] = _are_equal(*pair)
            return equal[key]

        while self._begun:
            begun = self._begun.pop()
            with unwaited():
                is_right = begun.is_right(has_options)
            if not is_right:
                self.is_mistaken = True
                self._restore(begun)
                continue
            kept.update(begun.gradients)
            self.num_kept += len(begun.gradients)
            for parameter in begun.gradients:  # what is copied to devices was made of the old values
                torch.autograd.graph.increment_version(parameter)
            self._let_go(begun)
            begun.share.end()


def _has_hooks(parameter: nn.Parameter) -> bool:
    """Whether code of the user sees its gradient first, and may change it in ways that nobody notices."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def is_same(gradient: Tensor, version: int, other: Tensor | None) -> bool:
    """Whether ``other`` is the memory of ``gradient``, and nobody has written it since it had that version."""
    return (
        other is not None
        and other.data_ptr() == gradient.data_ptr()
        and (other.shape, other.stride(), other.dtype) == (gradient.shape, gradient.stride(), gradient.dtype)
        and other._version == version
    )


def _mark_of(parameter: nn.Parameter) -> tuple[int, int]:
    return parameter.data_ptr(), parameter._version


def _are_equal(options: Options, others: Options) -> bool:
    if options.keys() != others.keys():
        return False
    pairs = [(value, others[name]) for name, value in options.items()]
    return all(
        isinstance(b, Tensor) and torch.equal(a, b) if isinstance(a, Tensor) else type(a) is type(b) and bool(a == b)
        for a, b in pairs
    )
