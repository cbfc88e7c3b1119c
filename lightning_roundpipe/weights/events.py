"""The hook by which tests follow what happens to weights (when what may happen: docs/explanation/architecture.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from torch import nn

from ..devices.transfer import Transfer

Event = Literal[
    "refresh",  # a working copy is about to be made
    "upload",
    "activate",  # a replica begins to run on its device
    "deactivate",
    "download",  # gradients begin to travel to the host
    "take",  # gradients were added on the host
    "update",  # an update begins
    "updated",
    "not_updated",  # an update that has begun was not made
    "step_ended",
    "step_failed",
]
# (event, weights, name of the unit or "", replica or dtype of the working copy, the transfer of weights or gradients);
# called on the thread that makes the event, often under the caller's locks. None outside of tests.
observer: Callable[[Event, Iterable[nn.Parameter], str, object, Transfer | None], None] | None = None


def tell(
    event: Event,
    weights: Iterable[nn.Parameter] = (),
    unit: str = "",
    place: object = None,
    transfer: Transfer | None = None,
) -> None:
    """Tells :data:`observer`, if there is one; it may raise."""
    if observer is not None:
        observer(event, weights, unit, place, transfer)
