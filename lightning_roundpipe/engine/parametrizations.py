"""Parametrized weights (``torch.nn.utils.parametrize``) in units that run on several threads at once.

[Note: cached parametrizations]
``with parametrize.cached()`` keeps the tensors that parametrizations compute in one table of the process, until nobody
is inside any more. PEFT uses it in every forward of experts with LoRA. Of two threads that are inside at once, the one
that leaves first would find its tensors there when it comes back: those of another micro-batch, with its graph or with
none. So while a step runs, each thread has a table of its own.

To parametrize a weight in a forward sets it to itself, which raises its version as if it had changed. That is left out.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.nn.utils import parametrize

_Key = tuple[int, str]


class _Tables(dict[_Key, Any]):
    """In the place of the table of the process: one per thread, which is there while the thread is inside."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._lock = threading.Lock()  # of the number of threads inside, which torch looks at

    @contextlib.contextmanager
    def cached(self) -> Iterator[None]:
        """In the place of ``parametrize.cached``."""
        before: dict[_Key, Any] | None = getattr(self._local, "table", None)
        self._local.table = {} if before is None else before
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)
            self._local.table = before

    def _count(self, change: int) -> None:
        with self._lock:
            parametrize._cache_enabled += change

    def get(self, key: _Key, default: Any = None) -> Any:
        return (getattr(self._local, "table", None) or {}).get(key, default)

    def __setitem__(self, key: _Key, value: Any) -> None:
        table: dict[_Key, Any] | None = getattr(self._local, "table", None)
        if table is not None:
            table[key] = value


@contextlib.contextmanager
def parametrizations_apart() -> Iterator[None]:
    """While open, what is cached belongs to the thread that has computed it; see [Note: cached parametrizations]."""
    cached, table, set_to = parametrize.cached, parametrize._cache, parametrize._maybe_set
    tables = _Tables()

    def set_to_another(dest: Tensor, src: Tensor) -> None:
        if src is not dest:
            set_to(dest, src)

    parametrize.cached, parametrize._cache, parametrize._maybe_set = tables.cached, tables, set_to_another
    try:
        yield
    finally:
        parametrize.cached, parametrize._cache, parametrize._maybe_set = cached, table, set_to
