"""Functions of torch that look at a weight, but at nothing that an update writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

_GETTERS = (
    "shape", "dtype", "device", "layout", "ndim", "is_leaf", "requires_grad", "grad_fn", "output_nr", "_version",
    "_backward_hooks", "_post_accumulate_grad_hooks", "is_sparse", "is_cuda", "is_cpu", "is_meta", "is_quantized",
    "is_nested", "is_mps", "is_xla", "itemsize", "nbytes", "_base", "name", "names",
)  # fmt: skip
_METHODS = (
    "size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset", "is_contiguous",
    "is_floating_point", "is_complex", "is_inference", "is_signed", "is_pinned", "is_shared", "data_ptr",
    "requires_grad_", "_is_view", "__len__",
)  # fmt: skip
_FUNCTIONS = ("is_floating_point", "is_complex", "is_tensor", "numel", "is_inference")


def _harmless() -> Iterator[Any]:
    for name in _GETTERS:
        found = getattr(torch.Tensor, name, None)
        if hasattr(found, "__get__"):
            yield found.__get__  # type: ignore[union-attr]
    yield torch.Tensor.requires_grad.__set__  # type: ignore[attr-defined]
    yield from (getattr(torch.Tensor, name) for name in _METHODS if hasattr(torch.Tensor, name))
    yield from (getattr(torch, name) for name in _FUNCTIONS)


HARMLESS = frozenset(_harmless())
