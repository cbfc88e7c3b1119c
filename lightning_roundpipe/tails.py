"""Training steps that end before their backward, because nobody needs their gradients yet.

[Note: late gradients]
Of the batches whose gradients Lightning accumulates, only the last one is followed by a step of the optimizer. The
others may leave the rest of their backward to the next training step (see [Note: tails] in :mod:`engine.tail`), so that
the pipeline does not drain in between. Their loss is there when ``training_step`` returns. Its ``backward()`` only
notes the factor that arrives; what Lightning would have got then, it gets when the gradients have come: they are handed
out, scaled by that factor, in the order of the batches. Until then every parameter knows that its ``.grad`` is not
what it will be ([Note: pending weights] in :mod:`engine.pending`), and whoever looks at it lets the tail come to its
end. So does a fork.

The backward of units runs their code again. It must find what the forward has found, so no step ends early where code
of the user runs between it and the next one: hooks of the module and of callbacks.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from .engine.pending import Share, can_be_pending
from .engine.runner import Engine
from .in_between import runs_between_batches
from .loss import hand_over

Contexts = Callable[[], contextlib.AbstractContextManager[Any]]


class LateGradients:
    """The gradients of one training step, and what its loss was multiplied by; see [Note: late gradients].

    Args:
        scale: by which the gradients are multiplied already.
    """

    def __init__(self, scale: float) -> None:
        self._scale = scale
        self._factor: Tensor | None = None
        self._gradients: Mapping[nn.Parameter, Tensor] | None = None

    @property
    def have_arrived(self) -> bool:
        """Whether the tail is over."""
        return self._gradients is not None

    def arrive(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        """The tail is over."""
        self._gradients = gradients

    def ask(self, factor: Tensor) -> None:
        """``loss.backward()`` was called."""
        self._factor = factor

    def hand_out(self) -> None:
        """Does what ``loss.backward()`` would have done, if it was called."""
        gradients, factor, self._factor = self._gradients, self._factor, None
        if gradients and factor is not None:
            hand_over(torch.zeros_like(factor), gradients, self._scale).backward(factor)  # type: ignore[no-untyped-call]


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
    """Parameters whose ``.grad`` is not complete; they themselves may be looked at."""

    owns_weights = False

    def __init__(self, parameters: Sequence[nn.Parameter], finish: Callable[[], None]) -> None:
        super().__init__(parameters)
        self._await_end = finish  # type: ignore[method-assign]


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
                    self._settle(last)

    @contextlib.contextmanager
    def attempt(self, forbid: Callable[[str], None]) -> Iterator[None]:
        """Around an attempt to run it.

        Args:
            forbid: called if it cannot be run again, with the reason.
        """
        last = self._last
        try:
            yield
        except BaseException:
            if last is not None and not last.have_arrived:
                forbid("the backward of the batch before was still to be run")
            raise

    def late(self, module: pl.LightningModule, scale: float) -> LateGradients | None:
        """Takes the gradients of the training step that begins, if they may come late.

        Args:
            scale: by which they are going to be multiplied.
        """
        if not module.automatic_optimization or not module.trainer.fit_loop._should_accumulate():
            return None
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if runs_between_batches(module) or not all(map(_may_be_late, trained)):
            return None
        return LateGradients(scale)

    def begin(self, late: LateGradients) -> None:
        """The training step has a tail."""
        self._last = late

    def behind(self, loss: Tensor, module: nn.Module) -> Tensor:
        """``loss`` (scalar, host) of the step that has a tail, for :meth:`Tensor.backward`, once."""
        late = self._last
        assert late is not None

        def ask(factor: Tensor) -> None:
            late.ask(factor)
            if self._last is not late:
                late.hand_out()
                return
            trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
            self._share = _GradientShare(trained, self.finish)
            self._share.begin()

        anchor = torch.zeros((), requires_grad=True)
        return cast(Tensor, _LateLoss.apply(loss, anchor, ask))  # type: ignore[no-untyped-call]

    def finish(self) -> None:
        """The gradients of the last training step are there.

        Raises:
            BaseException: what has been raised in its backward.
        """
        if self._last is None:
            return
        with self._lock:
            last = self._last
            if last is None:
                return
            self._end_share()
            try:
                with torch.inference_mode(False), torch.enable_grad(), self._contexts():
                    self._engine().finish_tail()
            finally:
                self._settle(last)

    def _end_share(self) -> None:
        share, self._share = self._share, None
        if share is not None:
            share.end()

    def _settle(self, last: LateGradients) -> None:
        if self._last is last:
            self._last = None
        with torch.inference_mode(False), torch.enable_grad():
            last.hand_out()


def _may_be_late(parameter: nn.Parameter) -> bool:
    has_hooks = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    return not has_hooks and can_be_pending(parameter)
