"""Units compiled, and as they are."""

from __future__ import annotations

import functools
from typing import Any

from . import processes
from .measuring import Job
from .models import SMALL, TINY
from .results import Options, Progress, Step

METHOD = """
A Llama of 0.4 billion weights, bf16-mixed, no limit on memory, one after the other: units as they are, and with
compile_units=True. compiled_over_eager: of the median times of a step. first_step_s contains the compilation, as far as
torch has no compiled kernels in its cache on disk. Tiny: the backend is eager, which compiles nothing.
"""
_LIMIT_S = 240.0


def steps(options: Options) -> list[Step]:
    """Both, and what one is to the other."""
    compiling: Any = {"backend": "eager"} if options.is_tiny else True
    return [
        Step("eager", functools.partial(_train, False, options)),
        Step("compiled", functools.partial(_train, compiling, options)),
        Step("ratio", _ratio),
    ]


def _train(compile_units: Any, options: Options, progress: Progress) -> dict[str, Any]:
    job = Job(
        "roundpipe",
        TINY if options.is_tiny else SMALL,
        is_tiny=options.is_tiny,
        steps=options.steps,
        options={"compile_units": compile_units},
    )
    return processes.train(job, progress, _LIMIT_S)


def _ratio(progress: Progress) -> dict[str, Any]:
    eager, compiled = (progress.figures_of(name) for name in ("eager", "compiled"))
    seconds = [figures["seconds_per_step"]["median"] for figures in (compiled, eager)]
    return {"compiled_over_eager": round(seconds[0] / seconds[1], 4)}
