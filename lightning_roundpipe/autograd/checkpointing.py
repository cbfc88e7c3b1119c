"""Activation checkpointing by the user, inside and around units.

[Note: checkpointing]
Inside a unit ``torch.utils.checkpoint`` is a pass-through: the engine recomputes the unit as a whole, and a second
recomputation would draw other random numbers. Around units, in user code, it stays: what its region needs in the
backward is computed again then, and units that are called for it run inline. That is user code in the backward, so from
then on user code is flushed under the user-code lock. A reentrant checkpoint would run a backward of its own, past the
one of the engine (see [Note: loose parameters] in :mod:`usercode.loose_gradients`), so it becomes one that is not
reentrant. Around units a checkpoint puts back the state of the CPU's generator, which is the micro-batch's own; from it
come the seeds of what user code draws on GPUs, whose generators it leaves alone: a unit may be drawing there::

    in a unit              checkpoint(f, x)  ->  f(x)
    in user code           checkpoint(f, x)  ->  f(x), and again in the backward: units in f run inline
    ... with reentrant     checkpoint(f, x, use_reentrant=True)  ->  checkpoint(f, x, use_reentrant=False)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.utils.checkpoint as torch_checkpoint

from ..common.attributes import attribute_set
from ..usercode.lock import current


@contextlib.contextmanager
def checkpoints_passed_through() -> Iterator[None]:
    """While open, checkpoints in units do nothing; see [Note: checkpointing]."""
    function = torch_checkpoint.CheckpointFunction
    generator = torch_checkpoint._checkpoint_without_reentrant_generator
    get_device_states = torch_checkpoint.get_device_states  # of GPUs

    class PassThrough(function):  # type: ignore[misc,valid-type]
        @classmethod
        def apply(cls, run: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
            if current() is None:
                return function.apply(run, preserve_rng_state, *args)  # type: ignore[no-untyped-call]
            return torch_checkpoint.checkpoint(run, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)

    def pass_through(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
        state = current()
        if state is None:
            yield from generator(run, *args, **kwargs)
        elif state.unit_writes is not None:
            yield
        else:
            state.on_late_code()
            yield from generator(state.recomputed(run), *args, **kwargs)

    def device_states(*args: Any) -> tuple[list[int], list[Any]]:
        return get_device_states(*args) if current() is None else ([], [])

    with (
        attribute_set(torch_checkpoint, "CheckpointFunction", PassThrough),
        attribute_set(torch_checkpoint, "get_device_states", device_states),
        attribute_set(torch_checkpoint, "_checkpoint_without_reentrant_generator", pass_through),
    ):
        yield
