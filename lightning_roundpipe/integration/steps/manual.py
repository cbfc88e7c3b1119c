"""Manual optimization: the calls of ``training_step`` that concern the whole batch are made once.

[Note: manual optimization]
The micro-batches of a step run ``training_step`` side by side. What it does for the whole batch, they do together, see
[Note: barriers] in :mod:`engine.barrier`:

- ``manual_backward``: each micro-batch runs its own backward. What has come together waits behind the loss of the
  whole batch, and the call is made with that one, so that hooks, loss scaling and accumulation are plain Lightning's.
  ``loss.backward()`` does the same, if a unit has made the loss; as in plain Lightning it has no hooks and no scaling.
- ``step`` of optimizers and schedulers, ``toggle_optimizer``, ``clip_gradients`` and the like: the first micro-batch's
  call, on the thread of the Trainer. A closure is called by all micro-batches; its result is their weighted mean.
- So are ``first_step`` and ``second_step``, the halves of the step of an optimizer like SAM.
- So are ``step`` and the like of optimizers, schedulers and ``GradScaler`` objects that are attributes of the module,
  but not from ``configure_optimizers``; and of other objects that hold an optimizer and no module, and whose ``step``
  has no parameters: those that set a learning rate by themselves.
- ``zero_grad`` is deferred to the next barrier: it often stands between a forward and its backward, and to stop there
  would cut the step in two. A micro-batch that is alone need not wait, and may write gradients of its own then.

The methods are replaced on the objects, while a training step runs, and do what they always did on other threads.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ...autograd.recompute import reached_cut
from ...common.attributes import attribute_set
from ...engine.barrier import Barrier, Collective, meet
from ...lightning_packages import MisconfigurationException, pl
from ...usercode.lock import current
from ..batches.splitting import Batches
from .log_merging import weighted_mean
from .loss import hand_over
from .modules import ModuleScan
from .ranks import RankSteps

# Methods and functions that concern the whole batch.
_OPTIMIZER_METHODS = ("step", "zero_grad")
_SCHEDULER_METHODS = ("step",)
_HALF_STEPS = ("first_step", "second_step")
_SCALER_METHODS = ("unscale_", "step", "update")
_MODULE_METHODS = ("toggle_optimizer", "untoggle_optimizer", "clip_gradients")
_CLIP_FUNCTIONS = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")
_OWN_KINDS: tuple[tuple[tuple[type, ...], tuple[str, ...]], ...] = (
    ((LRScheduler, ReduceLROnPlateau), _SCHEDULER_METHODS),
    ((torch.amp.GradScaler,), _SCALER_METHODS),
)
_MAX_ENTRIES = 64  # of lists and dicts that are opened; longer ones hold data

_Followed = tuple[Any, tuple[str, ...], tuple[Hashable, ...]]


class ManualOptimization:
    """The barriers of one training step; see [Note: manual optimization].

    Args:
        holding: entered while something is done for the whole batch.
        wait: blocks until no update reads gradients any more.
        ranks: whose gradients are added up.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        scan: ModuleScan,
        batches: Batches,
        holding: Callable[[], contextlib.AbstractContextManager[None]],
        wait: Callable[[], None],
        ranks: RankSteps,
    ) -> None:
        self._module = module
        self._scan = scan
        self._loss_weights = batches.loss_weights
        self._weights = batches.weights
        self._holding = holding
        self._wait = wait
        self._ranks = ranks
        self._share = ranks.share_of(batches)

    def backward(
        self,
        loss: Tensor,
        scale: float,
        whole: Callable[[Tensor, Mapping[nn.Parameter, Tensor]], None],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Tensor:
        """``manual_backward`` of one micro-batch.

        Args:
            scale: by which gradients are to be multiplied.
            whole: called once, with the loss of the batch (scalar, host) and the gradients that belong to it.

        Raises:
            MisconfigurationException: for arguments that cannot be followed through units.
        """
        options = dict(zip(("gradient", "retain_graph", "create_graph", "inputs"), args, strict=False)) | kwargs
        _check_backward(loss, options)
        state = current()
        assert state is not None
        share = self._loss_weights[state.index] * self._share
        is_blocked = self._ranks.is_blocked

        def perform(barrier: Barrier) -> None:
            self._wait()  # gradients are added to in place
            parts = [value * w for value, w in zip(barrier.values, self._loss_weights, strict=True) if w != 0.0]
            total = torch.stack(parts).sum() if parts else barrier.values[0]
            with self._holding():
                whole(total, self._ranks.add_up(barrier.gradients, is_blocked=is_blocked))

        value = loss.detach().to("cpu").reshape(())
        collective = Collective("manual_backward", "manual_backward", perform, value)
        meet(collective, [(loss, share * scale)], retain_graph=bool(options.get("retain_graph")))
        return loss

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """While open, calls that micro-batches make for the whole batch are made together."""
        with self._backward_followed(), contextlib.ExitStack() as stack:
            for owner, names, key in methods_for_the_batch(self._module, self._scan):
                for name in names:
                    stack.enter_context(attribute_set(owner, name, self._replacement(getattr(owner, name), name, key)))
            yield

    @contextlib.contextmanager
    def _backward_followed(self) -> Iterator[None]:
        """While open, ``loss.backward()`` of a micro-batch goes through units."""
        original: Callable[..., None] = Tensor.backward

        @functools.wraps(original)
        def backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
            if current() is None or (loss.requires_grad and reached_cut([loss]) is None):
                original(loss, *args, **kwargs)
                return

            def whole(total: Tensor, gradients: Mapping[nn.Parameter, Tensor]) -> None:
                original(hand_over(total, gradients), *args, **kwargs)

            self.backward(loss, 1.0, whole, args, kwargs)

        setattr(Tensor, "backward", backward)  # noqa: B010  # to a type checker methods are constant
        try:
            yield
        finally:
            setattr(Tensor, "backward", original)  # noqa: B010

    def _replacement(self, original: Callable[..., Any], name: str, key: tuple[Hashable, ...]) -> Callable[..., Any]:
        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            if name == "zero_grad" and len(self._weights) == 1 and current() is not None:
                self._wait()
                return original(*args, **kwargs)
            num_args = len(args)
            args, kwargs, closure = _without_closure(args, kwargs)

            def with_closure(closure: Callable[[], Any]) -> Any:
                is_first = len(args) < num_args
                return original(closure, *args, **kwargs) if is_first else original(*args, **kwargs, closure=closure)

            def perform(barrier: Barrier) -> Any:
                if closure is None:
                    by_position, by_name = zip(*barrier.values, strict=True)
                    merged = [self._merged(list(values)) for values in zip(*by_position, strict=True)]
                    named = {key: self._merged([given[key] for given in by_name]) for key in kwargs}
                    with self._holding():
                        return original(*merged, **named)
                with contextlib.ExitStack() as held:
                    held.enter_context(self._holding())

                    def call_closures() -> Any:
                        held.close()
                        values = barrier.call_closures()
                        held.enter_context(self._holding())
                        return self._merged(values)

                    return with_closure(call_closures)

            collective = Collective(
                f"{key[0]}.{name}", (name, *key), perform, (args, kwargs), closure, is_deferred=name == "zero_grad"
            )
            has_met, result = meet(collective)
            if has_met:
                return result
            return original(*args, **kwargs) if closure is None else with_closure(closure)

        return method

    def _merged(self, values: list[Any]) -> Any:
        """What micro-batches give a call, or what their closures give, as one for the whole batch gives it: the mean of
        scalars, otherwise what the first one gives."""
        if any(value is not values[0] for value in values):
            if all(isinstance(value, Tensor) and value.numel() == 1 for value in values):
                return weighted_mean(torch.stack([v.detach().cpu().reshape(()) for v in values]), self._weights)
            if all(isinstance(value, float) for value in values):
                return weighted_mean(torch.tensor(values, dtype=torch.float64), self._weights).item()
        return values[0]


def methods_for_the_batch(root: pl.LightningModule, scan: ModuleScan) -> Iterator[_Followed]:
    """All that a step may call: (object, its methods that concern the whole batch, what tells it from others)."""
    strategy = root.trainer.strategy
    schedulers = [config.scheduler for config in strategy.lr_scheduler_configs]
    for index, optimizer in enumerate(strategy.optimizers):
        for owner in (optimizer, *strategy._lightning_optimizers[index : index + 1]):
            yield owner, _methods_of(optimizer), (type(optimizer).__name__, index)
    for index, scheduler in enumerate(schedulers):
        yield scheduler, _SCHEDULER_METHODS, (type(scheduler).__name__, index)
    known = {id(one) for one in (*strategy.optimizers, *schedulers)}
    for path, module in scan.lightning_modules:
        yield module, _MODULE_METHODS, (type(module).__name__,)
        yield from _own_helpers(path, module, known)
    for place in (clip_grad, torch.nn.utils):
        yield place, tuple(name for name in _CLIP_FUNCTIONS if hasattr(place, name)), ("torch.nn.utils",)


def _own_helpers(path: str, module: pl.LightningModule, known: set[int]) -> Iterator[_Followed]:
    """Optimizers and objects around one, schedulers, gradient scalers: attributes of a module, alone or in lists and
    dicts.

    Args:
        known: ids of objects to be left out; those that are found are added.
    """
    for name, value in vars(module).items():
        entries = (value,)
        if type(value) in (list, tuple, dict) and len(value) <= _MAX_ENTRIES:
            entries = tuple(value.values() if type(value) is dict else value)
        for index, entry in enumerate(entries):
            if (methods := _methods_of(entry)) and id(entry) not in known:
                known.add(id(entry))
                yield entry, methods, (type(entry).__name__, f"{path}.{name}[{index}]")


def _methods_of(helper: Any) -> tuple[str, ...]:
    """The methods of an optimizer, or another object, that concern the whole batch; see [Note: manual optimization]."""
    if isinstance(helper, torch.optim.Optimizer):
        return (*_OPTIMIZER_METHODS, *(name for name in _HALF_STEPS if hasattr(helper, name)))
    for kinds, names in _OWN_KINDS:
        if isinstance(helper, kinds):
            return names
    return tuple(name for name in _OPTIMIZER_METHODS if hasattr(helper, name)) if _is_around_optimizer(helper) else ()


def _is_around_optimizer(helper: Any) -> bool:
    """Whether an object holds an optimizer and no module, and has a ``step`` without parameters."""
    held = () if isinstance(helper, nn.Module) else getattr(helper, "__dict__", {}).values()
    if not any(isinstance(one, torch.optim.Optimizer) for one in held):
        return False
    step = getattr(helper, "step", None)
    has_none = isinstance(step, MethodType) and not inspect.signature(step).parameters
    return has_none and not any(isinstance(one, nn.Module) for one in held)


def _without_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], Callable[[], Any] | None]:
    """The arguments of ``optimizer.step`` or another method without the closure, and the closure."""
    if args and callable(args[0]) and not isinstance(args[0], nn.Module):
        return args[1:], kwargs, cast(Callable[[], Any], args[0])
    rest = {key: value for key, value in kwargs.items() if key != "closure"}
    closure = kwargs.get("closure")
    return (args, rest, closure) if callable(closure) else (args, kwargs, None)


def _check_backward(loss: Tensor, options: Mapping[str, Any]) -> None:
    if options.get("create_graph"):
        raise MisconfigurationException(
            "manual_backward(create_graph=True) needs the graph of the whole model, which strategy='roundpipe' cuts at "
            "every unit: train this module with strategy='auto'"
        )
    if options.get("gradient") is not None:
        raise MisconfigurationException(
            f"manual_backward(gradient=...) is not supported by strategy='roundpipe' (loss of shape "
            f"{tuple(loss.shape)}): reduce the loss to a scalar, for instance (loss * gradient).sum()"
        )
    if loss.numel() != 1:
        raise MisconfigurationException(
            f"manual_backward got a loss of shape {tuple(loss.shape)}: it must be a scalar, for instance its mean"
        )
    inputs = options.get("inputs")
    for x in [inputs] if isinstance(inputs, Tensor) else inputs or ():
        if not isinstance(x, nn.Parameter):
            raise MisconfigurationException(
                f"manual_backward(inputs=...) names a tensor of shape {tuple(x.shape)} that is no parameter: with "
                "strategy='roundpipe' it may name parameters of the module only"
            )
