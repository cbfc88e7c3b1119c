"""Training steps that end before their backward, because nobody needs their gradients yet.

[Note: late gradients]
Of the batches whose gradients Lightning accumulates, only the last one is followed by a step of the optimizer. The
others may leave the rest of their backward to the next training step (see [Note: tails] in :mod:`engine.tail`), so that
the pipeline does not drain in between. Their loss is there when ``training_step`` returns. Its ``backward()`` only
notes the factor that arrives; what Lightning would have got then, it gets when the gradients have come: they are handed
out, scaled by that factor, in the order of the batches. Until then every trained parameter knows that its ``.grad`` is
not what it will be, and that the tail computes with its value ([Note: pending weights] in :mod:`engine.pending`):
whoever looks at either lets the tail come to its end. So does a fork.

With ``optimizer_overlap="stale"`` the same holds for batches that a step of the optimizer follows: the next training
step does not compute with what that step makes. Then the update itself waits for the gradients, and begins in the
middle of the next training step, when they have come. As nobody looks at ``.grad`` between there and ``zero_grad``,
it is left empty.

The backward of units runs their code again. It must find what the forward has found, so no step ends early where code
of the user runs between it and the next one: hooks of the module and of callbacks.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .engine.dispatch import StepAborted
from .engine.glue import GlueState, current
from .engine.late import ComingGradients
from .engine.pending import Share, can_be_pending, raise_unless_handled, unwaited
from .engine.protocol import Event
from .engine.runner import Engine, StepResult
from .in_between import is_left_after_this_batch, runs_between_batches
from .loss import hand_over, scaled, with_behind
from .overlap import OptimizerOverlap

# Waits are cut into pieces, so that a failure is noticed.
_RECHECK_S = 0.2
Contexts = Callable[[], contextlib.AbstractContextManager[Any]]


class LateGradients:
    """The gradients of one training step, and what is done with them; see [Note: late gradients].

    Args:
        scale: by which they are multiplied already.
        lacks_state: tells of weights whose first update they bring.
    """

    def __init__(self, scale: float, lacks_state: Callable[[nn.Parameter], bool]) -> None:
        self._scale = scale
        self._lacks_state = lacks_state
        self._factor: Tensor | None = None
        self._gradients: Mapping[nn.Parameter, Tensor] | None = None
        self._before: dict[nn.Parameter, Tensor] = {}
        self._total: dict[nn.Parameter, Tensor] = {}
        self._members: set[nn.Parameter] = set()  # whose update waits
        self._coming: ComingGradients | None = None
        self.arrived = threading.Event()
        self.are_apart = False

    def arrive(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        """The tail is over."""
        if self.arrived.is_set():
            return
        self._gradients = gradients
        if self._coming is not None and self._factor is not None:
            self._pass_on(self._coming, self._factor)
        self.arrived.set()

    def _pass_on(self, coming: ComingGradients, factor: Tensor) -> None:
        """To the update, those of its weights: together with what was in ``.grad`` when the optimizer was called."""
        assert self._gradients is not None
        found = dict(zip(self._gradients, scaled([*self._gradients.values()], factor, self._scale), strict=True))
        self._gradients = {p: gradient for p, gradient in found.items() if p not in self._members}
        self._total = dict(self._before)
        with torch.no_grad():
            for parameter, gradient in found.items():
                if parameter in self._members:
                    self._total[parameter] = _added(self._before.get(parameter), gradient, parameter)
        # The state that an optimizer makes depends on the default dtype, which belongs to the training step now.
        if self.are_apart and not any(map(self._lacks_state, self._total)):
            coming.arrive(self._total, are_apart=True)

    def ask(self, factor: Tensor) -> None:
        """``loss.backward()`` was called."""
        self._factor = factor

    @property
    def are_asked_for(self) -> bool:
        """Whether ``loss.backward()`` was called."""
        return self._factor is not None

    def expect(self, bring: Callable[[], None], parameters: Iterable[nn.Parameter]) -> ComingGradients:
        """For an update of ``parameters``, which waits for them, together with what is in ``.grad``."""
        if self._coming is None:
            self._coming = ComingGradients(bring)
            self._members = set(parameters)
            with unwaited():
                self._before = {p: p.grad for p in self._members if p.grad is not None}
        return self._coming

    def take(self) -> Mapping[nn.Parameter, Tensor]:
        """The gradients, as they have come; none if they are lost."""
        gradients, self._gradients = self._gradients, None
        return gradients or {}

    def settle(self) -> None:
        """The tail is over, or lost, and nothing runs: does what ``loss.backward()`` would have done.

        Without autograd: what has happened to parameters since (flags, hooks) does not concern these gradients.
        """
        if self._factor is None:
            return
        gradients, factor, coming = self.take(), self._factor, self._coming
        self._factor = self._coming = None
        with unwaited(), torch.no_grad():
            if coming is None:
                values = scaled([*gradients.values()], factor, self._scale)
                gradients = dict(zip(gradients, values, strict=True))
            for parameter, gradient in gradients.items():
                parameter.grad = _added(parameter.grad, gradient, parameter)
            for parameter, total in self._total.items():
                parameter.grad = None if self.are_apart else total
        if coming is not None and not coming.have_arrived:
            coming.arrive(self._total if self.arrived.is_set() else None, are_apart=self.are_apart)


def _added(known: Tensor | None, gradient: Tensor, parameter: nn.Parameter) -> Tensor:
    """As autograd adds up in ``.grad``."""
    if known is not None:
        return known + gradient if known.is_sparse or gradient.is_sparse else known.add_(gradient)
    if gradient.layout is not torch.strided or gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


class _TailShare(Share):
    """Trained parameters while there is a tail: their gradients are not complete, and who changes weights has to wait,
    for the backward computes with them. Weights that an update before is still at work on are kept by it."""

    def __init__(self, parameters: Sequence[nn.Parameter], finish: Callable[[], None]) -> None:
        super().__init__(parameters)
        self._finish = finish
        self._earlier: dict[nn.Parameter, Share] = {}

    def begin(self) -> None:
        self._earlier = self.take_over()

    def end(self, *, is_undone: bool = False) -> None:
        super().end(is_undone=is_undone)
        for parameter, share in self._earlier.items():
            share.keep(parameter)

    def _see(self, event: Event) -> None:
        pass

    def _await_end(self) -> None:
        self._finish()
        for share in self._earlier.values():
            share.wait()


class Tails:
    """The training steps of a strategy that end before their backward; see [Note: late gradients].

    Args:
        engine: runs them.
        contexts: around everything that runs parts of a training step.
    """

    def __init__(self, engine: Callable[[], Engine], contexts: Contexts) -> None:
        self._engine = engine
        self._contexts = contexts
        self._lock = threading.RLock()  # anybody may look at a gradient, on any thread
        self._last: LateGradients | None = None  # of the step that has a tail
        self._share: Share | None = None
        self._trained: list[nn.Parameter] = []
        self._error: BaseException | None = None  # of a tail, that the thread that trains may not know of
        self._runs: int | None = None  # thread that runs a training step, or what is left of one

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Around a training step: that of the batch before comes to its end in it."""
        self.check()
        with self._lock:
            last = self._last
            self._end_share()
            try:
                yield
            finally:
                if last is not None:
                    self._complete(last)

    @contextlib.contextmanager
    def attempt(self, forbid: Callable[[str], None]) -> Iterator[None]:
        """Around an attempt to run it.

        Args:
            forbid: called if it cannot be run again, with the reason.
        """
        last = self._last
        if last is not None:
            last.are_apart = True
        self._runs = threading.get_ident()
        try:
            yield
        except BaseException:
            if last is not None and not last.arrived.is_set():
                forbid("the backward of the batch before was still to be run")
            raise
        finally:
            self._runs = None

    def late(self, module: pl.LightningModule, scale: float, updates: OptimizerOverlap) -> LateGradients | None:
        """Takes the gradients of the training step that begins, if they may come late.

        Args:
            scale: by which they are going to be multiplied.
            updates: what is done with them.
        """
        if updates.is_off or not module.automatic_optimization:
            return None
        accumulates = module.trainer.fit_loop._should_accumulate()
        if not (updates.can_wait or accumulates) or is_left_after_this_batch(module.trainer):
            return None
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if runs_between_batches(module, steps=not accumulates) or not all(map(_may_be_late, trained)):
            return None
        self._trained = trained
        return LateGradients(scale, updates.lacks_state)

    def coming(self, optimizer: Optimizer) -> ComingGradients | None:
        """The gradients that a step of the optimizer has to wait for; None if all are there."""
        late = self._last
        if late is None or not late.are_asked_for:
            return None
        return late.expect(self.finish, (p for group in optimizer.param_groups for p in group["params"]))

    def begin(self, late: LateGradients) -> None:
        """The training step has a tail."""
        self._last = late

    def behind(self, loss: Tensor, result: StepResult, scale: float) -> Tensor:
        """``loss`` (scalar, host) with the gradients of its step behind it, for :meth:`Tensor.backward`, once.

        Args:
            scale: by which they are multiplied.
        """
        late = self._last
        if not result.has_tail or late is None:
            return hand_over(loss, result.gradients, scale)
        if not all(map(_may_be_late, self._trained)):  # the step has registered a hook
            self.finish()
            return hand_over(loss, late.take(), scale)

        def ask(factor: Tensor) -> tuple[None]:
            late.ask(factor.detach().clone())
            if self._last is late:
                self._share = _TailShare(self._trained, self.finish)
                self._share.begin()
            else:  # somebody has let them come already
                late.settle()
            return (None,)

        return with_behind(loss, ask, [torch.zeros((), requires_grad=True)])

    def check(self) -> None:
        """Training goes on, or comes to its end.

        Raises:
            BaseException: what has been raised in a tail, unless this is the tear-down after it.
        """
        error, self._error = self._error, None
        raise_unless_handled(error)

    def end(self) -> None:
        """The fit has ended: as :meth:`finish`, and :meth:`check`."""
        self.finish()
        self.check()

    @property
    def is_open(self) -> bool:
        """Whether the gradients of the last training step are still to come."""
        return self._last is not None

    def finish(self) -> None:
        """The gradients of the last training step are there.

        Raises:
            BaseException: what has been raised in its backward.
        """
        last = self._last
        if last is None:
            return
        if (state := current()) is not None:
            self._await(last, state)
            return
        if self._runs == threading.get_ident():  # a signal handler, which has interrupted that
            return
        with self._lock:
            if self._last is not last:
                return
            self._end_share()
            self._complete(last)

    @staticmethod
    def _await(last: LateGradients, state: GlueState) -> None:
        """For a micro-batch of the next training step, beside which the tail runs."""
        assert state.lock is not None
        with state.lock.released(state):
            while not last.arrived.wait(_RECHECK_S):
                if state.aborted():
                    raise StepAborted

    def _end_share(self) -> None:
        share, self._share = self._share, None
        if share is not None:
            share.end()

    def _complete(self, last: LateGradients) -> None:
        """Lets the tail come to its end, unless it has; then its gradients are handed out."""
        with torch.inference_mode(False), torch.enable_grad():
            self._runs = threading.get_ident()
            try:
                if not last.arrived.is_set():
                    last.are_apart = False
                    with self._contexts():
                        self._engine().finish_tail()
            except BaseException as error:
                self._error = error  # whoever has looked may not be the thread that trains
                raise
            finally:
                if self._last is last:
                    self._last = None
                last.settle()
                self._runs = None


def _may_be_late(parameter: nn.Parameter) -> bool:
    has_hooks = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    return not has_hooks and can_be_pending(parameter)
