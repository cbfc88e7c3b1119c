"""Training steps that end before their backward, because nobody needs their gradients yet.

[Note: late gradients]
Of the batches whose gradients Lightning accumulates, only the last one is followed by a step of the optimizer. The
others may leave the rest of their backward to the next training step (see [Note: tails] in :mod:`engine.tail`), so that
the pipeline does not drain in between. Their loss is there when ``training_step`` returns. Its ``backward()`` only
notes the factor that arrives; what Lightning would have got then, it gets when the gradients have come: they are handed
out, scaled by that factor, in the order of the batches. Until then every parameter knows that its ``.grad`` is not
what it will be ([Note: pending weights] in :mod:`engine.pending`), and whoever looks at it lets the tail come to its
end. So does a fork.

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
from typing import Any, cast

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .engine.dispatch import StepAborted
from .engine.glue import GlueState, current
from .engine.late import ComingGradients
from .engine.pending import Share, can_be_pending, unwaited
from .engine.protocol import Event
from .engine.runner import Engine, StepResult
from .in_between import runs_between_batches
from .loss import hand_over, scaled
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
        self._coming: ComingGradients | None = None
        self.arrived = threading.Event()
        self.are_apart = False

    def arrive(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        """The tail is over."""
        self._gradients = gradients
        self.arrived.set()
        if self._coming is None or self._factor is None:
            return
        total = {}
        with torch.no_grad():
            for parameter, gradient in zip(
                gradients, scaled([*gradients.values()], self._factor, self._scale), strict=True
            ):
                known = self._before.pop(parameter, None)
                total[parameter] = gradient if known is None else _sum(known, gradient)
        self._gradients = {**total, **self._before}
        # The state that an optimizer makes depends on the default dtype, which belongs to the training step now.
        if self.are_apart and not any(map(self._lacks_state, total)):
            self._coming.arrive(self._gradients, are_apart=True)

    def ask(self, factor: Tensor) -> None:
        """``loss.backward()`` was called."""
        self._factor = factor

    @property
    def are_asked_for(self) -> bool:
        """Whether ``loss.backward()`` was called."""
        return self._factor is not None

    def expect(self, bring: Callable[[], None], parameters: Iterable[nn.Parameter]) -> ComingGradients:
        """For an update that waits for them, together with what is in ``.grad``."""
        if self._coming is None:
            self._coming = ComingGradients(bring)
            with unwaited():
                self._before = {p: p.grad for p in parameters if p.grad is not None}
        return self._coming

    def settle(self) -> None:
        """The tail is over, or lost, and nothing runs: does what ``loss.backward()`` would have done."""
        gradients, factor, coming = self._gradients or {}, self._factor, self._coming
        self._gradients = self._factor = self._coming = None
        if factor is None:
            return
        if coming is None:
            if gradients:
                hand_over(torch.zeros_like(factor), gradients, self._scale).backward(factor)  # type: ignore[no-untyped-call]
            return
        with unwaited():
            for parameter, gradient in gradients.items():
                parameter.grad = None if self.are_apart else gradient
        if not coming.have_arrived:
            coming.arrive(gradients if self.arrived.is_set() else None, are_apart=self.are_apart)


def _sum(known: Tensor, gradient: Tensor) -> Tensor:
    """As autograd adds up in ``.grad``."""
    return known + gradient if known.is_sparse or gradient.is_sparse else known.add_(gradient)


class _LateLoss(torch.autograd.Function):
    """A loss whose gradients come later."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, anchor: Tensor, ask: Callable[[Tensor], None]) -> Tensor:
        ctx.ask = ask
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[None, None, None]:
        ask, ctx.ask = ctx.ask, None
        if ask is None:
            raise RuntimeError("the gradients of this step were already taken: call backward once per training_step")
        ask(upstream.detach().clone())
        return None, None, None


class _GradientShare(Share):
    """Parameters whose ``.grad`` is not complete. They themselves may be looked at, but for those that an update before
    is still at work on: it keeps them."""

    def __init__(self, parameters: Sequence[nn.Parameter], finish: Callable[[], None]) -> None:
        super().__init__(parameters)
        self._finish = finish
        self._earlier: dict[nn.Parameter, Share] = {}

    @property
    def owns_weights(self) -> bool:
        return any(not share.is_over for share in self._earlier.values())

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

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Around a training step: that of the batch before comes to its end in it."""
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
        try:
            yield
        except BaseException:
            if last is not None and not last.arrived.is_set():
                forbid("the backward of the batch before was still to be run")
            raise

    def late(self, module: pl.LightningModule, scale: float, updates: OptimizerOverlap) -> LateGradients | None:
        """Takes the gradients of the training step that begins, if they may come late.

        Args:
            scale: by which they are going to be multiplied.
            updates: what is done with them.
        """
        if updates.is_off or not module.automatic_optimization:
            return None
        if not (updates.can_wait or module.trainer.fit_loop._should_accumulate()):
            return None
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if runs_between_batches(module) or not all(map(_may_be_late, trained)):
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

        def ask(factor: Tensor) -> None:
            late.ask(factor)
            if self._last is late:
                self._share = _GradientShare(self._trained, self.finish)
                self._share.begin()
            else:  # somebody has let them come already
                late.settle()

        anchor = torch.zeros((), requires_grad=True)
        return cast(Tensor, _LateLoss.apply(loss, anchor, ask))  # type: ignore[no-untyped-call]

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
            try:
                if not last.arrived.is_set():
                    last.are_apart = False
                    with self._contexts():
                        self._engine().finish_tail()
            finally:
                if self._last is last:
                    self._last = None
                last.settle()


def _may_be_late(parameter: nn.Parameter) -> bool:
    has_hooks = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    return not has_hooks and can_be_pending(parameter)
