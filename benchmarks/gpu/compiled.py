"""A model that would fit: units as they are and compiled, beside a training on the GPU alone."""

from __future__ import annotations

import functools
from typing import Any

from . import processes
from .measuring import Job
from .models import SMALL, TINY
from .results import Options, Progress, Step

METHOD = """
A Llama of 0.4 billion weights, bf16-mixed, no limit on memory, one after the other: units as they are, the same with
model and optimizer on the GPU (resident, see full), and with compile_units=True. ratio: of the median times of a step.
first_step_s contains the compilation, as far as torch has no compiled kernels in its cache on disk. Tiny: the backend
is eager, which compiles nothing.
"""
_LIMIT_S = 240.0


def steps(options: Options) -> list[Step]:
    """Each, and what one is to the other."""
    compiling: Any = {"backend": "eager"} if options.is_tiny else True
    return [
        Step("eager", functools.partial(_train, "roundpipe", {}, options)),
        Step("resident", functools.partial(_train, "resident", {}, options)),
        Step("eager_over_resident", functools.partial(_ratio, "eager", "resident")),
        Step("compiled", functools.partial(_train, "roundpipe", {"compile_units": compiling}, options)),
        Step("compiled_over_eager", functools.partial(_ratio, "compiled", "eager")),
    ]


def _train(contender: str, chosen: dict[str, Any], options: Options, progress: Progress) -> dict[str, Any]:
    size = TINY if options.is_tiny else SMALL
    job = Job(contender, size, is_tiny=options.is_tiny, steps=options.steps, options=chosen)
    return processes.train(job, progress, _LIMIT_S)


def _ratio(one: str, other: str, progress: Progress) -> dict[str, Any]:
    seconds = [progress.figures_of(name)["seconds_per_step"]["median"] for name in (one, other)]
    return {"ratio": round(seconds[0] / seconds[1], 4)}
