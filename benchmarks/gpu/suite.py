"""The tests that need a GPU, as they are and with work made late."""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning_roundpipe.devices.pool import num_host_cores

from . import outcomes, processes
from .machine import ROOT
from .results import OUT_OF_TIME, IncompleteError, NotRunError, Options, Progress, Step

METHOD = """
pytest in several processes at once: how many tests passed, failed and were skipped, why, and the last lines of each
failure. began: tests that had no outcome when pytest ended. gpu: tests/gpu. parity: tests/parity on the GPUs.
"""
LATE_METHOD = f"""{METHOD}
ROUNDPIPE_LATE puts a kernel that only waits in front of work, see tests/gpu/conftest.py: before each event of the
compute stream, before each copy to the GPU, before each copy from it. What reads without waiting reads too early then.
"""
VARIABLE = "ROUNDPIPE_LATE"
LATE = ("compute", "h2d", "d2h")
_LIMIT_S = 300.0
_MIN_S = 10.0
# Most tests wait for the interpreter, and a process takes half a GiB of the GPU.
_MAX_PROCESSES = 6


def steps(options: Options) -> list[Step]:
    """What needs GPUs, and the comparisons with plain Lightning."""
    return [Step("gpu", _run_gpu), Step("parity", functools.partial(_run_parity, options))]


def late_steps(options: Options) -> list[Step]:
    """One for each kind of work that is late."""
    return [Step(f"gpu, {late} late", functools.partial(_run_gpu, late=late)) for late in LATE]


def _run_gpu(progress: Progress, late: str | None = None) -> dict[str, Any]:
    return run_tests(ROOT / "tests" / "gpu", late, progress, *_in_processes())


def _run_parity(options: Options, progress: Progress) -> dict[str, Any]:
    if options.is_tiny:
        raise NotRunError("needs a GPU")
    return run_tests(ROOT / "tests" / "parity", None, progress, "--devices=accelerator", *_in_processes())


def _in_processes() -> tuple[str, str]:
    return "-n", str(max(1, min(_MAX_PROCESSES, num_host_cores() // 2)))


def run_tests(path: Path, late: str | None, progress: Progress, *arguments: str) -> dict[str, Any]:
    """Outcomes of the tests in a file or folder, which is given to pytest with ``arguments``.

    Raises:
        IncompleteError: if pytest ended before its time.
        NotRunError: if there is no time left.
    """
    limit_s = min(_LIMIT_S, progress.left_s)
    if limit_s < _MIN_S:
        raise NotRunError(OUT_OF_TIME)
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "outcomes"
        # The mode of MKL is what tests/conftest.py would set, had this process not imported torch for plugins already.
        environment = {**os.environ, outcomes.VARIABLE: str(written), "MKL_CBWR": "COMPATIBLE"}
        environment.setdefault("OMP_NUM_THREADS", "2")  # of each of the processes
        environment.pop(VARIABLE, None)
        if late is not None:
            environment[VARIABLE] = late
        command = [sys.executable, "-m", "pytest", str(path), "-q", "-p", "benchmarks.gpu.outcomes"]
        command += ["-p", "no:cacheprovider", *arguments]

        def look() -> None:
            if (found := counted(_lines(written))) != progress.saved:
                progress.save(found)

        code, printed = processes.run(command, limit_s, environment=environment, look=look)
        found = counted(_lines(written))
    progress.save(found)
    if code is None:
        raise IncompleteError(f"it was ended after {limit_s:.0f} s")
    if code not in (0, 1):  # 1: some failed, as is told
        raise IncompleteError(f"pytest ended with code {code}: {printed[-300:]}")
    return found


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def counted(lines: Iterable[str]) -> dict[str, Any]:
    """Numbers of tests by outcome, and what there is to say about those that did not pass."""
    found: dict[str, dict[str, str]] = {}
    for line in lines:
        record = json.loads(line)
        before = found.get(record["test"])
        if before is None or before["outcome"] != "failed":  # a test may pass and fail in its tear-down
            found[record["test"]] = record
    by_outcome: dict[str, list[dict[str, str]]] = {}
    for record in found.values():
        by_outcome.setdefault(record["outcome"], []).append(record)
    skipped = by_outcome.get("skipped", [])
    return {
        "passed": len(by_outcome.get("passed", [])),
        "failed": len(by_outcome.get("failed", [])),
        "skipped": len(skipped),
        "failures": {record["test"]: record["last_lines"] for record in by_outcome.get("failed", [])},
        "reasons": sorted({record["last_lines"] for record in skipped}),
        "began": [record["test"] for record in by_outcome.get("begun", [])],
    }
