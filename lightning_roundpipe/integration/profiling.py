"""Lightning's profilers around steps that run on several threads.

[Note: profiled actions]
A profiler knows an action by its name, and expects it to begin and to end on one thread, one at a time; a second begin
is an error. Code in a step runs once per micro-batch, several of them at a time. So what it profiles is recorded for
the first micro-batch alone: as many actions as in plain Lightning, each from begin to end on one thread. What the
Trainer profiles is recorded as ever. The profiler of torch sees the operators of its own thread only, unless it is told
to look at all threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import cast

from torch._C._profiler import _ExperimentalConfig
from torch.autograd.profiler import record_function

from ..lightning_packages import PassThroughProfiler, Profiler, PyTorchProfiler, everywhere, pl
from ..usercode.lock import current


def profiler_of(model: pl.LightningModule) -> Profiler | None:
    """That of its trainer; None while it has none, as when a checkpoint is restored without a run."""
    trainer = model._trainer
    return None if trainer is None else cast(Profiler, vars(trainer)["profiler"])  # Lightning sets it outside the class


def adapt(profiler: Profiler) -> None:
    """Makes ``profiler`` fit for steps on several threads; see [Note: profiled actions]."""
    if isinstance(profiler, everywhere(PassThroughProfiler)):
        return
    restore(profiler)
    vars(profiler).update(start=partial(_start, profiler, profiler.start), stop=partial(_of_the_first, profiler.stop))
    if isinstance(profiler, everywhere(PyTorchProfiler)):
        _look_at_all_threads(profiler)


def restore(profiler: Profiler) -> None:
    """Takes back what :func:`adapt` has put on the profiler; a profile of torch goes on looking at all threads."""
    for name in ("start", "stop"):
        vars(profiler).pop(name, None)


def _of_the_first(original: Callable[[str], None], action_name: str) -> None:
    """``original``, unless the caller is another micro-batch than the first one."""
    state = current()
    if state is None or state.index == 0:
        original(action_name)


def _start(profiler: Profiler, original: Callable[[str], None], action_name: str) -> None:
    _of_the_first(original, action_name)
    register = profiler._register if isinstance(profiler, everywhere(PyTorchProfiler)) else None
    if register is not None and not isinstance(register._records, RecordsByThread):
        register._records = RecordsByThread()


def _look_at_all_threads(profiler: PyTorchProfiler) -> None:
    """Unless the user has chosen an experimental configuration: it cannot be extended."""
    if "experimental_config" in profiler._profiler_kwargs:
        return
    try:
        config = _ExperimentalConfig(profile_all_threads=True)
    except TypeError:  # a version of torch that cannot
        return
    profiler._profiler_kwargs["experimental_config"] = config


class RecordsByThread(dict[str, record_function]):
    """What Lightning remembers from before a module's forward until after it, by name of the module.

    Several micro-batches are in the forward of one module at a time, on a thread each.
    """

    def __setitem__(self, name: str, record: record_function) -> None:
        super().__setitem__(_by_thread(name), record)

    def __getitem__(self, name: str) -> record_function:
        return super().__getitem__(_by_thread(name))


def _by_thread(name: str) -> str:
    return f"{threading.get_ident()} {name}"
