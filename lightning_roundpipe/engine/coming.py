"""Gradients that an update waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from torch import Tensor, nn


class ComingGradients:
    """The gradients of a training step whose tail is not over, see [Note: late gradients] in :mod:`tails`.

    Args:
        bring: lets them come now; may be called on any thread.

    Attributes:
        are_apart: whether nobody but the update has them.
    """

    def __init__(self, bring: Callable[[], None]) -> None:
        self.bring = bring
        self.are_apart = False
        self._gradients: Mapping[nn.Parameter, Tensor] | None = None
        self._arrived = threading.Event()

    @property
    def have_arrived(self) -> bool:
        """Whether they are there, or lost."""
        return self._arrived.is_set()

    def arrive(self, gradients: Mapping[nn.Parameter, Tensor] | None, *, are_apart: bool = False) -> None:
        """They are there; None if they are lost."""
        self._gradients, self.are_apart = gradients, are_apart
        self._arrived.set()

    def wait(self) -> Mapping[nn.Parameter, Tensor] | None:
        """Takes them, as soon as they are there; None if they are lost."""
        self._arrived.wait()
        gradients, self._gradients = self._gradients, None
        return gradients
