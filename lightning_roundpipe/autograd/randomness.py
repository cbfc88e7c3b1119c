"""Random numbers that depend on (seed, step, micro-batch, call) and on nothing else.

[Note: private randomness]
Torch's CPU generator is global to the process. With several micro-batches in flight, what a unit draws from it
would depend on timing, and a recomputation would draw other dropout masks than the forward: wrong gradients without
any error. Random operators of a unit therefore draw from a generator of their own, seeded from the identity of the
call. A dispatch mode hands it to them: operators that take a ``generator`` argument get it, the others have an
overload that does, and what remains runs while the default generator holds the private state. The forward and its
recomputation see the same stream, for any number of devices. Only units that were seen to draw pay for the mode.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def _takes_generator(func: torch._ops.OpOverload) -> bool:
    return any(argument.name == "generator" for argument in func._schema.arguments)


def _generator_overload(func: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The overload of a random operator that takes a generator, with the same arguments otherwise."""
    packet = func.overloadpacket
    name = func._overloadname
    for candidate in ("generator" if name == "default" else f"{name}_generator", f"generator_with_{name}"):
        overload = getattr(packet, candidate, None)
        if overload is not None and _takes_generator(overload):
            return overload  # type: ignore[no-any-return]
    return None


def _without_dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Fused attention counts as random whether it drops anything or not."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[i] if i < len(args) else kwargs.get("dropout_p", argument.default_value)
            return not given
    return False


class PrivateRandomness(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives random operators on the host a generator of their own; see [Note: private randomness].

    Args:
        seed: seed of the private generator, from :func:`~lightning_roundpipe.common.seeds.derive_seed`.
        exclusive: context manager factory under which the default generator may be borrowed for an operator that
            takes no generator (nobody else draws from it meanwhile).
    """

    _how: ClassVar[dict[Any, Any]] = {}  # operator -> None (not random), "argument", an overload, or "borrow"

    def __init__(self, seed: int, exclusive: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.generator = torch.Generator().manual_seed(seed)
        self.num_draws = 0
        self._exclusive = exclusive

    @classmethod
    def _decide(cls, func: Any) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            how: Any = None
        elif _takes_generator(func):
            how = "argument"
        else:
            how = _generator_overload(func) or "borrow"
        cls._how[func] = how
        return how

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        how = self._how.get(func, self)
        if how is self:
            how = self._decide(func)
        if how is None:
            return func(*args, **kwargs)
        if _without_dropout(func, args, kwargs):
            return func(*args, **kwargs)
        self.num_draws += 1
        if not self._on_host(args, kwargs):
            return func(*args, **kwargs)
        if any(isinstance(arg, torch.Generator) for arg in args):
            return func(*(self.generator if isinstance(arg, torch.Generator) else arg for arg in args), **kwargs)
        if how == "argument" or kwargs.get("generator") is not None:  # the user's own generator would move on twice
            return func(*args, **{**kwargs, "generator": self.generator})
        if how != "borrow":
            return how(*args, **kwargs, generator=self.generator)
        with self._exclusive():
            default = torch.default_generator
            before = default.get_state()
            try:
                default.set_state(self.generator.get_state())
                return func(*args, **kwargs)
            finally:
                self.generator.set_state(default.get_state())
                default.set_state(before)

    @staticmethod
    def _on_host(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        device = kwargs.get("device")
        if device is not None:
            return torch.device(device).type == "cpu"
        return all(not isinstance(arg, torch.Tensor) or arg.device.type == "cpu" for arg in args)


# GPU -> held by the unit that draws from its generator.
_generators: dict[torch.device, threading.Lock] = {}


@contextlib.contextmanager
def device_generator_seeded(device: torch.device, seed: int) -> Iterator[None]:
    """On a GPU random operators draw from the device's generator: seeded here, restored after.

    Several workers on one GPU share it, so their units that draw run one at a time. Whoever holds the user-code lock
    must not ask for it: a unit may need the user-code lock to end. Does nothing on the host.
    """
    if device.type != "cuda":
        yield
        return
    with _generators.setdefault(device, threading.Lock()):
        before = torch.cuda.get_rng_state(device)
        torch.cuda.default_generators[device.index].manual_seed(seed)
        try:
            yield
        finally:
            torch.cuda.set_rng_state(before, device)


class ForeignRandomness:
    """Python's and NumPy's global generators, for units that draw from them (stochastic depth, augmentation).

    Such units run one at a time, with generators seeded like their torch randomness.
    """

    def __init__(self) -> None:
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy: Any = numpy.random.get_state() if numpy is not None else None

    @classmethod
    def watched(cls) -> ForeignRandomness:
        """The states now, for :meth:`has_moved`."""
        return cls()

    def has_moved(self) -> bool:
        """Whether anybody has drawn since; other threads count as well."""
        if random.getstate() != self._python:
            return True
        numpy = sys.modules.get("numpy")
        if numpy is None or self._numpy is None:
            return False
        now = numpy.random.get_state()
        return bool(now[2] != self._numpy[2] or (now[1] != self._numpy[1]).any())

    @classmethod
    @contextlib.contextmanager
    def seeded(cls, seed: int) -> Iterator[None]:
        """Seeds both generators, and restores them after; for a thread that excludes all others."""
        before = cls()
        random.seed(seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(before._python)
            if numpy is not None and before._numpy is not None:
                numpy.random.set_state(before._numpy)
