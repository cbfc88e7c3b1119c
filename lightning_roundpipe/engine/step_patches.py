"""Everything that one step changes outside itself while it runs."""

from __future__ import annotations

import contextlib

from .checkpointing import checkpoints_passed_through
from .glue import noting_writes
from .loose import hooks_out_of_the_way, nested_backwards_followed
from .parametrizations import parametrizations_apart, power_iterations_once
from .patches import guarded_grad, intercepted, intra_op_threads, noting_hooks, process_settings_kept
from .resources import Resources
from .units import UnitTable


def patch(stack: contextlib.ExitStack, resources: Resources, table: UnitTable) -> None:
    """A segment of a step begins, which ends when ``stack`` is closed."""
    stack.enter_context(intercepted(table))
    stack.enter_context(noting_writes())
    stack.enter_context(guarded_grad())
    stack.enter_context(nested_backwards_followed())
    stack.enter_context(noting_hooks(resources.replicas.note_hook))
    stack.enter_context(hooks_out_of_the_way(resources.root.parameters()))
    stack.enter_context(checkpoints_passed_through(resources.glue_is_user_code.set))
    stack.enter_context(process_settings_kept())
    stack.enter_context(parametrizations_apart())
    stack.enter_context(power_iterations_once())
    stack.enter_context(intra_op_threads(resources.num_threads))
