"""Transfer lanes: tensors on their way between the host and a device, one lane per device and direction."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Transfer:
    """A copy that was submitted to a lane; :meth:`wait` gives the tensors at their destination."""

    __slots__ = ("_tensors",)

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors

    def wait(self) -> list[Tensor]:
        """Blocks the calling lane until the copies have arrived; the tensors, in the order submitted."""
        return self._tensors


class TransferLane:
    """Copies tensors to ``destination``, in order of submission.

    Copies run inside :meth:`submit`; the interface lets them run behind the caller's back.
    """

    def __init__(self, destination: torch.device) -> None:
        self.destination = destination
        self.num_bytes = 0

    def submit(self, tensors: Sequence[Tensor], *, keep_graph: bool = False) -> Transfer:
        """Starts copying ``tensors``; always makes copies, never aliases.

        Args:
            keep_graph: whether the copies are part of the tensors' autograd graph.
        """
        self.num_bytes += sum(t.numel() * t.element_size() for t in tensors)
        return Transfer([(t if keep_graph else t.detach()).to(self.destination, copy=True) for t in tensors])


def poison(tensor: Tensor) -> None:
    """Fills memory that must not be read any more with NaN, or the lowest value of an integer type."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype is not torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).min)
