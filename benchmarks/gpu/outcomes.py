"""A plugin of pytest that writes what becomes of each test as soon as it is known, one JSON object a line.

The file is named by the variable ROUNDPIPE_OUTCOMES. This module imports nothing but the standard library: tests need
torch to be imported after their settings.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

VARIABLE = "ROUNDPIPE_OUTCOMES"
_LAST_LINES = 12


def pytest_runtest_logstart(nodeid: str, location: object) -> None:
    """A test begins: should it never end, its name is there."""
    _write(nodeid, "begun", "")


def pytest_runtest_logreport(report: Any) -> None:
    """A test was skipped, has failed, or has passed its call."""
    if report.when == "call" or report.outcome != "passed":
        text = report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longreprtext
        _write(report.nodeid, report.outcome, text)


def pytest_collectreport(report: Any) -> None:
    """A file that cannot be imported has failed."""
    if report.failed:
        _write(report.nodeid, "failed", report.longreprtext)


def _write(name: str, outcome: str, text: str) -> None:
    for folder in (sys.prefix, os.getcwd()):  # where things lie on this machine is of no use elsewhere
        text = text.replace(folder + os.sep, "")
    last = "\n".join(text.strip().splitlines()[-_LAST_LINES:])
    with open(os.environ[VARIABLE], "a", encoding="utf-8") as file:
        file.write(json.dumps({"test": name, "outcome": outcome, "last_lines": last}) + "\n")
