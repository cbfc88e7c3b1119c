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

from . import outcomes, processes
from .machine import ROOT
from .results import OUT_OF_TIME, IncompleteError, NotRunError, Options, Progress, Step

METHOD = """
pytest on each file of tests/gpu, in a process of its own: how many tests passed, failed and were skipped, why, and the
last lines of each failure. began: tests that had no outcome when the process ended.
"""
PARITY_METHOD = f"""{METHOD}
parity: tests/parity on the GPUs, in several processes at once.
"""
LATE_METHOD = f"""{METHOD}
ROUNDPIPE_LATE puts a kernel that only waits in front of work, see tests/gpu/conftest.py: before each event of the
compute stream, before each copy to the GPU, before each copy from it. What reads without waiting reads too early then.
"""
VARIABLE = "ROUNDPIPE_LATE"
LATE = ("compute", "h2d", "d2h")
# A test takes a second or less, and a process half a GiB of the GPU.
_PARITY = ("--devices=accelerator", "-n", "6")
_LIMIT_S = 300.0
_MIN_S = 10.0


def steps(options: Options) -> list[Step]:
    """One for each file, and one for the comparisons with plain Lightning."""
    files = [Step(path.stem, functools.partial(run_tests, path, None)) for path in _files()]
    return [*files, Step("parity", functools.partial(_run_parity, options))]


def late_steps(options: Options) -> list[Step]:
    """One for each file and what is late, the files that judge orderings first."""
    files = sorted(_files(), key=lambda path: "compiling" in path.stem)
    return [
        Step(f"{path.stem}, {late} late", functools.partial(run_tests, path, late)) for path in files for late in LATE
    ]


def _files() -> list[Path]:
    return sorted((ROOT / "tests" / "gpu").glob("test_*.py"))


def _run_parity(options: Options, progress: Progress) -> dict[str, Any]:
    if options.is_tiny:
        raise NotRunError("needs a GPU")
    return run_tests(ROOT / "tests" / "parity", None, progress, *_PARITY)


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
