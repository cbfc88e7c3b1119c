"""Modes of ours that see operators, on several threads."""

from __future__ import annotations

import threading
from typing import Any

from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

_lock = threading.Lock()
_NOTES = [name for name in vars(_python_dispatch) if name.startswith("_is_in_")]


class ThreadsDispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that several threads may have entered, each an object of its own.

    Torch notes for the whole process whether there is a mode, and each object puts back what it has found. If threads
    leave in another order than they came, one is noted for good, and torch.compile skips what it is given from then on.
    """

    _num_entered = 0  # the lock is held where it changes
    _before: dict[str, bool] = {}  # noqa: RUF012

    def __enter__(self) -> Any:
        kind = ThreadsDispatchMode
        with _lock:
            if not kind._num_entered:
                kind._before = {name: getattr(_python_dispatch, name) for name in _NOTES}
            kind._num_entered += 1
            return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        kind = ThreadsDispatchMode
        with _lock:
            super().__exit__(*error)  # type: ignore[no-untyped-call]
            kind._num_entered -= 1
            if not kind._num_entered:
                vars(_python_dispatch).update(kind._before)
