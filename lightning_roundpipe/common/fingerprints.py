"""Did this tensor change?

A tensor that is written in place gets a new *version*: torch counts. Another memory, shape or dtype (``x.data = y``)
shows in the address and the layout. Neither shows a write through ``.data`` or by some kernels (running statistics).
Where a tensor can only be written, and not get other memory, the version alone is compared: it is read much faster.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

UNKNOWN = -1  # version of inference tensors
MAX_SAMPLED = 1024
_Key = TypeVar("_Key")


class Fingerprint(NamedTuple):
    """A strided tensor at one moment: equal as long as it is in the same memory, and was not written there.

    Attributes:
        version: see :func:`version_of`.
        memory: address, shape, strides and dtype.
    """

    version: int
    memory: tuple[int, torch.Size, tuple[int, ...], torch.dtype]


def fingerprint_of(tensor: Tensor) -> Fingerprint:
    """What ``tensor`` is now."""
    return Fingerprint(version_of(tensor), (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype))


def sample_of(tensor: Tensor) -> Tensor:
    """A copy of at most ``MAX_SAMPLED`` evenly spread elements of a strided tensor, in one row on its device."""
    most = max(1, int(MAX_SAMPLED ** (1 / max(1, tensor.dim()))))
    steps = tuple(slice(None, None, -(-size // most) or 1) for size in tensor.shape)
    return tensor.detach()[steps].clone(memory_format=torch.contiguous_format).reshape(-1)


def version_of(tensor: Tensor) -> int:
    """How often ``tensor`` was written, or -1 for inference tensors, which do not count.

    Keeps the interpreter lock where it can: ``is_inference`` lets go of it, as operators do, and other threads are
    waiting for it.
    """
    if torch.is_inference_mode_enabled() and tensor.is_inference():
        return UNKNOWN
    try:
        return tensor._version
    except RuntimeError:  # an inference tensor outside of that mode: rare, and raising takes long
        return UNKNOWN


class Versions(Generic[_Key]):
    """The versions of tensors at one moment; keeps the tensors.

    Args:
        tensors: with keys, by which they are named later.
    """

    def __init__(self, tensors: Iterable[tuple[_Key, Tensor]]) -> None:
        self._known = {key: (tensor, version_of(tensor)) for key, tensor in tensors}

    def written(self) -> list[_Key]:
        """The keys of those that were written since."""
        return [key for key, (tensor, version) in self._known.items() if version_of(tensor) != version]

    def has(self, key: _Key, tensor: Tensor | None) -> bool:
        """Whether ``tensor`` is the one that ``key`` names, and was not written since."""
        known = self._known.get(key)
        return known is not None and known[0] is tensor and known[1] == version_of(known[0])
