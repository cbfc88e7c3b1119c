"""What the units of one micro-batch run with, and what they write on modules meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..common.attributes import UnitWrites
from ..devices.offload import TravellingActivations
from ..usercode.generators import ForeignSeeded
from ..usercode.lock import UserCodeLock, UserCodeState
from ..weights.low_precision import WorkingCopies
from .compiling import UnitCompiler
from .randomness import PrivateRandomness
from .recompute import Call

NOT_REDIRECTED = 0, None, None  # see `InsideUnit.streams`


@dataclass(slots=True)
class UnitContext:
    """What the units of one micro-batch run with."""

    state: UserCodeState  # of the micro-batch in user code
    lock: UserCodeLock  # of the step
    anchor: Tensor  # makes every cut require a gradient, see [Note: loose parameters] in `usercode.loose_gradients`
    activations: TravellingActivations  # what the micro-batch brings along from device to device
    weights: WorkingCopies  # the low-precision copies of the masters
    saves_kept: bool  # whether inputs are saved for calls whose graph is kept, too: their backward may come too late
    compiler: UnitCompiler | None  # runs units compiled; None to run them as they are
    inside: InsideUnit  # open while a unit runs


class InsideUnit(UnitWrites):
    """While open, its micro-batch is inside a unit: on the calling thread, and on those of autograd that work for it
    meanwhile: what is written on modules is noted. May be entered again afterwards.

    Attributes:
        run: the context, the call, and what relays did in the run before, if it is a recomputation; None in a backward.
        streams: the seed of the unit, and what gives it random numbers of torch's and of others.
        is_recomputing: whether the unit runs again for its backward, or runs its backward.
        written: plain attributes that were written the last time: (copy or other module, name, value).
    """

    def __init__(self, state: UserCodeState) -> None:
        super().__init__()
        self._state = state
        self.run: tuple[UnitContext, Call, list[bool] | None] | None = None
        self.streams: tuple[int, PrivateRandomness | None, ForeignSeeded | None] = NOT_REDIRECTED
        self.is_recomputing = False
        self.written: list[tuple[nn.Module, str, Any]] = []

    def __enter__(self) -> None:
        state = self._state
        state.unit_writes, state.is_recomputing = self, self.is_recomputing
        self.written = []

    def __exit__(self, *exc: object) -> None:
        state = self._state
        state.unit_writes = None
        state.is_recomputing = False
        if self.before:
            self.written = [one for one in self.take_back() if not _is_list_of_weights(*one[:2])]


def _is_list_of_weights(module: nn.Module, name: str) -> bool:
    """Recurrent layers of torch list their weights, anew when these are others: those of a replica belong to it."""
    return isinstance(module, nn.RNNBase) and name.startswith("_flat_weight")
