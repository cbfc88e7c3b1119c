"""Tells whether a tensor has changed."""

from __future__ import annotations

from torch import Tensor

UNKNOWN = -1  # version of inference tensors


def version_of(tensor: Tensor) -> int:
    """The version counter, or -1 for inference tensors, which have none."""
    return UNKNOWN if tensor.is_inference() else tensor._version
