"""User code outside the units: one thread at a time, as if each micro-batch were alone.

[Note: user-code lock]
User code was written for one thread. The user-code lock keeps it so: the thread of a micro-batch holds the lock, except
while a unit computes and while the thread waits. Handing the lock to another micro-batch is a context switch::

    micro-batch 0   user code | unit ........... | user code | unit ...
    micro-batch 1   waits     | user code | unit ............ | user code | ...
                              ^ switch            ^ switch     ^ switch

A switch swaps the attributes that the micro-batches have written on modules (``self.cur = batch``), and the states of
generators ([Note: random numbers of user code] in :mod:`usercode.generators`). If the same micro-batch takes the lock
again, nothing is swapped. So every micro-batch sees its own writes, starts from the state before the step, and what the
last micro-batch wrote is what remains: the semantics of a single call.

[Note: exclusive sections]
Some state belongs to the whole process: Python's and NumPy's generators, the default CPU generator where an operator
accepts no other, the generator of a GPU that several devices share, and what torch replaces while it compiles. A unit
that needs such state enters ``exclusive()``, which is re-entrant: no user code runs meanwhile, and no other exclusive
section. With ``alone=True`` no other unit runs either; this is for a step whose units are compiled, and there every
unit runs inside ``unit_running()``. No thread waits for ever, because every thread takes what it needs in this order::

    1. walking(), on GPUs                   a backward that holds the user-code lock
    2. the compute lane of its device       every unit; a backward that runs user code
    3. the generator of a GPU               units that draw there, and user code for each draw
    4. unit_running(), or their absence     units of a step that compiles, or the unit that is being compiled
    5. the user-code lock                   user code (hooks inside units, too), or exclusive()

and a thread that has one of them waits only for those below it. User code releases the lock before it calls a unit or
waits for an upload or a generator. Autograd's thread of a GPU serves all backwards there: while it runs user code that
gives up the lock, to call a unit again, no thread with the lock may wait for it. Hence ``walking()``.

[Note: attribute writes]
Writes are noticed by a replacement of ``nn.Module.__setattr__`` (:mod:`engine.patches`), which ignores threads that are
not of a micro-batch. The same record serves three purposes: the swap above; units that read what user code wrote on
them (an input by another way); units that write what user code reads (an output by another way). ``requires_grad`` of
parameters is such an attribute: a step may freeze modules for a while (a reference model with its adapters disabled). A
unit runs with the flags that its caller had: ``Call.trained``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch import nn
from torch.overrides import TorchFunctionMode

from ..common.attributes import MISSING, Attributes, UnitWrites, assign, read
from ..common.errors import StepAborted
from ..common.thread_locals import AutogradLocal
from ..weights.attributes import note_left
from .collected_lists import Copies, content, follow
from .generators import UserGenerators
from .outputs import without_graph
from .running_units import RECHECK_S, RunningUnits


@dataclass(eq=False)
class UserCodeState:
    """What belongs to one micro-batch while it runs user code."""

    index: int
    seed: int  # of the micro-batch in this step
    is_alone: bool = True  # whether it is the only one of the step
    autocast_device: str = "cpu"  # device type of autocast, that of the GPUs if there are any
    overlay: Attributes = field(default_factory=dict)  # its values of attributes, valid while another one has the lock
    copies: Copies = field(default_factory=Copies)  # the lists and dicts of its own
    unit_writes: UnitWrites | None = None  # where writes go while the thread is inside a unit; None outside units
    is_recomputing: bool = False  # whether a unit runs again, for its backward: its effects outside are there
    has_cuts: bool = False  # whether its graph leads through a unit
    lock: UserCodeLock | None = None  # of the step; None when no step runs
    call_unit: Callable[..., Any] | None = None  # runs a unit; None while the thread is inside one
    # See [Note: implicit transfers]; None in user code, where it is on the thread's stack of modes.
    mode: TorchFunctionMode | None = None
    meet: Callable[..., Any] | None = None  # brings it to a barrier, see [Note: barriers]; None where there are none
    on_module_hook: Callable[[], None] = lambda: None  # called when user code registers a forward hook on a module
    # Hooks on modules that this micro-batch has registered, by (id of the module, code).
    own_hooks: dict[tuple[int, Any], list[Any]] = field(default_factory=dict)
    # id of a dict of hooks that it has changed -> that, and what was in it before.
    hooks_before: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    # Gives what a checkpoint has to run again in the backward, for a function that it runs now.
    recomputed: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function
    # Called when user code wants something in the backward: a checkpoint, a hook on a tensor.
    on_late_code: Callable[[], None] = lambda: None
    # Whether what the user compiled runs compiled in the unit that it is inside; None where that is not decided.
    runs_compiled: bool | None = None
    has_compiled: bool = False  # whether something has been compiled for it
    # Called when something that the user compiled runs as it is, with what torch would compile it by.
    on_compiled: Callable[[UserCodeState, Any], None] = lambda state, callback: None


class UserCodeLock:
    """The lock of [Note: user-code lock]; made for one step.

    Args:
        exempt: module classes that are shared by all micro-batches (metrics): never isolated.
        aborted: tells whether waiting has become pointless.
        switches: flags that were on for a while only, by (id of the module, name); hooks, by their code; of all steps.
        draws_foreign: see :class:`UserGenerators`; all steps share it.

    Attributes:
        switches_flags: whether user code has switched ``requires_grad`` of any parameter.
        registered: buffers that a unit has registered in this step, by (id of the module, name), and whether they are
            persistent: attributes of their micro-batches until it ends.
    """

    def __init__(
        self,
        exempt: tuple[type, ...],
        aborted: Callable[[], bool],
        switches: set[tuple[int, Any]] | None = None,
        draws_foreign: threading.Event | None = None,
    ) -> None:
        self._exempt = exempt
        self._aborted = aborted
        self.switches = set() if switches is None else switches
        self.switches_flags = False
        self.registered: dict[tuple[int, str], bool] = {}
        self._lock = threading.Lock()
        self._holder: UserCodeState | None = None  # the micro-batch that is in user code
        self._exclusive: int | None = None  # the thread that is in an exclusive section
        self._units = RunningUnits(aborted)
        self._walk = threading.Lock()
        self._walker: UserCodeState | None = None  # has it
        self._current: UserCodeState | None = None  # the micro-batch whose values modules and generator have
        self._baseline: Attributes = {}  # values before the step of what micro-batches have written
        self._latched: dict[tuple[int, str], Any] = {}
        self._changed: Callable[[], Iterable[tuple[nn.Module, str]]] = tuple  # see :meth:`recording`
        self._generators = UserGenerators(threading.Event() if draws_foreign is None else draws_foreign)

    # --- who runs ----------------------------------------------------------------------------------------------------

    def acquire(self, state: UserCodeState) -> None:
        """Takes the lock for a micro-batch.

        Raises:
            StepAborted: if another thread failed meanwhile.
        """
        if not self._lock.acquire(blocking=False):
            self._wait()
        self._holder = state
        if self._current is not state:
            self._switch_to(state)

    def _wait(self) -> None:
        """Takes the lock, which another thread has."""
        while not self._lock.acquire(timeout=RECHECK_S):
            if self._aborted():
                raise StepAborted

    def release(self, state: UserCodeState) -> None:
        """Gives the lock back; does nothing if ``state`` does not hold it."""
        if self._holder is state:
            self._holder = None
            self._lock.release()

    def is_held_by(self, state: UserCodeState) -> bool:
        """Whether the calling thread, which is that of ``state``, runs user code or excludes it."""
        return self._holder is state or self._exclusive == threading.get_ident()

    @contextlib.contextmanager
    def released(self, state: UserCodeState) -> Iterator[None]:
        """Without the lock inside, with it again afterwards (if it was held before)."""
        held = self._holder is state
        self.note_changed(state)
        self.release(state)
        try:
            yield
        finally:
            if held:
                self.acquire(state)

    @contextlib.contextmanager
    def walking(self, state: UserCodeState) -> Iterator[None]:
        """For a backward on GPUs that holds the lock, or will: see [Note: exclusive sections]. Re-entrant."""
        if self._walker is state:
            yield
            return
        if not self._walk.acquire(blocking=False):
            with self.released(state):
                while not self._walk.acquire(timeout=RECHECK_S):
                    if self._aborted():
                        raise StepAborted
        self._walker = state
        try:
            yield
        finally:
            self._walker = None
            self._walk.release()

    @contextlib.contextmanager
    def exclusive(self, *, alone: bool = False) -> Iterator[None]:
        """For a unit that needs state of the process; see [Note: exclusive sections].

        The calling thread is in a unit, or in a hook of one; not inside :meth:`unit_running` if it wants to be alone.

        Raises:
            StepAborted: if another thread failed meanwhile.
        """
        thread = threading.get_ident()
        holder = self._holder
        if self._exclusive == thread or (holder is not None and holder is current()):
            yield
            return
        with self._units.none_running() if alone else contextlib.nullcontext():
            if not self._lock.acquire(blocking=False):
                self._wait()
            self._exclusive = thread
            try:
                yield
            finally:
                self._exclusive = None
                self._lock.release()

    def unit_running(self) -> contextlib.AbstractContextManager[None]:
        """Around a unit, in a step in which something may be compiled: no other thread compiles meanwhile."""
        return self._units.one_running()

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Inside :meth:`unit_running`: as an exclusive section, alone, for something that the unit compiles."""
        with self._units.paused(), self.exclusive(alone=True):
            yield

    @contextlib.contextmanager
    def in_user_code(self, state: UserCodeState) -> Iterator[None]:
        """For user code that a unit calls back (hooks on its submodules): its writes are those of user code."""
        writes, state.unit_writes = state.unit_writes, None
        call_unit, state.call_unit = state.call_unit, None
        mode, state.mode = state.mode, None
        try:
            if self._exclusive == threading.get_ident():
                self._switch_to(state)
            else:
                self.acquire(state)
            with mode or contextlib.nullcontext():
                yield
        finally:
            self.note_changed(state)
            self.release(state)
            state.unit_writes, state.call_unit, state.mode = writes, call_unit, mode

    # --- what is swapped ---------------------------------------------------------------------------------------------

    def _switch_to(self, state: UserCodeState) -> None:
        """The thread excludes all user code; modules and the generator get the values of ``state``."""
        if self._current is state:
            return
        self._switch_off()
        for (_, name), (module, value) in state.overlay.items():
            assign(module, name, value)
        self._generators.show(state.index, state.seed)
        self._current = state

    def _switch_off(self) -> None:
        """Modules are as before the step; the micro-batch that was current keeps its values."""
        state, self._current = self._current, None
        if state is None:
            return
        for key, (module, _) in state.overlay.items():
            state.overlay[key] = (module, read(module, key[1]))
            assign(module, key[1], self._baseline[key][1])
        self._generators.hide(state.index)

    def suspend(self) -> None:
        """No micro-batch is current any more: modules and generators are as before the step."""
        self._switch_off()
        self._generators.come_back()

    @contextlib.contextmanager
    def recording(self, state: UserCodeState, changed: Callable[[], Iterable[tuple[nn.Module, str]]]) -> Iterator[None]:
        """While open, the micro-batch runs alone, which shows what it draws from; ``changed`` gives attributes whose
        lists or dicts have changed since it was last called."""
        self._changed = changed
        with self._generators.watching(state.index, state.seed):
            yield
            self._switch_off()
        self._changed = tuple

    def note_changed(self, state: UserCodeState) -> None:
        """User code of ``state`` is about to give up the lock: lists and dicts that it has changed are its own."""
        for module, name in self._changed():
            self.note(state, module, name)

    # --- attribute writes --------------------------------------------------------------------------------------------

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

        If a micro-batch sets the flag back, the flag was a temporary switch: from now on each micro-batch has it for
        itself. The first micro-batch of a step, which runs alone, shows which flags are switches.
        """
        module, before = self._baseline[key]
        if value and before is not True and key[1] != "training" and key not in self.switches:
            self._latched.setdefault(key, before)
            self._baseline[key] = (module, True)
        elif not value and key in self._latched:
            self.switches.add(key)
            self._baseline[key] = (module, self._latched.pop(key))

    def baseline(self) -> list[tuple[nn.Module, str, Any]]:
        """Attributes that some micro-batch has written, with their values from before the step."""
        return [(module, name, value) for (_, name), (module, value) in list(self._baseline.items())]

    # --- the step ----------------------------------------------------------------------------------------------------

    def open(self, states: Sequence[UserCodeState], copies: Callable[[], Copies]) -> None:
        """The step begins. ``copies`` gives what every micro-batch has for itself from the beginning."""
        for state in states:
            state.lock, state.copies = self, copies()
            for module, name, value in state.copies.attributes:
                self.note(state, module, name)
                state.overlay[id(module), name] = (module, value)

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
            self._generators.leave()

    def close(self, states: Sequence[UserCodeState], *, keep_writes: bool) -> None:
        """Ends the step: the writes of the last micro-batch stay (detached), or none."""
        self.suspend()
        if keep_writes:
            left = {key: found for state in states for key, found in state.overlay.items()}
            for place, (module, value) in left.items():
                name = place[1]
                note_left(module, name, value)
                if place in self.registered and value is not MISSING:
                    module.register_buffer(name, None, self.registered[place])
                assign(module, name, without_graph(value))
        else:
            for key, before in self._latched.items():
                assign(self._baseline[key][0], key[1], before)
        for state in states:
            state.overlay.clear()
            state.lock, state.meet, state.copies = None, None, Copies()
        self._baseline.clear()


# --- the micro-batch of a thread -------------------------------------------------------------------------------------


_microbatch: AutogradLocal[UserCodeState] = AutogradLocal("roundpipe_microbatch")


current: Callable[[], UserCodeState | None] = _microbatch.get
"""The micro-batch that the calling thread, or that of autograd in a backward that it has begun, works for, or None."""


@contextlib.contextmanager
def entered(state: UserCodeState | None) -> Iterator[None]:
    """Makes ``state`` the micro-batch of the calling thread; with None what it writes on modules is not noted."""
    before = current()
    _microbatch.set(state)
    try:
        yield
    finally:
        _microbatch.set(before)
