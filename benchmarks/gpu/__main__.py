"""Runs stages one after the other, each in a process with a time limit, and prints one table of all results."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

import torch

from . import compiled, facts, full, suite
from .machine import ROOT
from .results import Options, Results, Step, load
from .table import table

STAGES: dict[str, tuple[str, Callable[[Options], list[Step]]]] = {
    "facts": (facts.METHOD, facts.steps),
    "tests": (suite.METHOD, suite.steps),
    "late": (suite.LATE_METHOD, suite.late_steps),
    "full": (full.METHOD, full.steps),
    "lora": (full.METHOD, full.lora_steps),
    "compiled": (compiled.METHOD, compiled.steps),
}
NO_GPU = "No GPU was found, so nothing was measured; --scale tiny runs all stages with toys on virtual devices."
_FOLDERS = {"gpu": ROOT / "docs" / "measurements" / "gpu", "tiny": ROOT / "build" / "gpu-tiny"}
# A stage ends by itself so long before it would be killed.
_MARGIN_S = 20.0


def main(given: Sequence[str] | None = None) -> int:
    """The command; its return code."""
    args = parse(given)
    if args.folder is not None:
        args.folder = args.folder.resolve()  # stages run in the root of the repository
    options = Options(**{field.name: getattr(args, field.name) for field in fields(Options)})
    if not options.is_tiny and not torch.cuda.is_available():
        print(NO_GPU)
        return 0
    folder = args.folder or _FOLDERS[options.scale]
    limit_s = 60 * args.minutes
    if args.inside:
        (stage,) = args.stages
        method, steps = STAGES[stage]
        results = Results(folder, stage, method, options, again=args.again)
        results.run(steps(options), limit_s - min(_MARGIN_S, limit_s / 10))
        return 0
    for stage in args.stages or STAGES:
        supervise(stage, args, limit_s)
    print(table({stage: load(folder / f"{stage}.json") for stage in STAGES}))
    return 0


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("stages", nargs="*", type=_stage, help=f"of {', '.join(STAGES)}; all if none is named")
    parser.add_argument("--again", action="store_true", help="measure anew what is there already")
    parser.add_argument("--scale", choices=_FOLDERS, default="gpu", help="tiny: toys on virtual devices, no GPU")
    parser.add_argument("--folder", type=Path, help="for the results; docs/measurements/gpu, or build/gpu-tiny if tiny")
    parser.add_argument("--minutes", type=float, default=9.0, help="limit of a stage")
    parser.add_argument("--cap-gib", type=float, default=24.0, help="memory of the GPU for full and lora, in GiB")
    parser.add_argument("--sequence", type=int, help="tokens of a row in full and lora")
    parser.add_argument("--rows", type=int, help="rows of a micro-batch in full and lora")
    parser.add_argument("--microbatches", type=int, help="micro-batches of an optimizer step in full and lora")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps to measure, at most")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(given)


def _stage(name: str) -> str:
    if name not in STAGES:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(STAGES)}")
    return name


def supervise(stage: str, args: argparse.Namespace, limit_s: float) -> None:
    """Runs a stage in a process of its own, and ends it, with all that it has started, when its time is up."""
    command = [sys.executable, "-m", "benchmarks.gpu", stage, "--inside", *(["--again"] if args.again else [])]
    for name in (*(field.name for field in fields(Options)), "folder", "minutes"):
        if (value := getattr(args, name)) is not None:
            command.append(f"--{name.replace('_', '-')}={value}")
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        print(f"{stage}: ended after {limit_s:.0f} s", file=sys.stderr)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


if __name__ == "__main__":
    # So that the stage that runs is ended as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
