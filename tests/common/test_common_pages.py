"""How much memory the host has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_roundpipe.common.pages import available_bytes, system_bytes, total_bytes

MIB = 2**20


def test_this_machine_has_memory() -> None:
    available = available_bytes()
    assert available is None or available > 0


def write_limits(folder: Path, meminfo: str | None, limit: str = "", used: int = 0, cache: int = 0) -> None:
    if meminfo is not None:
        (folder / "meminfo").write_text(meminfo)
    if limit:
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cache}\nactive_file 7\n")


MEMINFO = "MemTotal:  4096 kB\nMemAvailable:    1024 kB\n"


@pytest.mark.parametrize(
    ("limits", "available", "total"),
    [
        ((None,), None, None),
        (("MemTotal: 1 kB\n",), None, 1024),
        (("MemAvailable: much kB\n",), None, None),
        ((MEMINFO,), MIB, 4 * MIB),
        ((MEMINFO, "max", MIB), MIB, 4 * MIB),
        ((MEMINFO, str(3 * MIB), 3 * MIB - 500, 100), 600, 3 * MIB),
        ((MEMINFO, str(9 * MIB), MIB), MIB, 4 * MIB),
        ((MEMINFO, "1000", 2000), 0, 1000),
        ((None, "1000", 100, 50), 950, 1000),
    ],
)
def test_available_is_what_system_and_container_leave(
    tmp_path: Path, limits: tuple[Any, ...], available: int | None, total: int | None
) -> None:
    write_limits(tmp_path, *limits)
    assert available_bytes(tmp_path / "meminfo", tmp_path) == available
    assert total_bytes(tmp_path / "meminfo", tmp_path) == total


def test_entries_of_the_system_are_in_bytes(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    assert system_bytes("MemTotal", tmp_path / "meminfo") == 4 * MIB
    assert system_bytes("SwapTotal", tmp_path / "meminfo") is None
