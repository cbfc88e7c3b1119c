"""An environment for each project, and processes that end in time.

Requirements are exact versions of what a project's user would name; the rest is what pip finds for them. An environment
is made anew when they change. This package is the working tree, through ``PYTHONPATH``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = Path(__file__).parent / "requirements"
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "MKL_CBWR": "COMPATIBLE",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "MPLBACKEND": "Agg",
    "PYTHONPATH": str(ROOT),
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "",
}


class LimitError(Exception):
    """A process has not ended in time. The message says after how long it was stopped."""


def run_limited(command: Sequence[str], seconds: float, log: Path) -> int:
    """Runs a command, stops it and all that it has started after so many seconds, and returns its exit status.

    Raises:
        LimitError: if it was stopped.
    """
    environment = {**os.environ, **SETTINGS}
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise LimitError(f"stopped after {seconds:g} s") from None
        finally:
            end_group(process)


def end_group(process: subprocess.Popen[Any]) -> None:
    """Ends a process that began a group, and what it has left behind, which would keep the processor busy."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class InstallError(Exception):
    """There is no environment. The message is the last line of pip."""


def interpreter(name: str, folder: Path, seconds: float) -> str:
    """The interpreter of a project's environment, which is made if there is none for its requirements.

    Raises:
        InstallError: if that fails, or takes too long.
    """
    requirements = REQUIREMENTS / f"{name}.txt"
    home, stamp = folder / "env", folder / "env" / "requirements.txt"
    python = str(home / "bin" / "python")
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == requirements.read_text(encoding="utf-8"):
        return python
    shutil.rmtree(home, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    install = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", str(requirements))
    log = folder / "install.log"
    try:
        is_made = run_limited([sys.executable, "-m", "venv", str(home)], seconds, log) == 0
        is_made = is_made and run_limited([python, *install], seconds, log) == 0
    except LimitError as error:
        raise InstallError(f"pip was {error}") from None
    if not is_made:
        raise InstallError(last_line(log))
    # Wheels that bring their tests along hide the folder of ours.
    for stray in home.glob("lib/python3*/site-packages/tests"):
        shutil.rmtree(stray)
    shutil.copyfile(requirements, stamp)
    return python


def last_line(log: Path) -> str:
    """What a process has said last."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["nothing was said"])[-1]
