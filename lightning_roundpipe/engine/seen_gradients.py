"""What user code finds in ``.grad`` while the engine has the gradients aside.

[Note: gradients that are seen]
Where micro-batches meet, a step has gradients of its earlier backwards, and user code may read them (their norm, a
copy before the next backward). The first micro-batch that comes to a backward puts them aside, because what glue uses
accumulates into ``.grad`` then, while others have not read them yet. So until the segment ends, what a micro-batch
reads from ``.grad`` in glue is what is aside.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .glue import current
from .pending import unwaited

_GRAD: Any = torch._C.TensorBase.grad
_seen: dict[nn.Parameter, Tensor] = {}
_patch_lock = threading.Lock()
_patch_users = 0


def accumulated(parameter: nn.Parameter) -> Tensor | None:
    """What is in ``.grad`` indeed."""
    gradient: Tensor | None = _GRAD.__get__(parameter)
    return gradient


def take_accumulated(parameter: nn.Parameter) -> Tensor | None:
    """What is in ``.grad`` indeed, which is empty then. Does not wait: it is the engine's own."""
    with unwaited():
        gradient = accumulated(parameter)
        if gradient is not None:
            _GRAD.__set__(parameter, None)
    return gradient


def _read(parameter: nn.Parameter) -> Tensor | None:
    state = current()
    if state is not None and state.unit_writes is None and (gradient := _seen.get(parameter)) is not None:
        return gradient
    return accumulated(parameter)


def _write(parameter: nn.Parameter, gradient: Tensor | None) -> None:
    _GRAD.__set__(parameter, gradient)


def _delete(parameter: nn.Parameter) -> None:
    _GRAD.__delete__(parameter)


@contextlib.contextmanager
def gradients_seen(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """To be entered before gradients are put aside: the present ones stay visible to micro-batches."""
    global _patch_users
    present = {p: gradient for p in parameters if (gradient := accumulated(p)) is not None}
    with _patch_lock:
        _seen.update(present)
        _patch_users += 1
        if _patch_users == 1:
            nn.Parameter.grad = property(_read, _write, _delete)  # type: ignore[assignment]
    try:
        yield
    finally:
        with _patch_lock:
            for parameter in present:
                _seen.pop(parameter, None)
            _patch_users -= 1
            if _patch_users == 0:
                del nn.Parameter.grad
