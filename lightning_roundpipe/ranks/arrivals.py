"""The gradients of one rank, as the sum over ranks takes them: while they come, or when all have come."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from torch import Tensor, nn

Gradients = dict[nn.Parameter, Tensor]


class Arrivals(Protocol):
    """The gradients of this rank, on their way."""

    def await_planned(self, masters: Iterable[nn.Parameter]) -> None:
        """Blocks until all that the plan foresees for ``masters`` has come, or nothing comes any more."""

    def take_planned(self, master: nn.Parameter) -> Tensor | None:
        """The sum of what has come by plan, which the caller owns; None for nothing."""

    def settle(self) -> None:
        """The backward has ended: blocks until everything has come.

        Raises:
            BaseException: what went wrong on its way.
        """

    def unplanned(self) -> set[nn.Parameter]:
        """Weights that something has come for besides, and has not been taken."""

    def take(self) -> Gradients:
        """All that has not been taken."""


class Given:
    """Gradients that have come already (:class:`Arrivals`); none of them goes early."""

    def __init__(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        self._gradients = dict(gradients)

    def await_planned(self, masters: Iterable[nn.Parameter]) -> None:
        pass

    def take_planned(self, master: nn.Parameter) -> Tensor | None:
        return None

    def settle(self) -> None:
        pass

    def unplanned(self) -> set[nn.Parameter]:
        return set(self._gradients)

    def take(self) -> Gradients:
        return self._gradients
