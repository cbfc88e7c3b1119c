"""Updates that begin later, when their gradients come; see [Note: late gradients] in :mod:`tails`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

from .pending import Failure, Share
from .protocol import Event, see
from .update_part import Part

# From gradients to the number that they are to be multiplied by; None if it has to be done in another way.
Factor = Callable[[list[Tensor]], Tensor | None]


class ComingGradients:
    """The gradients of a training step whose tail is not over.

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

    def come(self) -> bool:
        """Lets them come now; whether they have. (Not to a signal handler in a training step that they come in.)"""
        if not self.have_arrived:
            self.bring()
        return self.have_arrived

    def wait(self) -> Mapping[nn.Parameter, Tensor] | None:
        """Takes them, as soon as they are there; None if they are lost."""
        self._arrived.wait()
        gradients, self._gradients = self._gradients, None
        return gradients


class LateShare(Share):
    """Weights whose gradients are still to come: whoever looks at them lets them come."""

    def __init__(self, parameters: Sequence[nn.Parameter], failure: Failure, coming: ComingGradients) -> None:
        super().__init__(parameters, failure)
        self._coming = coming
        self._has_begun = False

    @property
    def owns_gradients(self) -> bool:
        return not self._coming.are_apart

    def begin_update(self, part: Part) -> None:
        """The gradients are there."""
        self._has_begun = True
        addresses = part.addresses
        places = [addresses.get(parameter, 0) for parameter in self.parameters]
        see(Event.UPDATE, self.parameters, addresses=places)

    def _see(self, event: Event) -> None:
        if self._has_begun:
            super()._see(event)

    def _await_end(self) -> None:
        if self._coming.come():
            super()._await_end()


def receive(
    works: Sequence[tuple[Share, Part]],
    coming: ComingGradients,
    weights: Sequence[nn.Parameter],
    factor: Factor | None,
) -> bool:
    """Waits for gradients, and hands them out; whether they have come."""
    gradients = coming.wait()
    if gradients is None:
        return False
    multiplier = None if factor is None else factor([gradients[p] for p in weights if p in gradients])
    for share, part in works:
        part.receive(gradients, multiplier)
        assert isinstance(share, LateShare)
        share.begin_update(part)
    return True


def factor_of(gradients: list[Tensor], factor: Factor, multiply: Callable[[list[Tensor]], None]) -> Tensor | None:
    """What ``factor`` gives for gradients that have come; None if nothing is left to be done.

    Args:
        multiply: does it where ``factor`` gives None.
    """
    if not gradients:
        return None
    found = factor(gradients)
    if found is None:
        multiply(gradients)
    return found
