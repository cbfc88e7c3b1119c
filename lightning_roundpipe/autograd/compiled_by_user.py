"""Functions and modules that the user has compiled: which run compiled, and which as they are.

[Note: functions that the user compiled]
What sits in units runs compiled, from the second step on that meets it, but for CUDA graphs; what lies around or
between units runs as it is, which one warning says::

    self.body = torch.compile(body)       around units    as it is: a unit in it goes to its device on its own
    torch.compile(loss)(y)                between units   as it is, see [Note: implicit transfers]
    block.compile()                       a unit          compiled, on every replica
    block.mlp = torch.compile(mlp)        in a unit       compiled, on every replica
    flex_attention = torch.compile(...)   in a unit       compiled

A unit that is looked at, because it is called in a new way or draws random numbers on the host, runs inside a dispatch
mode. There torch would skip a function, and remember to skip it for good: so it is never asked. And a unit of which the
engine follows what it does by the way (:func:`.compiling.suits`), or which draws, runs as
it is, so that its recomputation does the same.

Torch asks for every call of such a function by what it is to be compiled (``_callback_from_stance``). This is replaced,
and so is the stance (``torch.compiler.set_stance``), by one that says ``force_eager`` on threads where nothing is to be
compiled; without, torch would complain about ``fullgraph=True``. What compiles does so alone, as in [Note: compiled
units]: the unit that waits for it does not count as running. Two that want the same at a time both compile it, which is
rare on GPUs, each of which has versions of its own. The first step of a run does not know yet that units may compile,
and does not count them.
"""

from __future__ import annotations

import contextlib
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import torch._dynamo
from torch import nn

from ..common.attributes import attribute_set
from ..usercode.lock import UserCodeState, current, entered
from .compiling import compile_settings

_eval_frame: Any = torch._dynamo.eval_frame
_MAX_NAMES = 3


class CompiledByUser:
    """What of that a run has met, and whether the user has been told.

    Attributes:
        is_in_units: whether there is some in units.
    """

    def __init__(self) -> None:
        self.is_in_units = False
        self._known: set[Any] = set()
        self._names: dict[str, None] = {}  # in order
        self._is_told = False

    def note(self, state: UserCodeState, callback: Any) -> None:
        """On any thread: what torch would compile by ``callback`` runs as it is."""
        if state.unit_writes is not None and state.runs_compiled is None:
            self.is_in_units = True
        elif callback not in self._known:
            self._known.add(callback)
            called = _called()
            # Of a unit that is compiled in place the replica is: the call that user code makes is only on the way.
            if not hasattr(getattr(called, "__dict__", {}).get("forward"), "roundpipe_original"):
                self._names[_name_of(called)] = None

    def tell(self, *, is_final: bool) -> None:
        """After a step: warns once of what runs as it is.

        Args:
            is_final: whether units could compile in the step; otherwise there may be more of it in the next one.
        """
        if self._is_told or not self._names or (self.is_in_units and not is_final):
            return
        self._is_told = True
        names = [*self._names][:_MAX_NAMES]
        more = f" and {len(self._names) - len(names)} more" if len(self._names) > len(names) else ""
        warnings.warn(
            f"torch.compile has no effect on {', '.join(names)}{more}: what is compiled runs inside units alone (the "
            "layers of the model), and in those that neither draw random numbers nor write attributes or buffers nor "
            "have hooks, without CUDA graphs. RoundPipeStrategy(compile_units=True) compiles the units themselves",
            stacklevel=2,
        )


@contextlib.contextmanager
def compiled_functions_followed() -> Iterator[None]:
    """While open, micro-batches run what the user has compiled as [Note: functions that the user compiled] says."""
    original, stance = _eval_frame._callback_from_stance, _Stance(_eval_frame._stance)

    def callback_of(callback: Any) -> Any:
        state = current()
        if state is None:
            return original(callback)
        if callback in (None, False):  # of torch's own functions, or of what runs if it has been compiled
            return callback if stance.users == "default" else original(callback)
        if state.runs_compiled and _uses_cuda_graphs(callback):
            state.runs_compiled = False  # for the rest of the unit: the stance does not know what is called
        if not state.runs_compiled:
            state.on_compiled(state, callback)
            return None
        found = original(callback)
        return _Alone(found, state) if callable(found) else found

    with (
        attribute_set(_eval_frame, "_callback_from_stance", callback_of),
        attribute_set(_eval_frame, "_stance", stance),
    ):
        yield


class _Stance:
    """That of the user, but where nothing is to be compiled. Torch reads its attributes."""

    def __init__(self, before: Any) -> None:
        self._before = before

    @property
    def users(self) -> str:
        """The user's."""
        return str(self._before.stance)

    @property
    def stance(self) -> str:
        state = current()
        return self.users if state is None or state.runs_compiled else "force_eager"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._before, name)


class _Alone:
    """Compiles a frame as ``callback`` does, while no user code and no other unit runs."""

    def __init__(self, callback: Any, state: UserCodeState) -> None:
        self._callback, self._state = callback, state
        self._torchdynamo_orig_backend = callback  # so that torch finds what it has compiled by that

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = self._state
        assert state.lock is not None
        state.has_compiled = True
        with state.lock.compiling(), entered(None), compile_settings():
            return self._callback(*args, **kwargs)


def _uses_cuda_graphs(callback: Any) -> bool:
    """They find weights where they were when the graph was recorded; here they come and go."""
    backend = callback
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    settings = getattr(getattr(backend, "compiler_fn", backend), "config", None)
    is_asked = isinstance(settings, dict) and bool(settings.get("triton.cudagraphs"))
    return is_asked or getattr(backend, "compiler_name", None) == "cudagraphs"


def _called() -> Any:
    """What is being called: the function or module that torch has wrapped, further up on the stack."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and not (frame.f_globals is vars(_eval_frame) and "fn" in frame.f_locals):
        frame = frame.f_back
    function = None if frame is None else frame.f_locals["fn"]
    for name in ("__self__", "__wrapped__"):  # a method of a module, or a module in a function of torch's own
        if isinstance(owner := getattr(function, name, None), nn.Module):
            return owner
    return function


def _name_of(called: Any) -> str:
    if isinstance(called, nn.Module):
        return type(called).__name__
    return str(getattr(called, "__qualname__", "a function"))
