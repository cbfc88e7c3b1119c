"""Random numbers that depend on (seed, step, micro-batch, call) and on nothing else.

[Note: private randomness]
What a unit draws must not depend on timing, and its recomputation must draw what its forward has drawn: other dropout
masks would give wrong gradients without any error. But torch's generators are global: one for the host, one for each
GPU. So whatever a call draws comes from a stream that is seeded with the identity of the call::

    where the unit draws           in the first call         in the calls after it
    nowhere                        a dispatch mode counts    nothing
    on a GPU                       and                       the GPU's generator is seeded before, restored after
    on the host                    redirects draws           a dispatch mode gives each draw a private generator
    with ``random`` or NumPy       an exclusive section, generators seeded and restored, in both

A GPU computes one unit at a time, so its generator is free to be seeded, in turn with what user code draws there (see
[Note: generators of GPUs] in :mod:`usercode.gpu_draws`). On the host several units compute at a time. To seed the
default generator of the host would be cheap, but every unit that draws would have to be in an exclusive section: one
unit of all virtual devices would compute at a time. The mode costs a little for each operator of a unit that draws on
the host, and lets them compute side by side.

The mode gives its generator to operators that take a ``generator`` argument; others run in an exclusive section while
the default generator holds the private state (see [Note: exclusive sections] in :mod:`usercode.lock`).

A hook inside a unit draws from a stream of its own: it does not run again with the unit, unless it changes what the
unit computes with, and draws the same then.

Compiled, a unit draws other numbers than as it is. So one that draws on a GPU runs again as it has run before: see
[Note: compiled units] in :mod:`autograd.compiling`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..common.attributes import attribute_set
from ..common.dispatch import ThreadsDispatchMode


@dataclass(frozen=True, slots=True)
class Draws:
    """Where a unit draws random numbers."""

    host: bool = False
    gpu: bool = False
    foreign: bool = False  # from Python's or NumPy's global generator

    def __bool__(self) -> bool:
        return self.host or self.gpu or self.foreign


@functools.cache
def is_random(func: Any) -> bool:
    """Whether an operator may draw."""
    return torch.Tag.nondeterministic_seeded in func.tags


@functools.cache
def takes_generator(func: Any) -> bool:
    """Whether an operator has a ``generator`` argument."""
    return any(argument.name == "generator" for argument in func._schema.arguments)


def drops_nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Fused attention counts as random whether it drops anything or not."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[i] if i < len(args) else kwargs.get("dropout_p", argument.default_value)
            return not given
    return False


class PrivateRandomness(ThreadsDispatchMode):
    """Gives random operators on the host a generator of their own; see [Note: private randomness].

    Args:
        seed: seed of the private generator, from :func:`~lightning_roundpipe.common.seeds.derive_seed`.
        exclusive: makes an exclusive section, for operators that take no generator.

    Attributes:
        draws: where random operators have run so far.
    """

    def __init__(self, seed: int, exclusive: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws = Draws()
        self._generator = torch.Generator().manual_seed(seed)
        self._exclusive = exclusive

    def interrupted(self, seed: int) -> AbstractContextManager[None]:
        """While open, random operators get another private generator."""
        return attribute_set(self, "_generator", torch.Generator().manual_seed(seed))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not is_random(func) or drops_nothing(func, args, kwargs):
            return func(*args, **kwargs)
        if not self._is_on_host(args, kwargs):
            self.draws = replace(self.draws, gpu=True)
            return func(*args, **kwargs)
        self.draws = replace(self.draws, host=True)
        if any(isinstance(arg, torch.Generator) for arg in args):
            return func(*(self._generator if isinstance(arg, torch.Generator) else arg for arg in args), **kwargs)
        # The user's own generator would move on twice.
        if takes_generator(func) or kwargs.get("generator") is not None:
            return func(*args, **{**kwargs, "generator": self._generator})
        with self._exclusive():
            default = torch.default_generator
            before = default.get_state()
            try:
                default.set_state(self._generator.get_state())
                return func(*args, **kwargs)
            finally:
                self._generator.set_state(default.get_state())
                default.set_state(before)

    @staticmethod
    def _is_on_host(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        device = kwargs.get("device")
        if device is not None:
            return torch.device(device).type == "cpu"
        return all(not isinstance(arg, torch.Tensor) or arg.device.type == "cpu" for arg in args)
