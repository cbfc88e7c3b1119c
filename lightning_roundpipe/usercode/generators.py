"""The generators of the process: torch's default one, Python's, and NumPy's.

[Note: random numbers of user code]
In user code each micro-batch draws from streams of its own, which are seeded with (seed of the step, micro-batch). So
what it draws depends neither on timing nor on what others draw. But the generators belong to the process: their states
are swapped where the user-code lock goes to another micro-batch. ::

    micro-batch 0    seeded, draws | kept                    | put back, draws
    micro-batch 1                  | seeded, draws ......... | kept
                                   ^ switch                  ^ switch

The states of Python's and NumPy's generators take ten times as long to swap as torch's, and few models draw from them
outside units. So they are swapped from when user code was seen to draw there: the state is compared after the first
micro-batch of a recording, which runs alone, and at the end of every step.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch


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


@contextlib.contextmanager
def foreign_seeded(seed: int) -> Iterator[None]:
    """While open, Python's and NumPy's generators go on from ``seed``; for a thread in an exclusive section."""
    before = ForeignStates()
    seed_foreign(seed)
    try:
        yield
    finally:
        before.put_back()


class GeneratorStates:
    """The states that the generators have now.

    Args:
        foreign: whether those of Python's and NumPy's are kept, too.
    """

    def __init__(self, *, foreign: bool) -> None:
        self._torch = torch.default_generator.get_state()
        self.foreign = ForeignStates() if foreign else None

    def put_back(self, *, foreign: bool = True) -> None:
        """The generators have these states again; those of Python and NumPy only if they were kept."""
        torch.default_generator.set_state(self._torch)
        if foreign and self.foreign is not None:
            self.foreign.put_back()
