"""Optimizer steps that run behind the pipeline, weight by weight.

[Note: overlapped updates]
The update of one weight by Adam or SGD needs nothing of the others. So ``optimizer.step`` only notes what is to be
done, and a thread does it in *buckets*: the weights of the units that the next forward needs first come first. The
next step begins meanwhile, and its uploads wait for the bucket that they read ([Note: parameter futures] in
:mod:`weights.futures`). So does everything else that looks at weights, gradients or optimizer state. What is computed
is what ``optimizer.step`` would have computed, by the same code: a :class:`Bucket` is an optimizer of the same class
with some of the weights, and with the options of their groups as they were when ``step`` was called.

This holds for optimizers whose update of a weight depends on that weight, its gradient and its state alone; see
:func:`why_not_separable`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_module

from ..common.attributes import attribute_set
from ..common.sizes import extent_of
from ..common.threads import Worker
from ..weights.events import tell
from ..weights.futures import ParameterFuture, Training, Update, can_be_pending, take_unseen, unwaited
from .buckets import Bucket, buckets_of, options_of
from .sharding import Shards
from .state import GuardedState, plain_state

_SEPARABLE = tuple(
    getattr(torch.optim, name)
    for name in (
        "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop",
        "Rprop", "SGD",
    )
    if hasattr(torch.optim, name)
)  # fmt: skip


def why_not_separable(optimizer: Optimizer) -> str | None:
    """Why the step of ``optimizer`` cannot be taken apart; None if it can.

    Optimizers of others can say that it can: a class attribute ``is_separable = True`` tells that the update of a
    parameter depends on it, its gradient, ``state[parameter]`` and the options of its group alone, and that ``step``
    reads them from ``self.param_groups`` and ``self.state``. Not so ASGD: it makes tensors of the default dtype in
    every step, which the next training step may change.
    """
    kind = type(optimizer)
    if kind not in _SEPARABLE and not getattr(kind, "is_separable", False):
        return f"{kind.__name__} is not known to update each parameter by itself"
    if kind not in _SEPARABLE and any(not isinstance(key, nn.Parameter) for key in list(plain_state(optimizer))):
        return f"{kind.__name__} keeps state that belongs to no parameter"
    hooks = (
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks,
        optimizer_module._global_optimizer_pre_hooks, optimizer_module._global_optimizer_post_hooks,
    )  # fmt: skip
    if any(hook is not refuse_plain_step for kind in hooks for hook in kind.values()):
        return f"hooks are registered on the step of {kind.__name__}"
    if _has_own_step(optimizer):
        return f"the step of {kind.__name__} has been replaced by another function"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return f"{kind.__name__} is differentiable"
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not can_be_pending(parameter):
                return f"a parameter of {kind.__name__} is a {type(parameter).__name__} on {parameter.device}"
    return None


def share_memory(weights: Iterable[nn.Parameter]) -> bool:
    """Whether the memory of two of ``weights`` on the host overlaps: then one would change while the other is read."""
    extents = []
    with unwaited():
        for weight in weights:
            if weight.device.type == "cpu" and weight.layout is torch.strided and (start := weight.data_ptr()):
                first, stop = extent_of(weight)
                extents.append((start, start + (stop - first) * weight.element_size()))
    return any(start < stop for (_, stop), (start, _) in pairwise(sorted(extents)))


def refuse_plain_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """A hook of optimizers whose step alone would update a part of the weights on each rank.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        f"{type(optimizer).__name__}.step was called past Lightning, or with arguments of its own, and with "
        "shard_optimizer=True each rank would update its own weights only: call step of self.optimizers(), without "
        "arguments"
    )


def _has_own_step(optimizer: Optimizer) -> bool:
    """Whether user code has put a ``step`` of its own on the object. Schedulers do so to count, and so does manual
    optimization here: those call what was there."""
    step = vars(optimizer).get("step")
    while step is not None:
        place = getattr(step, "__globals__", {}).get("__name__", "")
        if place != "torch.optim.lr_scheduler" and place.partition(".")[0] != __name__.partition(".")[0]:
            return getattr(step, "__func__", step) is not type(optimizer).step
        step = getattr(step, "__wrapped__", None)
    return False


class Updates:
    """Runs optimizer steps on a thread, one after the other; see [Note: overlapped updates].

    Its methods are for the thread that trains, but for those that wait, which are for any thread.

    Args:
        num_threads: intra-op threads of the updates.
        updating: is called with the weights when an update of them begins; gives what is called on its thread for each
            bucket that it has written, see :class:`Update`. None for nothing.
        shards: of the ranks; None if each updates all weights.
    """

    def __init__(
        self,
        num_threads: int,
        updating: Callable[[Collection[nn.Parameter]], Callable[[ParameterFuture], None]] | None = None,
        shards: Shards | None = None,
    ) -> None:
        self._worker = Worker(num_threads)
        self._updating = updating
        self._shards = shards
        self._training = Training()
        self._last: Update | None = None
        self._closing: Optimizer | None = None  # whose closure runs
        self._factor: Tensor | None = None

    @contextlib.contextmanager
    def overlapping(
        self,
        optimizer: Optimizer,
        order: Callable[[], Sequence[Iterable[nn.Parameter]]],
    ) -> Iterator[None]:
        """While open, ``optimizer.step`` calls its closure and leaves the update to the thread.

        Args:
            order: gives the weights in the order in which they are needed next, in groups that are needed together.
        """

        plain = optimizer.step

        def step(closure: Callable[[], Any] | None = None, **options: Any) -> Any:
            if options:  # of a class of the user: what they do is not known
                self.wait()
                return plain(closure, **options)
            result = None
            self._closing, self._factor = optimizer, None
            try:
                if closure is not None:
                    with torch.enable_grad():
                        result = closure()
            finally:
                self._closing = None
            fresh = self._without_state(optimizer)
            self.start(optimizer, order(), self._factor)
            if fresh:
                self._wait_for_state(optimizer, fresh)
            optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers ask for it
            return result

        with attribute_set(optimizer, "step", step):
            yield

    def multiplies(self, optimizer: Optimizer, factor: Callable[[list[Tensor]], Tensor | None]) -> bool:
        """Leaves a multiplication of all gradients of ``optimizer`` to its update, if that begins as soon as the
        caller's closure has returned; whether it does.

        Args:
            factor: gives it for these gradients; None if it has to be done in another way.
        """
        if self._closing is not optimizer or self._factor is not None:
            return False
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self._factor = factor(gradients)
        return self._factor is not None

    def start(
        self,
        optimizer: Optimizer,
        order: Sequence[Iterable[nn.Parameter]],
        factor: Tensor | None = None,
    ) -> None:
        """Begins an optimizer step; it comes after those that have begun already.

        Args:
            order: see :meth:`overlapping`.
            factor: a number that the gradients are multiplied by first.

        Raises:
            BaseException: what went wrong in one before.
            RankError: if the optimizer is sharded, and other ranks do not make this step.
        """
        self._training.check()
        state = self.guard(optimizer)
        options = options_of(optimizer)
        gradients = {p: g for p in options if (g := p.grad) is not None}
        shards = self._shards
        updated = list(gradients) if shards is None else shards.agree(options, gradients)
        if not updated:
            return
        finish = None if self._updating is None else self._updating(dict.fromkeys(updated))
        torch.autograd.graph.increment_version(updated)  # what is on devices was made of the old values

        def step_of(parameters: list[nn.Parameter]) -> Callable[[], None]:
            own = {p: gradients[p] for p in parameters}
            return Bucket(optimizer, own, options, state.plain, factor).step

        if shards is None:
            works = [(parameters, step_of(parameters)) for parameters in buckets_of(gradients, order)]
        else:
            works = shards.works(updated, step_of)
        update = Update(works, self._training, finish)
        try:
            self._worker.begin(update.run, "roundpipe-optimizer")
            self._last = update
            tell("update", [parameter for parameters, _ in works for parameter in parameters])
            update.begin()
        except BaseException:  # no thread could be started, or Ctrl-C
            update.cancel()
            raise

    def _without_state(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """The weights to be updated that have no state yet but may get some."""
        state = self.guard(optimizer)
        updated = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        return [p for p in updated if p not in state.plain and p not in state.stateless]

    def _wait_for_state(self, optimizer: Optimizer, fresh: list[nn.Parameter]) -> None:
        """The first update of weights is waited for: the state made for them depends on the default dtype, which
        the next step may change for the whole process. It comes in the order in which the optimizer makes it."""
        self.wait()
        state = self.guard(optimizer)
        made = {parameter: state.pop(parameter) for parameter in fresh if parameter in state}
        state.update(made)
        state.stateless.update(parameter for parameter in fresh if parameter not in made)

    def guard(self, optimizer: Optimizer) -> GuardedState:
        """The state of ``optimizer``, such that a look at it waits."""
        state = optimizer.state
        if not isinstance(state, GuardedState):
            state = optimizer.state = GuardedState(state, self._look_at_state)
        return state

    def _look_at_state(self) -> None:
        self.join()
        self._training.look()

    def wait(self) -> None:
        """Blocks until no update is under way; all weights are plain parameters then.

        Raises:
            BaseException: what went wrong in one, unless this is the tear-down after it.
        """
        self.join()
        take_unseen()
        self._training.check()

    def check(self) -> None:
        """Training goes on.

        Raises:
            BaseException: what went wrong in an update, if that is known already.
        """
        self._training.check()

    def join(self) -> None:
        """Blocks until no update is under way, whatever becomes of it."""
        if (last := self._last) is not None:  # another one may begin while several threads wait
            last.await_end()

    def close(self) -> None:
        """Ends the thread, after all updates."""
        self.join()
        self._worker.close()
