"""Copies in pieces, for the lanes of GPUs and of virtual devices, and the poisoned destinations of the latter."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..common.sizes import num_bytes_of

# A destination and its source, or parts of both of the same shape.
Pair = tuple[Tensor, Tensor]


class plain_mode:
    """Tensors made here can be written by any thread, which those of inference mode could not; and no function mode of
    user code sees what is done. A context manager that is entered several times per unit call: no generator."""

    __slots__ = ("_functions", "_grad", "_inference")

    def __enter__(self) -> None:
        self._inference: Any = None
        if torch.is_inference_mode_enabled():
            self._inference = torch.inference_mode(False)
            self._inference.__enter__()
        self._grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        self._functions = torch._C.DisableTorchFunction()
        self._functions.__enter__()

    def __exit__(self, *exc: Any) -> None:
        self._functions.__exit__(*exc)
        torch._C._set_grad_enabled(self._grad)
        if self._inference is not None:
            self._inference.__exit__(*exc)


def poison(tensor: Tensor) -> None:
    """Fills memory that must not be read with NaN, or the lowest value of an integer type."""
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        elif tensor.dtype is not torch.bool:  # which has no value that says "poison"
            tensor.fill_(torch.iinfo(tensor.dtype).min)


def stored(tensor: Tensor) -> Tensor:
    """The numbers in a tensor: its values if it is sparse. Where they belong is known on the host, and not modelled."""
    return tensor._values() if tensor.layout is torch.sparse_coo else tensor


def pairs_of(sources: Sequence[Tensor]) -> list[Pair]:
    """Poisoned destinations and their sources; the sources are not read yet."""
    with plain_mode():
        return [(_destination(source), source.detach()) for source in sources]


def _destination(source: Tensor) -> Tensor:
    if source.layout is torch.sparse_coo:
        values = _destination(source._values())
        indices = source._indices().clone()
        return torch.sparse_coo_tensor(
            indices, values, source.shape, check_invariants=False, is_coalesced=source.is_coalesced()
        )
    if source.dtype is torch.bool:  # nothing is true before it arrives
        return torch.zeros_like(source)
    destination = torch.empty_like(source.detach())
    poison(destination)
    return destination


def pieces_of(pairs: Sequence[Pair], max_bytes: float) -> deque[list[Pair]]:
    """Cuts a transfer into pieces of at most ``max_bytes``; small tensors share one. There is at least one piece."""
    pieces: deque[list[Pair]] = deque([[]])
    filled = 0
    with plain_mode():
        for pair in pairs:
            for copy, source in _cut(stored(pair[0]), stored(pair[1]), max_bytes):
                num_bytes = num_bytes_of([copy])
                if pieces[-1] and filled + num_bytes > max_bytes:
                    pieces.append([])
                    filled = 0
                pieces[-1].append((copy, source))
                filled += num_bytes
    return pieces


def _cut(copy: Tensor, source: Tensor, max_bytes: float) -> Iterator[Pair]:
    """Parts of both tensors, of at most ``max_bytes``; a single element is never cut."""
    num_bytes = num_bytes_of([copy])
    if num_bytes <= max_bytes or copy.numel() == 1:
        yield copy, source
        return
    if copy.is_contiguous() and source.is_contiguous():
        copy, source = copy.view(-1), source.view(-1)
    # Along the outermost dimension, so that parts are next to each other in memory.
    dimension = max((d for d in range(copy.dim()) if copy.shape[d] > 1), key=copy.stride)
    length = copy.shape[dimension]
    step = max(1, int(max_bytes * length // num_bytes))
    for start in range(0, length, step):
        size = min(step, length - start)
        yield from _cut(copy.narrow(dimension, start, size), source.narrow(dimension, start, size), max_bytes)


def copy_all(pairs: Sequence[Pair]) -> None:
    """Reads the sources and writes the destinations."""
    with plain_mode():
        for copy, source in pairs:
            stored(copy).copy_(stored(source))
