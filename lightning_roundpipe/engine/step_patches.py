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
from collections.abc import Iterator

from ..autograd.checkpointing import checkpoints_passed_through
from ..autograd.parametrizations import parametrizations_apart, power_iterations_once
from ..usercode.lock import noting_writes
from ..usercode.loose_gradients import hooks_out_of_the_way, nested_backwards_followed
from ..weights.units import UnitTable
from .patches import guarded_grad, intercepted, intra_op_threads, noting_hooks, process_settings_kept
from .resources import Resources

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


def patch(stack: contextlib.ExitStack, resources: Resources, table: UnitTable) -> None:
    """A segment of a step begins, which ends when ``stack`` is closed."""
    stack.enter_context(intercepted(table))
    stack.enter_context(guarded_grad())
    stack.enter_context(nested_backwards_followed())
    stack.enter_context(hooks_out_of_the_way(resources.root.parameters()))
    stack.enter_context(process_settings_kept())
    stack.enter_context(parametrizations_apart())
    stack.enter_context(power_iterations_once())
    stack.enter_context(intra_op_threads(resources.num_threads))
