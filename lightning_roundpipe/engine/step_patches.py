"""Everything that the engine changes outside itself, and for how long.

[Note: patches]
Some replacements are methods of classes from which hundreds of others are derived (``nn.Module``): to set one makes
Python forget what it has cached about all of them, which takes milliseconds. They ask for the micro-batch of the
calling thread, and do what the original does where there is none. So they are installed once for all engines of the
process and stay as long as one of them is open (the Trainer keeps its engine open from set-up to tear-down) or runs
a step. The others are cheap, and undone at the end of each segment.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from torch import Tensor, nn

from .checkpointing import checkpoints_passed_through
from .glue import noting_writes
from .parametrizations import parametrizations_apart, power_iterations_once
from .patches import gradients_aside, guarded_grad, intercepted, intra_op_threads, noting_hooks, process_settings_kept
from .resources import Resources
from .seen_gradients import gradients_seen
from .units import UnitTable

_lock = threading.Lock()
_num_users = 0  # the lock is held where it changes
_installed = contextlib.ExitStack()


@contextlib.contextmanager
def classes_patched() -> Iterator[None]:
    """While open, on any thread, micro-batch threads find the replacements of classes; see [Note: patches]."""
    global _num_users, _installed
    with _lock:
        if not _num_users:
            with contextlib.ExitStack() as stack:
                stack.enter_context(noting_writes())
                stack.enter_context(noting_hooks())
                stack.enter_context(checkpoints_passed_through())
                _installed = stack.pop_all()
        _num_users += 1
    try:
        yield
    finally:
        with _lock:
            _num_users -= 1
            if not _num_users:
                _installed.close()


class StepPatches:
    """What a segment of a step changes outside itself.

    Args:
        sees_gradients: whether user code may look at gradients of earlier backwards.
    """

    def __init__(self, resources: Resources, table: UnitTable, *, sees_gradients: bool) -> None:
        self._resources = resources
        self._table = table
        self._sees_gradients = sees_gradients
        self._aside = contextlib.ExitStack()
        self._lock = threading.Lock()
        self._take: Callable[[], dict[nn.Parameter, Tensor]] = dict

    def open(self, stack: contextlib.ExitStack) -> None:
        """A segment begins, which ends when ``stack`` is closed; but for gradients that are aside."""
        resources = self._resources
        stack.enter_context(intercepted(self._table))
        stack.enter_context(guarded_grad())
        stack.enter_context(process_settings_kept())
        stack.enter_context(parametrizations_apart())
        stack.enter_context(power_iterations_once())
        stack.enter_context(intra_op_threads(resources.num_threads))

    def put_gradients_aside(self) -> None:
        """Before the first backward of a segment; see [Note: gradients that are seen] in :mod:`seen_gradients`."""
        with self._lock:
            if self._take is dict:
                if self._sees_gradients:
                    self._aside.enter_context(gradients_seen(self._resources.root.parameters()))
                self._take = self._aside.enter_context(gradients_aside(self._resources.root))
                self._aside.callback(setattr, self, "_take", dict)

    def take_strays(self) -> dict[nn.Parameter, Tensor]:
        """What has accumulated in any ``.grad`` since they were put aside."""
        return self._take()

    def put_gradients_back(self) -> None:
        """The segment is over."""
        self._aside.close()
