"""The loss between the pipeline, which has run its backward already, and Lightning, which will call it.

[Note: loss scaling]
``precision="16-mixed"`` multiplies the loss by a large number before the backward, so that small gradients do not
vanish in float16, and divides the gradients of the masters by it afterwards; a step whose gradients overflow is skipped
and the number made smaller. The pipeline runs the backward inside ``training_step``, before Lightning multiplies
anything, so it starts from the factor that Lightning is going to apply: the scale, divided by
``accumulate_grad_batches``. The gradients that wait behind the loss are scaled by it; when the real factor arrives, as
the gradient of the loss, what differs is multiplied in: nothing, unless the user does something of his own.

Steps are skipped as in plain training with the whole batch. There autocast computes the gradient of a weight in
float16, all rows at once; here the parts of the micro-batches are added up in float32, and the sum counts as
overflown where float16 could not hold it (``WorkingCopies.gradient_dtypes``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...lightning_packages import (
    STEP_OUTPUT,
    ClosureResult,
    MisconfigurationException,
    MixedPrecision,
    Precision,
    everywhere,
    kind_of,
    rank_zero_warn,
)
from ..batches.splitting import Batches

_ROUNDING = 0.01  # of a loss in bfloat16


class _MasterGradients(torch.autograd.Function):
    """The loss as Lightning sees it: its backward hands out gradients that the pipeline has computed.

    So scaling, accumulation, parameter hooks and user overrides of ``backward`` work as in plain Lightning.
    """

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, scale: float, is_final: bool, gradients: list[Tensor], *parameters: nn.Parameter
    ) -> Tensor:
        ctx.scale = scale
        ctx.is_final = is_final
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the gradients of this step were already taken: call backward once per training_step")
        factor = upstream.item() / ctx.scale
        if ctx.is_final:
            if abs(factor - 1.0) > _ROUNDING:
                raise MisconfigurationException(
                    f"the loss of this step is multiplied by {upstream.item():g} before its backward, and not by "
                    f"{ctx.scale:g} as Lightning does it: on several ranks, gradients that were accumulated have been "
                    "added already. Multiply the loss inside training_step"
                )
        elif factor != 1.0:
            gradients = [gradient.mul_(factor) for gradient in gradients]
        return (None, None, None, None, *gradients)


def hand_over(
    loss: Tensor, gradients: Mapping[nn.Parameter, Tensor], scale: float = 1.0, *, is_final: bool = False
) -> Tensor:
    """``loss`` (scalar, host) with ``gradients`` behind it, for :meth:`Tensor.backward`, once.

    Args:
        scale: by which the gradients were multiplied already, see :func:`expected_scale`.
        is_final: whether something is in them that nothing may be multiplied to any more.
    """
    if not gradients:
        return loss.requires_grad_()
    return cast(
        Tensor,
        _MasterGradients.apply(loss, scale, is_final, list(gradients.values()), *gradients),  # type: ignore[no-untyped-call]
    )


def loss_of(output: Any) -> Tensor | None:
    """The loss in what ``training_step`` returned, by Lightning's rules.

    Raises:
        MisconfigurationException: for anything else, as Lightning raises it; it lets a ``'loss'`` of any type pass.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if isinstance(loss, Tensor):
        return loss
    if output is None:
        return None
    if loss is None or not isinstance(output, Mapping):
        try:
            ClosureResult.from_training_step_output(output)
        except kind_of(None, MisconfigurationException) as error:  # of one package, and the Trainer may be of the other
            raise MisconfigurationException(str(error)) from None
    raise MisconfigurationException(
        f"training_step returned a dict whose 'loss' is of type {type(loss).__name__}: it must be a tensor"
    )


def merged_step(
    outputs: Sequence[Any],
    batches: Batches,
    gradients: Mapping[nn.Parameter, Tensor],
    scale: float,
    *,
    is_final: bool = False,
    must_go_on: bool = False,
) -> STEP_OUTPUT:
    """What ``training_step`` would have returned for the whole batch, with the gradients behind its loss.

    A micro-batch for which it returned None adds nothing; if there are no others, the step is skipped. One of weight
    zero (no label) may have a NaN loss: it does not take part.

    Args:
        scale, is_final: see :func:`hand_over`.
        must_go_on: whether other ranks may have gradients: then a step that would be skipped has a loss of zero.
    """
    shares = [
        loss.detach().cpu().reshape(()) * weight
        for loss, weight in zip(map(loss_of, outputs), batches.loss_weights, strict=True)
        if loss is not None and weight != 0.0
    ]
    if not shares:
        return hand_over(torch.zeros(()), gradients, scale, is_final=is_final) if must_go_on else None
    loss = hand_over(torch.stack(shares).sum(), gradients, scale, is_final=is_final)
    others = [
        ({name: value for name, value in output.items() if name != "loss"}, size, weight)
        for output, size, weight in zip(outputs, batches.sizes, batches.weights, strict=True)
        if isinstance(output, Mapping)
    ]
    return {**batches.changes.merged(*zip(*others, strict=True)), "loss": loss} if others else loss


def checked_precision(plugin: Precision, autocast_device: str) -> Precision:
    """``plugin``, for these devices: Lightning takes every accelerator but its own CPU one for CUDA.

    Raises:
        MisconfigurationException: if it is a class of the user's own for other devices.
    """
    if not isinstance(plugin, everywhere(MixedPrecision)) or plugin.device == autocast_device:
        return plugin
    if type(plugin) not in everywhere(MixedPrecision):
        raise MisconfigurationException(
            f"{type(plugin).__name__} is autocast for {plugin.device!r}, but the devices are {autocast_device!r} "
            f"devices, on which it would do nothing: make it with device={autocast_device!r}"
        )
    if autocast_device != "cpu":
        plugin.device = autocast_device
        if plugin.scaler is not None and not plugin.scaler.is_enabled():  # because there is no CUDA
            plugin.scaler = torch.amp.GradScaler("cpu")  # where the gradients are
        return plugin
    if plugin.precision == "16-mixed":
        rank_zero_warn("precision='16-mixed' is not supported on CPU devices: using 'bf16-mixed'")
    return type(plugin)("bf16-mixed", "cpu")


def expected_scale(plugin: Precision, accumulate_grad_batches: int, *, is_final: bool = False) -> float:
    """What the loss of a training step is going to be multiplied by before its backward, as far as it should be
    anticipated; see [Note: loss scaling]. 1 where nothing is scaled against underflow.

    Args:
        is_final: whether all of it is to be anticipated; see :func:`hand_over`.
    """
    scaler = plugin.scaler if isinstance(plugin, everywhere(MixedPrecision)) else None
    is_scaled = scaler is not None and scaler.is_enabled()
    if not is_scaled and not is_final:
        return 1.0
    scale = scaler.get_scale() if scaler is not None and is_scaled else 1.0
    # As a tensor, like the gradient that autograd will bring: equal to the last bit.
    return (torch.tensor(scale) / accumulate_grad_batches).item() or 1.0
