"""Activation checkpointing by the user, inside and around units.

[Note: checkpointing]
Inside a unit ``torch.utils.checkpoint`` is a pass-through: the engine recomputes the unit as a whole, and a second
recomputation would draw other random numbers. In user code it stays, up to the first unit that it calls: what comes
before is computed again in the backward, and the unit by the engine; what comes behind the unit keeps what it saves,
because it could not be computed again without the unit. That is user code in the backward, so from then on user code is
flushed under the user-code lock. A reentrant checkpoint would run a backward of its own, past the one of the engine
(see [Note: loose parameters] in :mod:`usercode.loose_gradients`), so it becomes one that is not reentrant. In user code
a checkpoint puts back the state of the CPU's generator, which is the micro-batch's own; from it come the seeds of what
user code draws on GPUs, whose generators it leaves alone: a unit may be drawing there::

    in a unit              checkpoint(f, x)  ->  f(x)
    in user code           checkpoint(f, x)  ->  f(x), and again in the backward, as far as the first unit in f
    ... with reentrant     checkpoint(f, x, use_reentrant=True)  ->  checkpoint(f, x, use_reentrant=False)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor

from ..common.attributes import attribute_set
from ..usercode.lock import current


@contextlib.contextmanager
def checkpoints_passed_through() -> Iterator[None]:
    """While open, checkpoints in units do nothing; see [Note: checkpointing]."""
    function = torch_checkpoint.CheckpointFunction
    generator = torch_checkpoint._checkpoint_without_reentrant_generator
    get_device_states = torch_checkpoint.get_device_states  # of GPUs
    hook: Any = torch_checkpoint._checkpoint_hook

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

    class UpToUnit(hook):  # type: ignore[misc]
        """Sees what autograd saves in a checkpoint, and leaves it alone behind a unit."""

        def __init__(self, frame: Any) -> None:
            super().__init__(frame)
            state = current()
            if state is not None:
                pack, unpack, num_calls = self.pack_hook, self.unpack_hook, state.num_calls  # type: ignore[has-type]
                self.pack_hook = lambda x: pack(x) if state.num_calls == num_calls else x.detach()
                self.unpack_hook = lambda kept: kept if isinstance(kept, Tensor) else unpack(kept)

    def device_states(*args: Any) -> tuple[list[int], list[Any]]:
        return get_device_states(*args) if current() is None else ([], [])

    with (
        attribute_set(torch_checkpoint, "CheckpointFunction", PassThrough),
        attribute_set(torch_checkpoint, "get_device_states", device_states),
        attribute_set(torch_checkpoint, "_checkpoint_hook", UpToUnit),
        attribute_set(torch_checkpoint, "_checkpoint_without_reentrant_generator", pass_through),
    ):
        yield
