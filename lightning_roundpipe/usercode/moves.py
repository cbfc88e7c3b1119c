"""Moves of tensors between devices that user code implies, as part of the autograd graph.

[Note: moves]
What user code uses on another device than where it is (labels, a residual, ``.to(...)``) goes the ways of activations,
so that no copy waits until a device has computed all that it was given. From one device to another it goes through the
host, so that the first does not wait for what the second has yet to compute::

    forward      h (device 0) --d2h--> host --h2d--> h' (device 1)     device 1 waits for the upload, no thread does
    backward     gradient     <--h2d-- host <--d2h-- gradient          the same, on the thread of autograd

What comes to the host has to be waited for: in the forward as the caller says. In the backward that would hold up the
thread of autograd, which all micro-batches share. So it only begins the download, and the wait is a node of its own,
which is on the host and therefore runs on the thread that has begun the backward::

    backward     leaf (host) <-- [landing: waits] <-- [move: begins the download] <-- gradient (device)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..common.graphs import EngineFunction
from ..devices.offload import TravellingActivations
from ..devices.transfer import Edge, Transfer


def moved(
    tensor: Tensor,
    target: torch.device,
    activations: TravellingActivations,
    what: str,
    *,
    is_shared: bool = False,
    await_download: Callable[[Transfer], None] = Transfer.await_done,
) -> Tensor:
    """``tensor`` on ``target``, which is another device, or the host, as part of the graph; see [Note: moves].

    Args:
        activations: of the micro-batch.
        what: it is, for the trace.
        is_shared: whether it may be a copy that is used again.
        await_download: waits for what comes to the host.
    """

    def bring() -> Tensor:
        if is_shared and target == activations.here:
            (there,) = activations.receive([tensor], Edge.INPUTS, what)
            return there.detach()  # type: ignore[no-any-return]
        transfer = activations.start(tensor, target, what, may_change=True)
        if target.type == "cpu":
            await_download(transfer)
            return transfer.tensors[0].clone()  # in memory of its own, which forks get, too
        return transfer.wait(Edge.INPUTS)[0]

    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return bring()
    landing: list[Transfer] = []
    source = _Land.apply(tensor, landing) if tensor.device.type == "cpu" else tensor
    return _Move.apply(source, bring, activations, landing, what)  # type: ignore[no-any-return]


def arrived(parts: Sequence[Transfer]) -> list[Tensor]:
    """Gradients that were on their way to the device where they are added up now, one of each transfer."""
    return [part.wait(Edge.OUTPUT_GRADIENTS)[0] for part in parts]


class _Land(EngineFunction):
    """On the host, in front of :class:`_Move`, which has put the download of a gradient into ``landing``: waits for it;
    see [Note: moves]."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, landing: list[Transfer]) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.landing = landing
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        while ctx.landing:
            ctx.landing.pop().await_done()
        return gradients[0], None


class _Move(EngineFunction):
    """A move to another device, or to the host; see [Note: moves]."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        bring: Callable[[], Tensor],
        activations: TravellingActivations,
        landing: list[Transfer],
        what: str,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.source, ctx.activations, ctx.landing, ctx.what = tensor.device, activations, landing, f"gradient {what}"
        return bring()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None, None, None, None]:
        (gradient,) = gradients
        if gradient is not None and gradient.device != ctx.source:
            # Of a second derivative, and where autograd looks for NaN, the values are read at once.
            is_read = torch.is_grad_enabled() or torch.is_anomaly_enabled()
            if ctx.source.type != "cpu" or is_read:
                gradient = moved(gradient, ctx.source, ctx.activations, ctx.what)
            else:
                ctx.landing.append(ctx.activations.start(gradient, ctx.source, ctx.what))
                (gradient,) = ctx.landing[-1].tensors
        return gradient, None, None, None, None
