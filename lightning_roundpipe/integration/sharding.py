"""What Lightning does with gradients and optimizer state that are divided among ranks.

A rank has the gradients of its own weights alone ([Note: sharded optimizer] in :mod:`optimizer.sharding`). Three things
concern all of them, and so are made over ranks while a ``fit`` lasts: the norm by which Lightning clips, whether a loss
scaler has found an overflow, and the state in a checkpoint. ``clip_grad_norm_`` of torch would take the norm of what
this rank has, and is refused. Everything else about a gradient is its own weight's.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from ..common.attributes import attribute_set
from ..lightning_packages import MisconfigurationException, MixedPrecision, Precision, everywhere, kind_of, pl
from ..optimizer.clipping import norms
from ..optimizer.sharded_state import gathered_state
from ..optimizer.sharding import Shards
from ..optimizer.updates import refuse_plain_step
from ..ranks.group import RankGroup


class Sharding:
    """The sharded optimizers of one ``fit``, and after it, until the next one; for the thread of the Trainer.

    Args:
        module: that is trained.
        optimizers: gives those of the fit.

    Attributes:
        shards: which rank owns which weights.
    """

    def __init__(
        self, group: RankGroup, module: pl.LightningModule, optimizers: Callable[[], Sequence[Optimizer]]
    ) -> None:
        self._group = group
        self._module = module
        self._optimizers = optimizers
        self._undo = contextlib.ExitStack()
        self.shards = Shards(group, self._weights)

    def _weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        trained = {weight for optimizer in self._optimizers() for g in optimizer.param_groups for weight in g["params"]}
        return ((name, weight) for name, weight in self._module.named_parameters() if weight in trained)

    def begin(self) -> None:
        """The fit begins: its optimizers are known, and can be divided.

        Raises:
            MisconfigurationException: if the precision plugin is in the way.
        """
        plugin = self._module.trainer.precision_plugin
        if type(plugin).clip_grad_by_norm is not kind_of(plugin, Precision).clip_grad_by_norm:
            raise sharding_refused(
                f"{type(plugin).__name__} clips gradients in a way of its own, which would see a part of them"
            )
        self.shards.refresh()
        for optimizer in self._optimizers():
            for weight in [weight for group in optimizer.param_groups for weight in group["params"]]:
                if not self.shards.is_mine(weight):
                    optimizer.state.pop(weight, None)  # some make it before their first step
            self._undo.callback(optimizer.register_step_pre_hook(refuse_plain_step).remove)
        self._undo.enter_context(attribute_set(plugin, "clip_grad_by_norm", self.clip_grad_by_norm))
        # Looked up by clip_grad_norm_ in each call, under whatever name that was imported.
        self._undo.enter_context(attribute_set(clip_grad, "_get_total_norm", _refuse_clipping))
        scaler = plugin.scaler if isinstance(plugin, everywhere(MixedPrecision)) else None
        if scaler is not None:
            self._undo.enter_context(attribute_set(scaler, "_unscale_grads_", self._unscaling(scaler)))

    def finish(self) -> None:
        """The fit has ended."""
        self._undo.close()

    # --- gradients -----------------------------------------------------------------------------------------------

    def clip_factor(self, optimizer: Optimizer, max_norm: float) -> Tensor:
        """What the gradients of all ranks are to be multiplied by; a collective."""
        mine = math.hypot(*map(float, norms(self._gradients(optimizer), torch.get_num_threads())))
        rows = self._group.exchange([mine], "the norm of gradients")
        total = math.hypot(*(norm for (norm,) in rows))
        return torch.clamp(torch.tensor(max_norm / (total + 1e-6)), max=1.0)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """In the place of the precision plugin's own."""
        factor = self.clip_factor(optimizer, clip_val)
        with torch.no_grad():
            for gradient in self._gradients(optimizer):
                gradient.mul_(factor)

    def _gradients(self, optimizer: Optimizer) -> list[Tensor]:
        """Of this rank's weights. Those of others may have some from before they had an owner."""
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        return [weight.grad for weight in weights if self.shards.is_mine(weight) and weight.grad is not None]

    def _unscaling(self, scaler: Any) -> Callable[..., dict[torch.device, Tensor]]:
        """A step is skipped on all ranks if one has found an overflow."""

        def unscale_grads(*args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
            mine = type(scaler)._unscale_grads_(scaler, *args, **kwargs)
            counts = [float(bool(mine)), sum(float(found) for found in mine.values())]
            has_some, num_found = map(sum, zip(*self._group.exchange(counts, "overflows of gradients"), strict=True))
            return {torch.device("cpu"): torch.tensor(float(num_found > 0))} if has_some else {}

        return unscale_grads

    # --- checkpoints ---------------------------------------------------------------------------------------------

    def state_of(self, optimizer: Optimizer) -> dict[str, Any]:
        """For a checkpoint: of all ranks on rank 0, elsewhere of this one; a collective."""
        number = next((i for i, one in enumerate(self._optimizers()) if one is optimizer), 0)
        return gathered_state(optimizer, self.shards, f"the state of {type(optimizer).__name__} {number}")


def _refuse_clipping(*args: Any, **kwargs: Any) -> Tensor:
    raise MisconfigurationException(
        "with shard_optimizer=True a rank has the gradients of its own weights alone, and "
        "torch.nn.utils.clip_grad_norm_ would clip by their norm: use Trainer(gradient_clip_val=...), or "
        "self.clip_gradients(optimizer, gradient_clip_val=..., gradient_clip_algorithm='norm'), which take that of all"
    )


def sharding_refused(why: str) -> MisconfigurationException:
    """The error that says so."""
    return MisconfigurationException(f"shard_optimizer=True is not possible: {why}. Leave the option out")
