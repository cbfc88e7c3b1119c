"""What a step returns to its caller: on the host, and without the graph.

[Note: results]
What ``training_step`` returns may hang on the graph of the loss, which holds the logits, and on GPUs it lives wherever
its micro-batch happened to be. So it is detached as soon as the micro-batch has returned it, before the backward, and
its tensors travel to the host, where those of all micro-batches can be put together. So does what is left behind in
attributes and lists of modules when the step ends::

    training_step returns {"loss": x, "rows": y}      x, y: on a device, with the graph
      send                {"loss": x', "rows": y'}    detached; a download of each begins
      ... backward, other micro-batches ...
      arrive              {"loss": x", "rows": y"}    on the host, after a wait for the downloads
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..common.trees import mapped
from ..devices.device import Device
from ..devices.transfer import Transfer


class Results:
    """What one micro-batch has returned, on its way to the host; see [Note: results].

    Args:
        output: any value; tensors are found in containers, dataclasses and registered pytrees.
        device_of: the device that has a tensor; None if it is on the host already.
    """

    def __init__(self, output: Any, device_of: Callable[[Tensor], Device | None]) -> None:
        self._arriving: dict[int, tuple[Tensor, Transfer]] = {}
        sent: dict[int, Tensor] = {}  # not kept: it leads to the graph

        def send(tensor: Tensor) -> Tensor:
            if id(tensor) not in sent:
                sent[id(tensor)] = self._send(tensor, device_of(tensor))
            return sent[id(tensor)]

        self._output = mapped(output, send)

    def _send(self, tensor: Tensor, device: Device | None) -> Tensor:
        """``tensor`` without its graph; its download begins if it is on a device."""
        detached = tensor.detach() if tensor.grad_fn is not None else tensor
        if device is None or tensor.layout is not torch.strided:
            return _on_host(detached)
        self._arriving[id(detached)] = (detached, device.download([detached], "results"))
        return detached

    def arrive(self) -> Any:
        """The value on the host, after a wait for its downloads, in memory of its own, which forks get, too."""
        received: dict[int, Tensor] = {}
        for key, (_, transfer) in self._arriving.items():
            transfer.await_done()
            received[key] = transfer.tensors[0].clone()
        return mapped(self._output, lambda tensor: received.get(id(tensor), tensor)) if received else self._output


def brought_home(value: Any) -> Any:
    """``value`` with the tensors in it on the host and without their graph; those that are so already stay."""
    return mapped(value, _home)


def _home(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor if tensor.grad_fn is None else tensor.detach()
    return tensor.detach().cpu()


def _on_host(tensor: Tensor) -> Tensor:
    """What is there already stays the same object: ``cpu`` of a class of the user's may make another one."""
    return tensor if tensor.device.type == "cpu" else tensor.cpu()


def without_graph(value: Any) -> Any:
    """As :func:`brought_home`, for what may be no tensor, or one that keeps its gradient."""
    if not isinstance(value, Tensor) or value.grad_fn is None:
        return brought_home(value)
    kept: Tensor = brought_home(value.detach())
    if value.retains_grad:
        kept.grad = brought_home(value.grad)
    return kept


def is_number(value: Any) -> bool:
    """Whether it is a real number, or a tensor of one."""
    if not isinstance(value, Tensor):
        return type(value) in (int, float)
    return value.layout is torch.strided and value.numel() == 1 and not (value.is_complex() or value.is_meta)


def is_integer(value: Any) -> bool:
    """Whether it is an integer, or a tensor of one."""
    if isinstance(value, Tensor):
        return is_number(value) and not (value.is_floating_point() or value.dtype is torch.bool)
    return type(value) is int
