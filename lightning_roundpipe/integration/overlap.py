"""Optimizer steps of Lightning that run behind the pipeline: when they do, and when they are waited for.

Clipping by norm leaves its multiplication to them: see [Note: clipping by norm] in :mod:`optimizer.clipping`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..common.attributes import LIGHTNING, attribute_set
from ..common.fingerprints import Versions
from ..common.sizes import num_bytes_of
from ..engine.runner import Engine
from ..lightning_packages import (
    MisconfigurationException,
    Precision,
    kind_of,
    pl,
    rank_zero_info,
    rank_zero_warn,
)
from ..optimizer.clipping import clip_factor
from ..optimizer.stale import StaleWeights
from ..optimizer.state import plain_state
from ..optimizer.updates import Updates, share_memory, why_not_separable
from ..options import RoundPipeOptions
from ..reporting.host_memory import trained_by
from ..weights.futures import ParameterFuture
from .sharding import Sharding, sharding_refused

# Less is updated before a thread has begun.
MIN_BYTES = 16 * 2**20


class OptimizerOverlap:
    """The optimizer steps of one ``fit``; see [Note: overlapped updates] in :mod:`optimizer.updates`.

    Args:
        num_threads: intra-op threads of the updates.
        engine: gives that of the fit, which knows in which order the next step needs the weights, and makes copies of
            them in low precision. Stale steps make theirs of snapshots ([Note: stale weights] in
            :mod:`optimizer.stale`).
        sharding: of the optimizers over ranks; None for none. Their steps are made on a thread in any case, and waited
            for at once if nothing overlaps.
    """

    def __init__(
        self,
        options: RoundPipeOptions,
        num_threads: int,
        engine: Callable[[], Engine],
        sharding: Sharding | None = None,
    ) -> None:
        self._is_off = options.optimizer_overlap == "off"
        self._sharding = sharding
        self._stale = StaleWeights() if options.optimizer_overlap == "stale" else None
        self._stale_after_steps = options.stale_after_steps

        def updating(weights: Collection[nn.Parameter]) -> Callable[[ParameterFuture], None]:
            return (self._stale or engine().working_copies).updating(weights)

        self._updates = Updates(num_threads, updating, None if sharding is None else sharding.shards)
        self._engine = engine
        self._module: pl.LightningModule | None = None
        self._is_scripted = False
        self._guarded: set[Optimizer] = set()
        self._refused: set[Optimizer] = set()

    def begin(self, module: pl.LightningModule, optimizers: Sequence[Optimizer]) -> StaleWeights | None:
        """The fit begins: the snapshots that will be taken of weights, None if none will be.

        Raises:
            MisconfigurationException: if weights are to be one update behind, or their optimizers to be sharded, and
                that cannot be done for this module.
        """
        if self._is_off and self._sharding is None:
            return None
        self._module = module
        self._is_scripted = any(isinstance(child, torch.jit.ScriptModule) for child in module.modules())
        if self._sharding is not None:
            reasons = [why_not for optimizer in optimizers if (why_not := self._why_not(optimizer)) is not None]
            if reasons:
                raise sharding_refused(reasons[0])
            self._sharding.begin()
        for optimizer in optimizers:  # before user code keeps a reference to the state of one
            if self._is_worth_it(optimizer) and self._why_not(optimizer) is None:
                self._guard(optimizer)
        if self._stale is not None:
            if (why_not := _why_not_stale(module, optimizers) or self._why_not(optimizers[0])) is not None:
                raise _refusal(why_not)
            after = self._stale_after_steps
            exact = f"After {after} exact optimizer steps" if after else "From now on"
            rank_zero_warn(
                f"optimizer_overlap='stale' trains with another algorithm than plain Lightning. {exact} (see "
                "stale_after_steps), gradients are computed with the weights from before the last update, one step too "
                "old. Training may converge worse, or not at all, above all with AdamW, high learning rates and few "
                "rows per batch: compare the losses with those of optimizer_overlap='exact'."
            )
        return self._stale

    @contextlib.contextmanager
    def computing(self, module: pl.LightningModule) -> Iterator[None]:
        """Around a training step of ``module``, which computes with weights that are stale if they are to be.

        Raises:
            MisconfigurationException: if the step has changed one of these.
        """
        if self._stale is None or module.trainer.global_step < self._stale_after_steps:
            yield
            return
        weights = [weight for optimizer in module.trainer.optimizers for weight in trained_by(optimizer)]
        with self._stale.computing(weights):
            versions = Versions((weight, weight) for weight in weights)
            yield
            changed = versions.written()
        if changed:
            name = next((name for name, weight in module.named_parameters() if weight is changed[0]), "")
            raise _refusal(f"training_step has changed the weight {name!r} in place, or rather a snapshot of it")

    @contextlib.contextmanager
    def stepping(self, optimizer: Optimizer) -> Iterator[None]:
        """Around a step of ``optimizer``, its closure included: the update itself may come later."""
        if not self._applies(optimizer):
            self._updates.wait()
            yield
            return
        assert self._module is not None
        overlapping = self._updates.overlapping(optimizer, lambda: self._engine().order_of("training_step"))
        with overlapping, clipped_by(self._updates, optimizer, self._module, self._sharding):
            yield
        trainer = self._module.trainer
        if self._is_off or trainer.is_last_batch or 0 < trainer.max_steps <= trainer.global_step + 1:
            # What comes now is no next step: exports, other trainers, new workers of data loaders.
            self._updates.wait()

    def check(self) -> None:
        """A step begins.

        Raises:
            BaseException: what went wrong in an update before.
        """
        self._updates.check()

    def _applies(self, optimizer: Optimizer) -> bool:
        if not self._is_worth_it(optimizer):
            return False
        why_not = self._why_not(optimizer)
        if why_not is None:
            self._guard(optimizer)
            return True
        if self._sharding is not None:
            raise sharding_refused(why_not)
        if self._stale is not None:
            raise _refusal(why_not)
        if optimizer not in self._refused:
            self._refused.add(optimizer)
            rank_zero_info(f"optimizer steps do not overlap with the next forward: {why_not}")
        return False

    def _is_worth_it(self, optimizer: Optimizer) -> bool:
        if self._sharding is not None or self._stale is not None:
            return True
        return not self._is_off and num_bytes_of(trained_by(optimizer)) >= MIN_BYTES

    def _why_not(self, optimizer: Optimizer) -> str | None:
        if self._is_scripted:  # what reads weights in C++ would not wait
            return "a part of the module is a torch.jit.ScriptModule"
        assert self._module is not None
        why_not = why_not_separable(optimizer)
        if why_not is None and share_memory(p for p in self._module.parameters() if not nn.parameter.is_lazy(p)):
            return "two parameters of the module share their memory"
        return why_not

    def _guard(self, optimizer: Optimizer) -> None:
        self._updates.guard(optimizer)
        self._guarded.add(optimizer)

    def wait(self) -> None:
        """Blocks until no update is under way.

        Raises:
            BaseException: what went wrong in one.
        """
        self._updates.wait()

    def finish(self) -> None:
        """The fit has ended: as :meth:`wait`, and the optimizers are as they were."""
        try:
            self.wait()
        finally:
            self._updates.close()
            for optimizer in self._guarded:
                optimizer.state = plain_state(optimizer)  # type: ignore[assignment]
            self._guarded.clear()
            if self._sharding is not None:
                self._sharding.finish()


def _no_engine() -> Engine:
    raise AssertionError("nothing overlaps")


NO_OVERLAP = OptimizerOverlap(RoundPipeOptions(optimizer_overlap="off"), 1, _no_engine)


def _why_not_stale(module: pl.LightningModule, optimizers: Sequence[Optimizer]) -> str | None:
    """Why the weights of training steps cannot be one update behind; None if they can."""
    if not module.automatic_optimization:
        return "with manual optimization, weights change in the middle of a training step"
    if len(optimizers) != 1:
        return f"configure_optimizers has returned {len(optimizers)} optimizers, and one is needed"
    weights = set(trained_by(optimizers[0]))
    for name, child in module.named_modules():
        is_renormed = isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.max_norm is not None
        if is_renormed and child.weight in weights:
            return f"the embedding {name!r} with its max_norm changes its weight in the forward"
    return None


def _refusal(why: str) -> MisconfigurationException:
    return MisconfigurationException(f"optimizer_overlap='stale' is not possible: {why}. Use optimizer_overlap='exact'")


_OF_PLUGIN = ("clip_grad_by_norm", "_clip_gradients")
_CLIPPING = ("configure_gradient_clipping", "clip_gradients")


@contextlib.contextmanager
def clipped_by(
    updates: Updates, optimizer: Optimizer, module: pl.LightningModule, sharding: Sharding | None = None
) -> Iterator[None]:
    """While open, Lightning's clipping by norm leaves the multiplication of the gradients of ``optimizer`` to its
    update; unless code of the user could look at them in between."""
    plugin = module.trainer.precision_plugin
    if _may_be_watched(module, plugin, None if sharding is None else sharding.clip_grad_by_norm):
        yield
        return
    plain, plain_by_norm = plugin._clip_gradients, plugin.clip_grad_by_norm
    num_threads = torch.get_num_threads()

    def clip_grad_by_norm(clipped: Optimizer, clip_val: float) -> None:
        def factor_of(gradients: list[Tensor]) -> Tensor | None:
            if sharding is not None:
                return sharding.clip_factor(optimizer, clip_val)
            return clip_factor(gradients, clip_val, num_threads)

        if not updates.multiplies(clipped, factor_of):
            plain_by_norm(clipped, clip_val)

    def clip_gradients(*args: Any, **kwargs: Any) -> None:
        # Lightning's last act before the update. Who clips in a hook may look at the gradients afterwards.
        with attribute_set(plugin, "clip_grad_by_norm", clip_grad_by_norm):
            plain(*args, **kwargs)

    with attribute_set(plugin, "_clip_gradients", clip_gradients):
        yield


def _may_be_watched(module: pl.LightningModule, plugin: Precision, ours: Callable[..., None] | None) -> bool:
    """Whether code that is not Lightning's own sees gradients that have been clipped, before the update begins.

    Args:
        ours: is in the place of the plugin's clipping by norm; None for nothing.
    """
    plain = kind_of(module, pl.LightningModule)
    overrides = any(getattr(type(module), name) is not getattr(plain, name) for name in _CLIPPING)
    patched = any(name in vars(module) for name in _CLIPPING)
    patched = patched or any(vars(plugin).get(name, ours) != ours for name in _OF_PLUGIN)
    return overrides or patched or type(plugin).__module__.split(".")[0] not in LIGHTNING
