"""Random numbers on GPUs: whose turn it is to use a generator.

[Note: generators of GPUs]
A GPU has one generator, and operators draw from it in the order in which the host issues them: units, and user code of
any micro-batch. So none of them draws from where another one has left it: each has the generator for the time of its
draw, seeds it, and puts it back::

    generator of a GPU    | unit of micro-batch 0 ...... | draw of user code of micro-batch 1 | unit ...
    seed                    (seed, micro-batch, call)      from micro-batch 1's CPU generator

A unit has it for its whole forward. User code takes it for one function, which the mode of [Note: implicit transfers]
recognises. The seed comes from the CPU's generator, which is the micro-batch's own while it has the user-code lock (see
[Note: user-code lock] in :mod:`usercode.lock`). So the draw depends on the seed, the step, the micro-batch and the
draws before it, and on neither timing nor devices; ``torch.manual_seed`` decides it, and a checkpoint that puts the
CPU's generator back draws the same again.

For the same reason ``torch.manual_seed`` and ``torch.random.fork_rng`` in user code are about the CPU's generator
alone: a unit of another micro-batch may be drawing. What the mode does not see as a function of torch, such as a kernel
of another library, draws unseeded in user code.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ..common.attributes import attribute_set
from .lock import UserCodeState, current

# Functions in Python that draw in operators of other names.
_COMPOSED = frozenset(
    {
        *("dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout", "gumbel_softmax"),
        *("fractional_max_pool2d_with_indices", "fractional_max_pool3d_with_indices", "multi_head_attention_forward"),
        *("kaiming_uniform_", "svd_lowrank", "pca_lowrank", "lobpcg"),
    }
)
# GPU -> who draws there. Re-entrant: hooks inside a unit that has the generator are user code.
_turns: dict[torch.device, Any] = {}


@contextlib.contextmanager
def gpu_generator_seeded(device: torch.device, seed: int) -> Iterator[Callable[[], bool]]:
    """The calling thread draws on a GPU, after a wait for its turn: its generator is seeded here and restored after.

    See [Note: generators of GPUs]. Gives a function that tells whether anything has been drawn meanwhile, also by a
    kernel of another library.
    """
    generator = torch.get_device_module(device).default_generators[device.index]

    def have_drawn() -> bool:
        return not torch.equal(generator.get_state(), torch.Generator(device).manual_seed(seed).get_state())

    with _turn(device):
        before = generator.get_state()
        generator.manual_seed(seed)
        try:
            yield have_drawn
        finally:
            generator.set_state(before)


def _turn(device: torch.device) -> Any:
    return _turns.get(device) or _turns.setdefault(device, threading.RLock())


def drawing(
    state: UserCodeState, name: str, leaves: Iterable[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> AbstractContextManager[None]:
    """What user code calls a random function of torch in; it is of this name, and ``leaves`` are its arguments."""
    if _drops_nothing(name, args, kwargs) or kwargs.get("generator") is not None:
        return contextlib.nullcontext()
    device = next((x.device for x in leaves if isinstance(x, Tensor) and x.device.type != "cpu"), None)
    if device is None:
        device = torch.device(kwargs.get("device") or torch.get_default_device())
    if device.type in ("cpu", "meta"):
        return contextlib.nullcontext()
    if device.index is None:
        device = torch.device(device.type, torch.get_device_module(device).current_device())
    return _drawing(state, device)


@contextlib.contextmanager
def _drawing(state: UserCodeState, device: torch.device) -> Iterator[None]:
    assert state.lock is not None
    seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
    turn = _turn(device)
    with contextlib.ExitStack() as stack:
        if turn.acquire(blocking=False):
            stack.callback(turn.release)
        else:
            with state.lock.released(state):  # a hook inside the unit that draws may need it
                turn.acquire()
                stack.callback(turn.release)
        stack.enter_context(gpu_generator_seeded(device, seed))
        yield


@functools.cache
def is_random(name: str) -> bool:
    """Whether functions of this name may draw."""
    packet = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return name in _COMPOSED
    overloads = [getattr(packet, overload) for overload in packet.overloads()]  # type: ignore[no-untyped-call]
    return any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)


def _drops_nothing(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Dropout and fused attention count as random whether they drop anything or not."""
    if name == "scaled_dot_product_attention":
        return not (kwargs["dropout_p"] if "dropout_p" in kwargs else len(args) > 4 and args[4])
    return kwargs.get("training") is False


@contextlib.contextmanager
def gpu_generators_left_alone() -> Iterator[None]:
    """While open, user code that seeds torch's generators, or puts them back, does so with the CPU's."""
    manual_seed, fork_rng = torch.random.manual_seed, torch.random.fork_rng

    @functools.wraps(manual_seed)
    def seed_host(seed: int) -> torch.Generator:
        return torch.default_generator.manual_seed(int(seed)) if _is_user_code() else manual_seed(seed)

    @functools.wraps(fork_rng)
    def fork_host(devices: Iterable[Any] | None = None, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        return fork_rng([] if _is_user_code() else devices, *args, **kwargs)

    with (
        attribute_set(torch, "manual_seed", seed_host),
        attribute_set(torch.random, "manual_seed", seed_host),
        attribute_set(torch.random, "fork_rng", fork_host),
    ):
        yield


def _is_user_code() -> bool:
    state = current()
    return state is not None and state.unit_writes is None
