"""Parametrized weights (``torch.nn.utils.parametrize``) in units that run on several threads at once.

[Note: cached parametrizations]
``with parametrize.cached()`` keeps the tensors that parametrizations compute in one table of the process, until no
thread is inside any more. PEFT uses it in every forward of experts with LoRA. Of two threads that are inside at once,
the one that leaves first would find its tensors there when it comes back: those of another micro-batch, with its graph
or with none. So while a step runs, each thread has a table of its own::

    thread 0   cached( W0 W0 )     cached( W2 W2 )        W: computed at the first use inside
    thread 1        cached( W1 W1 W1 W1 )

What user code is inside of does not hold in the units that it calls: what a unit computes belongs to one call, which
may have no graph, or one that goes with its backward.

(An exclusive section in place of the tables would let the experts of one micro-batch at a time compute.)

To parametrize a weight in a forward sets it to itself, which raises its version as if it had changed. That is left out.

[Note: power iterations]
Spectral normalisation estimates the largest singular value of a weight, one iteration further in every forward of a
training step. The whole batch is one forward: so while a step runs one micro-batch iterates, and the others compute
with what it has left. In units, which micro-batches pass in order, it is the first one; in user code the one that comes
first. (If a step calls a module twice, this one may have been there twice before the next one comes.) What the others
do not change they write as it is: whether a unit writes its buffers is learned in any micro-batch, and holds for all.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from ..common.attributes import attribute_set
from ..usercode.lock import current

_Key = tuple[int, str]


def _is_in_unit() -> bool:
    state = current()
    return state is not None and state.unit_writes is not None


class _Tables(threading.local):
    """In the place of the table of the process: one per thread for user code, and one for units, which are there while
    the thread is inside."""

    def __init__(self) -> None:
        self._tables: dict[bool, dict[_Key, Any]] = {}  # by whether it is that for units

    @contextlib.contextmanager
    def cached(self) -> Iterator[None]:
        """In the place of ``parametrize.cached``."""
        which = _is_in_unit()
        if which in self._tables:
            yield
            return
        self._tables[which] = {}
        try:
            yield
        finally:
            del self._tables[which]

    def get(self, key: _Key) -> Any:
        return self._tables.get(_is_in_unit(), {}).get(key)

    def __setitem__(self, key: _Key, value: Any) -> None:
        if (table := self._tables.get(_is_in_unit())) is not None:
            table[key] = value


def _iterates(norm: _SpectralNorm | SpectralNorm, came_first: dict[Any, int], in_plain_code: bool) -> bool:
    state = current()
    if state is None:
        return in_plain_code
    if state.unit_writes is not None:
        return state.index == 0
    return came_first.setdefault(norm, state.index) == state.index


@torch.no_grad()
def _write_as_they_are(*vectors: Tensor) -> None:
    for vector in vectors:
        vector.mul_(1)


@contextlib.contextmanager
def power_iterations_once(*, in_plain_code: bool = True) -> Iterator[None]:
    """While open, spectral normalisation iterates in one micro-batch alone; see [Note: power iterations].

    Args:
        in_plain_code: whether it iterates where no micro-batch is under way.
    """
    came_first: dict[Any, int] = {}
    iterate, compute = _SpectralNorm._power_method, SpectralNorm.compute_weight

    def iterate_once(self: _SpectralNorm, weight: Tensor, num_iterations: int) -> None:
        if _iterates(self, came_first, in_plain_code):
            iterate(self, weight, num_iterations)
        else:
            _write_as_they_are(self._u, self._v)

    def compute_once(self: SpectralNorm, module: Any, do_power_iteration: bool) -> Tensor:
        if do_power_iteration and not _iterates(self, came_first, in_plain_code):
            names, weight = (f"{self.name}_u", f"{self.name}_v"), f"{self.name}_orig"
            _write_as_they_are(*(getattr(module, name) for name in names))
            # Copies, as with an iteration: the graph must not hold what is iterated in place.
            vectors = {name: getattr(module, name).clone() for name in names}
            module = SimpleNamespace(**{weight: getattr(module, weight)}, **vectors)
            do_power_iteration = False
        return compute(self, module, do_power_iteration)

    with (
        attribute_set(_SpectralNorm, "_power_method", iterate_once),
        attribute_set(SpectralNorm, "compute_weight", compute_once),
    ):
        yield


@contextlib.contextmanager
def parametrizations_apart() -> Iterator[None]:
    """While open, what is cached belongs to the thread that has computed it; see [Note: cached parametrizations]."""
    set_to, tables = parametrize._maybe_set, _Tables()

    def set_to_another(dest: Tensor, src: Tensor) -> None:
        if src is not dest:
            set_to(dest, src)

    with (
        attribute_set(parametrize, "cached", tables.cached),
        attribute_set(parametrize, "_cache", tables),
        attribute_set(parametrize, "_cache_enabled", 1),  # always asks the tables, which know who is inside
        attribute_set(parametrize, "_maybe_set", set_to_another),
    ):
        yield
