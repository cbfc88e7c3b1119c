"""What all benchmarks share: arguments, the description of the machine, and the one JSON object on stdout."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning
import torch

from lightning_roundpipe import __version__
from lightning_roundpipe.devices.pool import num_host_cores

# What a Trainer that is measured does without.
QUIET: dict[str, Any] = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)


def parser(description: str | None, *, repeats: int) -> argparse.ArgumentParser:
    """An argument parser with the options that every benchmark has."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    made.add_argument("--quick", action="store_true", help="smallest sizes: a smoke test, its numbers mean nothing")
    made.add_argument("--repeats", type=int, default=repeats, help="repetitions; medians are reported")
    return made


def progress(message: str) -> None:
    """Tells the user; stdout is kept for the result."""
    print(message, file=sys.stderr, flush=True)


def median(values: Sequence[float]) -> float:
    """The median, rounded to five digits: what lies below is noise."""
    return rounded(statistics.median(values))


def rounded(value: float) -> float:
    """Five significant digits."""
    return float(f"{value:.5g}")


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles of repeated measurements (at least two)."""
    first, middle, third = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": rounded(middle), "quartiles": [rounded(first), rounded(third)]}


def now() -> str:
    """Date and time."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


class Report:
    """Collects a result; made before the measurement, so that it shows how busy the machine was."""

    def __init__(self, name: str, method: str, parameters: dict[str, Any]) -> None:
        self._head = {"benchmark": name, "method": " ".join(method.split()), "parameters": parameters}
        self._machine = {
            "cpu": _cpu_model(),
            "cores": num_host_cores(),
            "platform": f"{platform.system()} {platform.machine()}",
            "python": platform.python_version(),
            "torch": torch.__version__,
            "lightning": lightning.__version__,
            "lightning_roundpipe": __version__,
            "date": now(),
            "load_average_before": _load(),
        }

    def emit(self, results: Any) -> None:
        """Prints the JSON object."""
        machine = {**self._machine, "load_average_after": _load()}
        print(json.dumps({**self._head, "machine": machine, "results": results}, indent=2))


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def _load() -> float | None:
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
