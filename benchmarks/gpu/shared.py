"""Two devices on one GPU compute what one does; what it costs."""

from __future__ import annotations

import functools
from typing import Any

from benchmarks._report import rounded

from . import processes
from .measuring import Job
from .models import SMALL, TINY
from .results import Options, Progress, Step

METHOD = """
A Llama of 0.4 billion weights in float32, no limit on memory: with devices=[0], and with devices=[0, 0], two devices
on one GPU, which have copy streams of their own and one compute stream. loss_difference: the largest relative
difference of the losses of the same step; two_over_one: of the median times of a step. Tiny: one and two virtual
devices.
"""
_LIMIT_S = 240.0


def steps(options: Options) -> list[Step]:
    """Both, and how they differ."""
    return [
        Step("one", functools.partial(_train, (0,), options)),
        Step("two", functools.partial(_train, (0, 0), options)),
        Step("difference", _difference),
    ]


def _train(devices: tuple[int, ...], options: Options, progress: Progress) -> dict[str, Any]:
    job = Job(
        "roundpipe",
        TINY if options.is_tiny else SMALL,
        precision="32-true",
        devices=devices,
        is_tiny=options.is_tiny,
        steps=options.steps,
    )
    return processes.train(job, progress, _LIMIT_S)


def _difference(progress: Progress) -> dict[str, Any]:
    one, two = (progress.figures_of(name) for name in ("one", "two"))
    pairs = list(zip(one["losses"], two["losses"], strict=False))  # a time limit may have ended one of them
    seconds = [figures["seconds_per_step"]["median"] for figures in (two, one)]
    return {
        "loss_difference": rounded(max(abs(a - b) / abs(a) for a, b in pairs)),
        "num_losses": len(pairs),
        "two_over_one": rounded(seconds[0] / seconds[1]),
    }
