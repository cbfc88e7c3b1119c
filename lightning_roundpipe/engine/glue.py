"""Glue: user code outside the units, one thread at a time, as if each micro-batch were alone.

[Note: glue lock]
User code was written for one thread. The glue lock keeps it so: a micro-batch thread holds it except while a unit
computes and while it waits. Handing the lock to another micro-batch is a context switch: attributes that the
micro-batch has written on modules (``self.cur = batch``) and the state of the CPU generator are swapped, lazily, when
a *different* micro-batch takes the lock. So every micro-batch sees its own writes, starts from the state before the
step, and what the last micro-batch wrote is what remains: the semantics of a single call.

[Note: attribute writes]
Writes are noticed by a replacement of ``nn.Module.__setattr__`` that is installed while a step runs and ignores
threads that are not micro-batch threads. The same record serves three purposes: the swap above; units that read what
glue wrote on them (an input by another way); units that write what glue reads (an output by another way).

[Note: growing lists]
``self.validation_step_outputs.append(x)`` is how Lightning projects collect step outputs. Lists that are attributes of
the root module are given to every micro-batch as a copy; what the micro-batches appended is merged into what one call
on the whole batch would have appended, and lands in the original list.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .dispatch import StepAborted
from .randomness import derive_seed

MISSING: Any = object()
_RECHECK_S = 2.0
_local = threading.local()


class UnitWrites:
    """Attributes that a unit writes while it runs: (id of the module, name) -> (module, value before)."""

    def __init__(self) -> None:
        self.before: dict[tuple[int, str], tuple[nn.Module, Any]] = {}

    def note(self, module: nn.Module, name: str) -> None:
        """Called before the attribute changes."""
        if (id(module), name) not in self.before:
            self.before[id(module), name] = (module, module.__dict__.get(name, MISSING))

    def take_back(self) -> list[tuple[nn.Module, str, Any]]:
        """Restores the values from before; what was written: (module, name, value), registered names left out."""
        written = []
        for (_, name), (module, before) in self.before.items():
            if _is_registered(module, name):
                continue
            written.append((module, name, module.__dict__.get(name, MISSING)))
            assign(module, name, before)
        return written


class GlueState:
    """What belongs to one micro-batch while it runs glue code.

    Attributes:
        overlay: attribute values of this micro-batch, valid while another one holds the lock.
        unit_writes: where writes go while the thread is inside a unit; None outside units.
    """

    def __init__(self, index: int, seed: int) -> None:
        self.index = index
        self.overlay: dict[tuple[int, str], tuple[nn.Module, Any]] = {}
        self.random_state: Tensor | None = None
        self.seed = seed
        self.unit_writes: UnitWrites | None = None
        self.lock: GlueLock | None = None
        self.call_unit: Callable[..., Any] | None = None


class GlueLock:
    """The lock of [Note: glue lock]; made for one step.

    Args:
        exempt: module classes that are shared by all micro-batches (metrics): never isolated.
        aborted: tells whether waiting has become pointless.
    """

    def __init__(self, exempt: tuple[type, ...], aborted: Callable[[], bool]) -> None:
        self._lock = threading.Lock()
        self._exempt = exempt
        self._aborted = aborted
        self._last: GlueState | None = None
        self._holder: GlueState | None = None
        self._baseline: dict[tuple[int, str], tuple[nn.Module, Any]] = {}
        self._outer_random_state = torch.default_generator.get_state()

    def acquire(self, state: GlueState) -> None:
        """Takes the lock for a micro-batch.

        Raises:
            StepAborted: if another thread failed meanwhile.
        """
        while not self._lock.acquire(timeout=_RECHECK_S):
            if self._aborted():
                raise StepAborted
        self._holder = state
        if self._last is not state:
            self._switch_to(state)

    def release(self, state: GlueState) -> None:
        """Gives the lock back; does nothing if ``state`` does not hold it."""
        if self._holder is state:
            self._holder = None
            self._lock.release()

    @contextlib.contextmanager
    def released(self, state: GlueState) -> Iterator[None]:
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
        """For a unit that must touch process-global state: excludes all glue, switches nothing."""
        while not self._lock.acquire(timeout=_RECHECK_S):
            if self._aborted():
                raise StepAborted
        try:
            yield
        finally:
            self._lock.release()

    def write(self, state: GlueState, module: nn.Module, name: str, value: Any) -> None:
        """Sets an attribute on behalf of a micro-batch that holds the lock."""
        self.note(state, module, name)
        module.__dict__[name] = value

    def note(self, state: GlueState, module: nn.Module, name: str) -> None:
        """An attribute is about to be written by glue code of ``state``."""
        if isinstance(module, self._exempt):
            return
        key = (id(module), name)
        if key not in state.overlay:
            if key not in self._baseline:
                self._baseline[key] = (module, module.__dict__.get(name, MISSING))
            state.overlay[key] = (module, MISSING)

    def _switch_to(self, state: GlueState) -> None:
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

    def _swap_out(self, state: GlueState) -> None:
        for key, (module, _) in state.overlay.items():
            state.overlay[key] = (module, module.__dict__.get(key[1], MISSING))
            assign(module, key[1], self._baseline[key][1])

    def baseline(self) -> list[tuple[nn.Module, str, Any]]:
        """Attributes that some micro-batch has written, with their values from before the step."""
        return [(module, name, value) for (_, name), (module, value) in list(self._baseline.items())]

    def suspend(self) -> None:
        """No micro-batch is current any more: modules and the generator are as before the step."""
        if self._last is not None:
            self._swap_out(self._last)
            self._last = None
        torch.default_generator.set_state(self._outer_random_state)

    def close(self, states: Sequence[GlueState], *, keep_writes: bool) -> None:
        """Ends the step: the writes of the last micro-batch stay (detached), or none."""
        self.suspend()
        if keep_writes:
            for state in states:
                for (_, name), (module, value) in state.overlay.items():
                    assign(module, name, value.detach() if _has_graph(value) else value)
        for state in states:
            state.overlay.clear()
            state.lock = None
        self._baseline.clear()


def _has_graph(value: Any) -> bool:
    return isinstance(value, Tensor) and value.grad_fn is not None


def assign(module: nn.Module, name: str, value: Any) -> None:
    """Sets or (``MISSING``) removes a plain attribute, unnoticed."""
    if value is MISSING:
        module.__dict__.pop(name, None)
    else:
        module.__dict__[name] = value


class GrowingLists:
    """Lists on the root module that micro-batches append to; see [Note: growing lists]."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._originals = {
            name: value for name, value in root.__dict__.items() if type(value) is list and not name.startswith("_")
        }

    def hand_out(self, states: Sequence[GlueState], lock: GlueLock) -> None:
        """Gives every micro-batch its own copy."""
        for state in states:
            for name, original in self._originals.items():
                lock.note(state, self._root, name)
                state.overlay[id(self._root), name] = (self._root, list(original))

    def collect(self, states: Sequence[GlueState], merge: Callable[[list[Any]], Any]) -> None:
        """Puts what was appended, merged over the micro-batches, into the original lists.

        Comes between :meth:`GlueLock.suspend` and :meth:`GlueLock.close`.
        """
        for name, original in self._originals.items():
            key = (id(self._root), name)
            copies = [state.overlay.pop(key, (self._root, MISSING))[1] for state in states]
            start = len(original)
            if not all(type(c) is list and _starts_with(c, original) for c in copies):
                self._root.__dict__[name] = copies[-1]  # replaced or rewritten: the last micro-batch counts
                continue
            appended = [c[start:] for c in copies]
            if len({len(items) for items in appended}) == 1:
                original.extend(merge(list(items)) for items in zip(*appended, strict=True))
            else:
                original.extend(item for items in appended for item in items)


def _starts_with(longer: list[Any], shorter: list[Any]) -> bool:
    """By identity: items may be tensors, whose ``==`` is elementwise."""
    return len(longer) >= len(shorter) and all(a is b for a, b in zip(longer, shorter, strict=False))


def current() -> GlueState | None:
    """The micro-batch of the calling thread, or None outside micro-batch threads."""
    return getattr(_local, "state", None)


@contextlib.contextmanager
def entered(state: GlueState) -> Iterator[None]:
    """Makes ``state`` the micro-batch of the calling thread."""
    _local.state = state
    try:
        yield
    finally:
        _local.state = None


_original_setattr = nn.Module.__setattr__
_original_delattr = nn.Module.__delattr__
_patch_lock = threading.Lock()
_patch_users = 0


def _note(module: nn.Module, name: str) -> None:
    state: GlueState | None = getattr(_local, "state", None)
    if state is None:
        return
    if state.unit_writes is not None:
        state.unit_writes.note(module, name)
    elif state.lock is not None and not _is_registered(module, name):
        state.lock.note(state, module, name)


def _is_registered(module: nn.Module, name: str) -> bool:
    """Parameters, buffers and submodules are shared by all micro-batches; only plain attributes are isolated."""
    state = module.__dict__
    return any(name in state.get(kind, ()) for kind in ("_parameters", "_buffers", "_modules"))


def _noting_setattr(self: nn.Module, name: str, value: Any) -> None:
    _note(self, name)
    _original_setattr(self, name, value)


def _noting_delattr(self: nn.Module, name: str) -> None:
    _note(self, name)
    _original_delattr(self, name)


@contextlib.contextmanager
def noting_writes() -> Iterator[None]:
    """Attribute writes on modules are noted while this is open; see [Note: attribute writes]."""
    global _patch_users, _original_setattr, _original_delattr
    with _patch_lock:
        _patch_users += 1
        if _patch_users == 1:
            _original_setattr, _original_delattr = nn.Module.__setattr__, nn.Module.__delattr__
            nn.Module.__setattr__ = _noting_setattr  # type: ignore[method-assign]
            nn.Module.__delattr__ = _noting_delattr  # type: ignore[method-assign]
    try:
        yield
    finally:
        with _patch_lock:
            _patch_users -= 1
            if _patch_users == 0:
                nn.Module.__setattr__ = _original_setattr  # type: ignore[method-assign]
                nn.Module.__delattr__ = _original_delattr  # type: ignore[method-assign]
