"""What the thread of a micro-batch does: the user's function, and the backward of its loss."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..autograd.recompute import check_escape
from ..common.threads import Surroundings, Worker
from ..usercode.implicit_transfers import ImplicitTransfers
from ..usercode.lock import UserCodeLock, entered
from ..usercode.loose_parameters import LooseParameters
from ..usercode.outputs import Results
from .requests import StepRequest
from .walk import Walk


@dataclass
class MicrobatchThreads:
    """The threads of one step.

    Attributes:
        outputs: results of the user's function, by micro-batch.
    """

    request: StepRequest
    lock: UserCodeLock
    loose_parameters: LooseParameters
    leaf_names: Callable[[], dict[int, str]]
    outputs: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._surroundings = Surroundings.of_this_thread(self.request.autocast_device)

    def begin(self, worker: Worker, walk: Walk, fail: Callable[[BaseException], None]) -> None:
        """Lets ``worker`` run a micro-batch, in a copy of the caller's context.

        Args:
            fail: is told of every error: it must reach the thread that runs the step.
        """
        work = functools.partial(contextvars.copy_context().run, self._run, walk, fail)
        worker.begin(work, f"roundpipe-microbatch-{walk.index}")

    def _run(self, walk: Walk, fail: Callable[[BaseException], None]) -> None:
        try:
            with entered(walk.state), self._surroundings.entered(), self._implicit_transfers(walk):
                try:
                    self.lock.acquire(walk.state)
                    results, roots = self._forward(walk)
                    if roots:
                        self.lock.release(walk.state)
                        with self._surroundings.in_backward():
                            walk.backward(roots)
                finally:
                    walk.finish()
                self.outputs[walk.index] = results.arrive()
        except BaseException as error:  # every error must reach the caller's thread, interrupts included
            fail(error)
        finally:
            walk.attendance.end()

    def _implicit_transfers(self, walk: Walk) -> contextlib.AbstractContextManager[Any]:
        if walk.device.aliases_host:
            return contextlib.nullcontext()
        return ImplicitTransfers(lambda: walk.device, self.loose_parameters, walk.is_flushing)

    def _forward(self, walk: Walk) -> tuple[Results, list[tuple[Tensor, Tensor]]]:
        """The user's step on one micro-batch: (its results, what to run backward from: tensors, their gradients).

        Nothing else may hold the graph of the loss, so that it dies during the backward: the logits hang on it.
        """
        request = self.request
        output = request.function(request.microbatches[walk.index])
        loss = None if request.loss_of is None else request.loss_of(output)
        results = Results(output, walk.owner_of)
        share = request.weights[walk.index]
        return results, [] if loss is None or share == 0.0 else [self.root(walk, loss, share)]

    def root(self, walk: Walk, loss: Tensor, share: float) -> tuple[Tensor, Tensor]:
        """A loss to run backward from, and its gradient."""
        if loss.numel() != 1:
            raise ValueError(
                f"training_step has a loss of shape {tuple(loss.shape)}: it must be a scalar, for instance its mean"
            )
        if not loss.requires_grad:
            raise RuntimeError(
                "the loss of training_step does not require a gradient: it does not depend on a trainable parameter, "
                "or was detached on the way, as what an attribute of the module holds is when a step ends"
            )
        if walk.shared.plan.recording:
            check_escape([loss.grad_fn, *walk.user_code_nodes()], self.leaf_names())
        return loss, torch.full_like(loss, share)
