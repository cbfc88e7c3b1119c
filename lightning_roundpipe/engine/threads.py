"""Micro-batch threads: what they take over from the caller's thread, and how they are waited for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

# Waits are cut into pieces, so that the waiting thread notices interrupts.
_RECHECK_S = 0.2
_STARTING_S = 0.001


@dataclass(frozen=True)
class Surroundings:
    """Thread-local modes of torch that a micro-batch thread takes over from the caller."""

    grad: bool
    inference: bool
    device_type: str
    autocast: tuple[bool, torch.dtype]

    @classmethod
    def of_this_thread(cls, device_type: str) -> Surroundings:
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            device_type,
            (torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)),
        )

    @contextlib.contextmanager
    def entered(self) -> Any:
        # The autocast weight cache is shared by all threads and cleared when any of them leaves autocast; what it
        # caches under no_grad would also cut gradients of the recomputation. It stays off.
        torch.set_autocast_cache_enabled(False)
        enabled, dtype = self.autocast
        with contextlib.ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.grad and not self.inference))
            if enabled:
                stack.enter_context(torch.autocast(self.device_type, dtype=dtype, cache_enabled=False))
            yield

    def in_backward(self) -> contextlib.AbstractContextManager[Any]:
        """Without autocast: Lightning leaves it before ``loss.backward()``, where it would cast what autograd computes
        in float32 (the backward of a region without autocast, functions of the user).
        """
        if not self.autocast[0]:
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, dtype=self.autocast[1], enabled=False, cache_enabled=False)


def run_threads(
    threads: list[threading.Thread],
    resume: list[Callable[[], None]],
    halted: list[threading.Event],
    fail: Callable[[BaseException], None],
) -> None:
    """Starts or resumes threads, and waits until all have halted; an interrupt of the waiting thread stops them first.

    Args:
        threads: not started yet; the last of those that are waited for.
        resume: lets each of the others go on.
        halted: set by each thread, in the order of ``resume`` and ``threads``, as the last thing it does for now.
        fail: makes the threads stop.

    Waits for events: an interrupted ``Thread.join`` of CPython 3.12 and older takes a running thread for dead.
    """
    try:
        for go_on in resume:
            go_on()
        for thread in threads:
            thread.start()
        for event in halted:
            while not event.wait(_RECHECK_S):
                pass
    except BaseException as interrupt:
        fail(interrupt)
        for thread, event in zip(threads, halted[len(resume) :], strict=True):
            # A thread is listed from inside start() on, where the interrupt may have come.
            while thread in threading.enumerate() and not event.wait(_STARTING_S):
                pass
        raise
