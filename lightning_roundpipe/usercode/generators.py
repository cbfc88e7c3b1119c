"""The generators of the process: torch's default one, Python's, and NumPy's.

[Note: random numbers of user code]
In user code each micro-batch draws from streams of its own, which are seeded with (seed of the step, micro-batch). So
what it draws depends neither on timing nor on what others draw. But the generators belong to the process: their states
are swapped where the user-code lock goes to another micro-batch. ::

    micro-batch 0    seeded, draws | kept                    | put back, draws
    micro-batch 1                  | seeded, draws ......... | kept
                                   ^ switch                  ^ switch

To swap the states of Python's and NumPy's generators takes longer than that of torch's, and few models draw from them
outside units. So they are swapped in recordings, where the first micro-batch runs alone, and from when user code was
seen to draw from them: there, or at the end of a step.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..common.seeds import derive_seed


class ForeignStates:
    """The states that Python's and NumPy's global generators have now."""

    def __init__(self) -> None:
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy: Any = None if numpy is None else numpy.random.get_state()

    def have_moved(self) -> bool:
        """Whether any thread has drawn since."""
        if random.getstate() != self._python:
            return True
        if self._numpy is None:
            return False
        now = sys.modules["numpy"].random.get_state()
        return bool(now[2] != self._numpy[2] or (now[1] != self._numpy[1]).any())

    def put_back(self) -> None:
        """The generators have these states again."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


def seed_foreign(seed: int) -> None:
    """Seeds Python's and NumPy's global generators."""
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


class ForeignSeeded:
    """While open, Python's and NumPy's generators go on from ``seed``; for a thread in an exclusive section.

    Attributes:
        have_moved: whether anything was drawn from them while it was open.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.have_moved = False

    def __enter__(self) -> ForeignSeeded:
        self._before = ForeignStates()
        seed_foreign(self._seed)
        self._seeded = ForeignStates()
        return self

    def __exit__(self, *exc: object) -> None:
        self.have_moved |= self._seeded.have_moved()
        self._before.put_back()

    @contextlib.contextmanager
    def interrupted(self, seed: int, by: contextlib.AbstractContextManager[None]) -> Iterator[None]:
        """While open, the generators go on from another ``seed``, within ``by``, which finds and may change the states
        that are put back in the end."""
        own, other = ForeignStates(), ForeignSeeded(seed)
        self._before.put_back()
        try:
            with by, other:
                yield
        finally:
            self.have_moved |= other.have_moved
            self._before = ForeignStates()
            own.put_back()


class UserGenerators:
    """See [Note: random numbers of user code]; for the thread that excludes all user code of a step.

    Args:
        draws_foreign: set when user code has drawn from Python's or NumPy's generator; all steps share it.
    """

    def __init__(self, draws_foreign: threading.Event) -> None:
        self._draws_foreign = draws_foreign
        # Of micro-batches, by index: the state of torch's generator, and those of the others, if these were kept.
        self._kept: dict[int, tuple[Tensor, ForeignStates | None]] = {}
        self.leave()

    def leave(self) -> None:
        """What the generators are now is what the thread that runs the step goes on with."""
        self._outer, self._outer_foreign = torch.default_generator.get_state(), ForeignStates()

    def come_back(self) -> None:
        """The generators are as when the thread that runs the step has left them."""
        torch.default_generator.set_state(self._outer)
        if not self._draws_foreign.is_set() and self._outer_foreign.have_moved():
            self._draws_foreign.set()
        if self._draws_foreign.is_set():
            self._outer_foreign.put_back()

    def show(self, index: int, seed: int) -> None:
        """Micro-batch ``index``, whose seed in this step is ``seed``, goes on with its random numbers or begins."""
        kept, foreign = self._kept.get(index, (None, None))
        if kept is None:
            torch.default_generator.manual_seed(_seed_for(seed))
        else:
            torch.default_generator.set_state(kept)
        if foreign is not None:
            foreign.put_back()
        elif self._draws_foreign.is_set():
            seed_foreign(_seed_for(seed))

    def hide(self, index: int) -> None:
        """Another micro-batch is going to be shown."""
        foreign = ForeignStates() if self._draws_foreign.is_set() else None
        self._kept[index] = torch.default_generator.get_state(), foreign

    @contextlib.contextmanager
    def watching(self, index: int, seed: int) -> Iterator[None]:
        """Around a recording of micro-batch ``index``, which is hidden then: afterwards it is known what it draws
        from."""
        is_known = self._draws_foreign.is_set()
        self._draws_foreign.set()
        yield
        _, foreign = self._kept.get(index, (None, None))
        if not is_known and foreign is not None:
            seed_foreign(_seed_for(seed))
            if not foreign.have_moved():
                self._draws_foreign.clear()
        self._outer_foreign.put_back()


def _seed_for(seed: int) -> int:
    return derive_seed(seed, -1)
