"""Processes of a stage: each has a time limit, and what it wrote until then is kept."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .machine import ROOT
from .measuring import Job
from .results import FAILED, NOT_RUN, OUT_OF_TIME, IncompleteError, NotRunError, Options, Progress, load

# A training needs so long before its first step, and after the last one to end.
_MIN_S = 20.0
_TINY_MIN_S = 1.0
_ENDING_S = 15.0
_POLL_S = 0.5
_SHOWN_CHARS = 2000


def run(
    command: Sequence[str],
    limit_s: float,
    *,
    environment: Mapping[str, str] | None = None,
    look: Callable[[], None] = lambda: None,
) -> tuple[int | None, str]:
    """Runs a program; its return code, None if it had to be killed, and the end of what it printed.

    Args:
        look: called every now and then while it runs.
    """
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
        deadline_s = time.monotonic() + limit_s
        try:
            while process.poll() is None and time.monotonic() < deadline_s:
                try:
                    process.wait(min(_POLL_S, max(0.0, deadline_s - time.monotonic())))
                except subprocess.TimeoutExpired:
                    look()
        finally:
            was_running = process.poll() is None
            if was_running:
                process.kill()
            process.wait()
        output.seek(0)
        text = output.read().decode(errors="replace")
    return None if was_running else process.returncode, text[-_SHOWN_CHARS:]


def train(job: Job, progress: Progress, limit_s: float) -> dict[str, Any]:
    """Trains in a process of its own; its figures.

    Raises:
        NotRunError: if it cannot be run here, or there is not enough time left.
        IncompleteError: if it was killed or died; what it has measured until then is saved.
        RuntimeError: if it failed, with its error.
    """
    limit_s = min(limit_s, progress.left_s)
    if limit_s < (_TINY_MIN_S if job.is_tiny else _MIN_S):
        raise NotRunError(OUT_OF_TIME)
    with tempfile.TemporaryDirectory() as folder:
        asked, result = Path(folder) / "job.json", Path(folder) / "result.json"
        ends_at_s = time.monotonic() + max(limit_s - _ENDING_S, limit_s / 2)
        asked.write_text(replace(job, ends_at_s=ends_at_s).dump(), encoding="utf-8")

        def look() -> None:
            found = load(result)
            if found is not None and found["figures"] != progress.saved:
                progress.save(found["figures"])

        command = [sys.executable, "-m", "benchmarks.gpu.measuring", str(asked), str(result)]
        code, printed = run(command, limit_s, look=look)
        look()
        found = load(result) or {}
    return _figures(found, code, printed, limit_s)


def _figures(found: Mapping[str, Any], code: int | None, printed: str, limit_s: float) -> dict[str, Any]:
    state = found.get("state")
    if state == NOT_RUN:
        raise NotRunError(found["reason"])
    if state == FAILED:
        raise RuntimeError(found["reason"])
    if state is None:
        raise IncompleteError(
            f"it was ended after {limit_s:.0f} s" if code is None else f"it died with code {code}: {printed[-300:]}"
        )
    figures: dict[str, Any] = found["figures"]
    return figures


def limits(options: Options) -> int | None:
    """Bytes that what trains under a limit may use."""
    return None if options.is_tiny else round(options.cap_gib * 2**30)
