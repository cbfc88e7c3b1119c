"""User code outside the units: one thread at a time, as if each micro-batch were alone.

[Note: user-code lock]
User code was written for one thread. The user-code lock keeps it so: a micro-batch thread holds it except while a unit
computes and while it waits. Handing the lock to another micro-batch is a context switch: attributes that the
micro-batch has written on modules (``self.cur = batch``) and the state of the CPU generator are swapped, lazily, when
a *different* micro-batch takes the lock. So every micro-batch sees its own writes, starts from the state before the
step, and what the last micro-batch wrote is what remains: the semantics of a single call.

[Note: attribute writes]
Writes are noticed by a replacement of ``nn.Module.__setattr__`` that is installed as long as the engine is open and
ignores threads that are not micro-batch threads. The same record serves three purposes: the swap above; units that
read what user code wrote on them (an input by another way); units that write what user code reads (an output by another
way).

``requires_grad`` of parameters is such an attribute: a step may freeze modules for a while (a reference model with its
adapters disabled). A unit runs with the flags that its caller had: ``Call.trained``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..common.attributes import MISSING, assign, read
from ..common.errors import StepAborted
from ..common.seeds import derive_seed
from .containers import content, follow
from .outputs import brought_home

_RECHECK_S = 2.0
_local = threading.local()


class UnitWrites:
    """Attributes that a unit writes while it runs: (id of the module, name) -> (module, value before)."""

    def __init__(self) -> None:
        self.before: dict[tuple[int, str], tuple[nn.Module, Any]] = {}

    def note(self, module: nn.Module, name: str) -> None:
        """Called before the attribute changes."""
        if (id(module), name) not in self.before:
            self.before[id(module), name] = (module, read(module, name))

    def take_back(self) -> list[tuple[nn.Module, str, Any]]:
        """Restores the values from before; what was written: (module, name, value), registered names left out."""
        written = []
        for (_, name), (module, before) in self.before.items():
            if _is_registered(module, name) or name in module.__dict__.get("_buffers", ()):
                continue
            written.append((module, name, read(module, name)))
            assign(module, name, before)
        return written


def _nothing() -> None:
    """Where a step wants to know of nothing."""


class UserCodeState:
    """What belongs to one micro-batch while it runs user code.

    Attributes:
        overlay: attribute values of this micro-batch, valid while another one holds the lock.
        unit_writes: where writes go while the thread is inside a unit; None outside units.
        is_recomputing: whether the thread runs a unit again, for its backward: what the unit does outside itself has
            been done.
        call_unit: runs a unit; None while the thread is inside one.
        meet: brings the micro-batch to a barrier, see [Note: barriers]; None where there are none.
        on_module_hook: called when user code registers a forward hook on a module.
        on_checkpoint: called when user code uses an activation checkpoint.
        loose: takes the gradients of leaves while the engine walks the graph of user code, see
            [Note: loose parameters] in :mod:`usercode.loose_gradients`; None otherwise.
    """

    def __init__(self, index: int, seed: int) -> None:
        self.index = index
        self.overlay: dict[tuple[int, str], tuple[nn.Module, Any]] = {}
        self.random_state: Tensor | None = None
        self.seed = seed
        self.unit_writes: UnitWrites | None = None
        self.is_recomputing = False
        self.lock: UserCodeLock | None = None
        self.call_unit: Callable[..., Any] | None = None
        self.meet: Callable[..., Any] | None = None
        self.loose: Any = None
        self.on_module_hook: Callable[[], None] = _nothing
        self.on_checkpoint: Callable[[], None] = _nothing


class UserCodeLock:
    """The lock of [Note: user-code lock]; made for one step.

    Args:
        exempt: module classes that are shared by all micro-batches (metrics): never isolated.
        aborted: tells whether waiting has become pointless.
        switches: flags that turned out to be switched on for a while only; all steps share them.
    """

    def __init__(
        self, exempt: tuple[type, ...], aborted: Callable[[], bool], switches: set[tuple[int, str]] | None = None
    ) -> None:
        self._switches = set() if switches is None else switches
        self._lock = threading.Lock()
        self._exempt = exempt
        self._aborted = aborted
        self._last: UserCodeState | None = None
        self._holder: UserCodeState | None = None
        self._borrower: int | None = None  # thread that borrowed the lock
        self._baseline: dict[tuple[int, str], tuple[nn.Module, Any]] = {}
        self._latched: dict[tuple[int, str], Any] = {}
        self.switches_flags = False  # whether user code has switched requires_grad of any parameter
        self._outer_random_state = torch.default_generator.get_state()

    def acquire(self, state: UserCodeState) -> None:
        """Takes the lock for a micro-batch.

        Raises:
            StepAborted: if another thread failed meanwhile.
        """
        self._take()
        self._holder = state
        self._switch_to(state)

    def _take(self) -> None:
        if not self._lock.acquire(blocking=False):
            while not self._lock.acquire(timeout=_RECHECK_S):
                if self._aborted():
                    raise StepAborted

    def release(self, state: UserCodeState) -> None:
        """Gives the lock back; does nothing if ``state`` does not hold it."""
        if self._holder is state:
            self._holder = None
            self._lock.release()

    def is_held_by(self, state: UserCodeState) -> bool:
        """Whether the calling thread, which is that of ``state``, runs user code or excludes it."""
        return self._holder is state or self._borrower == threading.get_ident()

    @contextlib.contextmanager
    def released(self, state: UserCodeState) -> Iterator[None]:
        """Without the lock inside, with it again afterwards (if it was held before)."""
        held = self._holder is state
        self.release(state)
        try:
            yield
        finally:
            if held:
                self.acquire(state)

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[None]:
        """For a unit that must touch process-global state: excludes all user code, switches nothing. Re-entrant."""
        if self._borrower == threading.get_ident():
            yield
            return
        self._take()
        self._borrower = threading.get_ident()
        try:
            yield
        finally:
            self._borrower = None
            self._lock.release()

    @contextlib.contextmanager
    def in_user_code(self, state: UserCodeState) -> Iterator[None]:
        """For user code that a unit calls back (hooks on its submodules): its writes are those of user code."""
        writes, state.unit_writes = state.unit_writes, None
        call_unit, state.call_unit = state.call_unit, None
        try:
            if self._borrower == threading.get_ident():
                self._switch_to(state)
                yield
            else:
                self.acquire(state)
                try:
                    yield
                finally:
                    self.release(state)
        finally:
            state.unit_writes, state.call_unit = writes, call_unit

    def write(self, state: UserCodeState, module: nn.Module, name: str, value: Any) -> None:
        """Sets an attribute on behalf of a micro-batch that holds the lock."""
        self.note(state, module, name)
        assign(module, name, value)

    def note(self, state: UserCodeState, module: nn.Module, name: str, value: Any = None) -> None:
        """An attribute is about to be written by user code of ``state``."""
        if isinstance(module, self._exempt):
            return
        key = (id(module), name)
        if key not in state.overlay:
            if key not in self._baseline:
                self._baseline[key] = (module, read(module, name))
            state.overlay[key] = (module, MISSING)
        if type(value) is bool:
            self._latch(key, value)

    def note_flag(self, state: UserCodeState, parameter: nn.Parameter) -> None:
        """``requires_grad`` of a parameter is about to be switched by user code of ``state``."""
        self.switches_flags = True
        self.note(state, cast(nn.Module, parameter), "requires_grad")  # kept and swapped as if it were a module's

    def _latch(self, key: tuple[int, str], value: bool) -> None:
        """A flag that user code sets is seen by all micro-batches: it guards what is done once ("hooks are installed").

        A micro-batch that takes it back takes it back for itself and for those that never set it. It is a temporary
        switch then, which each micro-batch has for itself from now on. The first one, which runs alone, shows which.
        """
        module, before = self._baseline[key]
        if value and before is not True and key[1] != "training" and key not in self._switches:
            self._latched.setdefault(key, before)
            self._baseline[key] = (module, True)
        elif not value and key in self._latched:
            self._switches.add(key)
            self._baseline[key] = (module, self._latched.pop(key))

    def _switch_to(self, state: UserCodeState) -> None:
        if self._last is state:
            return
        default = torch.default_generator
        if self._last is not None:
            self._swap_out(self._last)
            self._last.random_state = default.get_state()
        for (_, name), (module, value) in state.overlay.items():
            assign(module, name, value)
        if state.random_state is None:
            default.manual_seed(derive_seed(state.seed, state.index, -1))
        else:
            default.set_state(state.random_state)
        self._last = state

    def _swap_out(self, state: UserCodeState) -> None:
        for key, (module, _) in state.overlay.items():
            state.overlay[key] = (module, read(module, key[1]))
            assign(module, key[1], self._baseline[key][1])

    def baseline(self) -> list[tuple[nn.Module, str, Any]]:
        """Attributes that some micro-batch has written, with their values from before the step."""
        return [(module, name, value) for (_, name), (module, value) in list(self._baseline.items())]

    def suspend(self) -> None:
        """No micro-batch is current any more: modules and the generator are as before the step."""
        if self._last is not None:
            self._swap_out(self._last)
            self._last.random_state = torch.default_generator.get_state()
            self._last = None
        torch.default_generator.set_state(self._outer_random_state)

    @contextlib.contextmanager
    def gathered(self, states: Sequence[UserCodeState]) -> Iterator[None]:
        """All micro-batches have stopped: modules show what the last one has written, and what is written meanwhile, by
        a thread that is no micro-batch's, is written for all."""
        self.suspend()
        shown = dict(states[-1].overlay)
        for (_, name), (module, value) in shown.items():
            assign(module, name, value)
        before = {key: content(value) for key, (_, value) in shown.items()}
        try:
            yield
        finally:
            for key, (module, value) in shown.items():
                now = read(module, key[1])
                for state in states:
                    if now is not value:
                        state.overlay[key] = (module, now)
                    elif state is not states[-1] and key in state.overlay:
                        follow(state.overlay[key][1], before[key], now)
                assign(module, key[1], self._baseline[key][1])
            self._outer_random_state = torch.default_generator.get_state()

    def close(self, states: Sequence[UserCodeState], *, keep_writes: bool) -> None:
        """Ends the step: the writes of the last micro-batch stay (detached), or none."""
        self.suspend()
        if keep_writes:
            for state in states:
                for (_, name), (module, value) in state.overlay.items():
                    assign(module, name, _without_graph(value))
        for state in states:
            state.overlay.clear()
            state.lock = state.meet = None
        self._baseline.clear()


def _without_graph(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.grad_fn is None:
        return brought_home(value)
    kept: Tensor = brought_home(value.detach())
    if value.retains_grad:
        kept.grad = brought_home(value.grad)
    return kept


def current() -> UserCodeState | None:
    """The micro-batch of the calling thread, or None outside micro-batch threads."""
    return getattr(_local, "state", None)


@contextlib.contextmanager
def entered(state: UserCodeState) -> Iterator[None]:
    """Makes ``state`` the micro-batch of the calling thread."""
    _local.state = state
    try:
        yield
    finally:
        _local.state = None


@contextlib.contextmanager
def left() -> Iterator[None]:
    """The calling thread belongs to no micro-batch meanwhile: what it writes on modules is not noted."""
    state = current()
    _local.state = None
    try:
        yield
    finally:
        _local.state = state


_original_setattr = nn.Module.__setattr__
_original_delattr = nn.Module.__delattr__


def _note(module: nn.Module, name: str, value: Any = None) -> None:
    state: UserCodeState | None = getattr(_local, "state", None)
    if state is None:
        return
    if state.unit_writes is not None:
        state.unit_writes.note(module, name)
    elif state.lock is not None and not _is_registered(module, name):
        state.lock.note(state, module, name, value)


def _is_registered(module: nn.Module, name: str) -> bool:
    """Parameters and submodules are shared by all micro-batches; attributes and assigned buffers are isolated."""
    state = module.__dict__
    return any(name in state.get(kind, ()) for kind in ("_parameters", "_modules"))


def _noting_setattr(self: nn.Module, name: str, value: Any) -> None:
    _note(self, name, value)
    _original_setattr(self, name, value)


def _noting_delattr(self: nn.Module, name: str) -> None:
    _note(self, name)
    _original_delattr(self, name)


def _note_flag(parameter: nn.Parameter, value: bool) -> None:
    state: UserCodeState | None = getattr(_local, "state", None)
    if (
        state is not None
        and state.unit_writes is None
        and state.lock is not None
        and value != read(parameter, "requires_grad")
    ):
        state.lock.note_flag(state, parameter)


def _noting_parameter_setattr(self: nn.Parameter, name: str, value: Any) -> None:
    if name == "requires_grad":
        _note_flag(self, value)
    object.__setattr__(self, name, value)


def _noting_requires_grad_(self: nn.Parameter, requires_grad: bool = True) -> nn.Parameter:
    _note_flag(self, requires_grad)
    return Tensor.requires_grad_(self, requires_grad)  # type: ignore[return-value]


@contextlib.contextmanager
def noting_writes() -> Iterator[None]:
    """Attribute writes on modules are noted while this is open; see [Note: attribute writes]."""
    global _original_setattr, _original_delattr
    _original_setattr, _original_delattr = nn.Module.__setattr__, nn.Module.__delattr__
    nn.Module.__setattr__ = _noting_setattr  # type: ignore[method-assign]
    nn.Module.__delattr__ = _noting_delattr  # type: ignore[method-assign]
    # Parameters have neither of their own, and what is not there costs nothing outside of fits.
    nn.Parameter.__setattr__ = _noting_parameter_setattr  # type: ignore[method-assign,assignment]
    nn.Parameter.requires_grad_ = _noting_requires_grad_  # type: ignore[assignment]
    try:
        yield
    finally:
        nn.Module.__setattr__ = _original_setattr  # type: ignore[method-assign]
        nn.Module.__delattr__ = _original_delattr  # type: ignore[method-assign]
        del nn.Parameter.__setattr__, nn.Parameter.requires_grad_
