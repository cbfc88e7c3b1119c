"""What depends on whole batches and can be seen: one warning per run for each, with the remedy.

[Note: whole batches]
Most of what couples the samples of a batch cannot be noticed: a loss that ranks them looks like any other. These can:

- **batch norms** in training mode, which take their statistics from each micro-batch,
- **a loss that is NaN in some micro-batches only**, as a mean over labels is where a micro-batch has no label,
- **padding masks of** ``nn.TransformerEncoder`` in evaluation, on devices with memory of their own. There torch packs
  the sequences into a nested tensor, unless something watches its functions, as the function mode of user code does;
  and nested tensors could not travel.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..modules import ModuleScan
from ..notices import Notices

_FORWARD = inspect.signature(nn.TransformerEncoder.forward)


class WholeBatchHints:
    """Warns once for each of these; see [Note: whole batches].

    Args:
        scan: of the user's module.
        notices: for what is to be said once.
        has_copies: whether devices have memory of their own.
    """

    def __init__(self, scan: ModuleScan, notices: Notices, *, has_copies: bool) -> None:
        self._scan = scan
        self._notices = notices
        self._has_copies = has_copies

    def look_for_batch_norms(self, num_microbatches: int) -> None:
        """Before a training step with several micro-batches."""
        if self._scan.couples_rows:
            named = self._scan.named
            found = [(name, module) for name, module in named if isinstance(module, _BatchNorm) and module.training]
            (name, first), others = found[0], len(found) - 1
            self._notices.warn(
                "norms",
                f"the batch norm {name!r} ({type(first).__name__}{f', and {others} more' if others else ''}) is in "
                f"training mode, where it takes its statistics from each of the {num_microbatches} micro-batches, not "
                "from the whole batch, and updates its running statistics as often. num_microbatches=1 gives the "
                "results of plain Lightning, eval() keeps the statistics, and GroupNorm or LayerNorm need no batch",
            )

    def look_at_losses(self, losses: Iterable[Tensor | None], weights: Sequence[float]) -> None:
        """After a training step: the losses of its micro-batches (scalars), and what weighs them."""
        if len(weights) < 2 or "losses" in self._notices.given:
            return
        pairs = enumerate(zip(losses, weights, strict=True))
        values = {index: loss.item() for index, (loss, weight) in pairs if loss is not None and weight != 0.0}
        wrong = [index for index, value in values.items() if math.isnan(value)]
        if wrong and len(wrong) < len(values):
            self._notices.warn(
                "losses",
                f"the loss of micro-batch {wrong[0]} of {len(weights)} is NaN, and that of others is not. A mean over "
                "labels is NaN where a micro-batch has no label: RoundPipeStrategy(loss_weight='label_tokens'), "
                "'causal_label_tokens', or a function that counts what the loss is a mean over, leaves such "
                "micro-batches out; with num_microbatches=1 the step sees the whole batch",
            )

    @contextlib.contextmanager
    def watching_encoders(self) -> Iterator[None]:
        """Around the user's step on a micro-batch, while no other one runs."""
        if not self._has_copies or "encoders" in self._notices.given or not torch.backends.mha.get_fastpath_enabled():
            yield
            return
        encoders = {m: name for name, m in self._scan.named if isinstance(m, nn.TransformerEncoder)}

        def look(encoder: nn.TransformerEncoder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if _would_pack(encoder, _FORWARD.bind(encoder, *args, **kwargs).arguments):
                self._notices.warn(
                    "encoders",
                    f"the encoder {encoders[encoder]!r} (TransformerEncoder) gets a padding mask. Plain Lightning "
                    "packs the sequences then, which leaves zeros at padded positions. On devices with memory of their "
                    "own they are not packed, and these positions have other values: leave them out of losses and "
                    "metrics, or make the encoder with enable_nested_tensor=False, which gives the same everywhere",
                )

        with contextlib.ExitStack() as stack:
            for encoder in encoders:
                handle = encoder.register_forward_pre_hook(look, with_kwargs=True)
                stack.callback(handle.remove)
            yield


def _would_pack(encoder: nn.TransformerEncoder, given: dict[str, Any]) -> bool:
    """Whether plain torch would make a nested tensor, as far as that can be told before."""
    tracks = torch.is_grad_enabled() and any(weight.requires_grad for weight in encoder.layers[0].parameters())
    return (
        given.get("src_key_padding_mask") is not None
        and given.get("mask") is None
        and given["src"].dim() == 3
        and encoder.use_nested_tensor
        and not (encoder.layers[0].training or tracks or torch.is_autocast_enabled())
    )
