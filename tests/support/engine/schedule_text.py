"""Schedules written as text, in tests: what `Schedule.format` prints, read back."""

from __future__ import annotations

import re

from lightning_roundpipe.planning import Action, Schedule

_ROW = re.compile(r"\s*device\s+(\d+)\s*:(.*)")
_HEADER = re.compile(r"\s*schedule\s+stages=(\d+)\s+microbatches=(\d+)\s+devices=(\d+)\s*")


def parse_schedule(text: str) -> Schedule:
    """Read a schedule from the text that `Schedule.format` writes; blank lines and ``#`` comments are skipped."""
    lines = [line for line in (line.split("#", 1)[0] for line in text.splitlines()) if line.strip()]
    header = _HEADER.fullmatch(lines[0])
    assert header is not None, lines[0]
    num_stages, num_microbatches, num_devices = map(int, header.groups())
    rows = [_parse_row(device, line) for device, line in enumerate(lines[1:])]
    assert len(rows) == num_devices, text
    return Schedule(num_stages, num_microbatches, tuple(rows))


def _parse_row(device: int, line: str) -> tuple[Action, ...]:
    row = _ROW.fullmatch(line)
    assert row is not None, line
    assert int(row[1]) == device, line
    return tuple(Action(*map(int, cell.split(":"))) for cell in row[2].split())
