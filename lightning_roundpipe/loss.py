"""The loss between the pipeline, which has run its backward already, and Lightning, which will call it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn


class _MasterGradients(torch.autograd.Function):
    """The loss as Lightning sees it: its backward hands out gradients that the pipeline has computed.

    So scaling, accumulation, parameter hooks and user overrides of ``backward`` work as in plain Lightning.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], *parameters: nn.Parameter) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the gradients of this step were already taken: call backward once per training_step")
        if upstream.item() != 1.0:
            gradients = [gradient.mul_(upstream.to(gradient.dtype)) for gradient in gradients]
        return (None, None, *gradients)


def hand_over(loss: Tensor, gradients: Mapping[nn.Parameter, Tensor]) -> Tensor:
    """``loss`` (scalar, host) with ``gradients`` behind it, for :meth:`Tensor.backward`, once."""
    if not gradients:
        return loss.requires_grad_()
    return cast(Tensor, _MasterGradients.apply(loss, list(gradients.values()), *gradients))  # type: ignore[no-untyped-call]


def loss_of(output: Any) -> Tensor | None:
    """The loss in what ``training_step`` returned, by Lightning's rules."""
    if isinstance(output, Mapping):
        if "loss" not in output:
            raise MisconfigurationException("training_step returned a dict without the key 'loss'")
        output = output["loss"]
    if output is None or isinstance(output, Tensor):
        return output
    raise MisconfigurationException(
        f"training_step returned {type(output).__name__}: return a loss tensor, a dict with 'loss', or None"
    )
