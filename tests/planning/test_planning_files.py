"""Files are written whole or not at all, on whichever way the writing ends."""

from __future__ import annotations

import errno
import os
import pathlib
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_roundpipe.cli.arguments import write_text as write_for_the_command
from lightning_roundpipe.planning import CostProfile
from lightning_roundpipe.planning.costs import CallCost
from lightning_roundpipe.planning.files import write_text, written_whole
from lightning_roundpipe.planning.timeline import Timeline
from lightning_roundpipe.reporting.pictures import draw_timelines

PROFILE = CostProfile((CallCost("block", 1.0, 2.0, 8, 8, 8, 8),))


def draw(path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib, which draws")
    draw_timelines([("", Timeline((), 1))], path)


WRITERS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "text": ("a.txt", lambda path: write_text(path, "new")),
    "profile": ("costs.json", PROFILE.save),
    "picture": ("a.svg", draw),
    "small picture": ("a.png", draw),
}


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk on which a file takes four bytes, and no more: what comes after them is an error."""
    original = open

    def limited(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        opened = original(file, mode, *args, **kwargs)
        if "w" in mode:

            def write(content: Any) -> int:
                original_write(content[:4])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            original_write = opened.write
            return _Full(opened, write)
        return opened

    monkeypatch.setattr("builtins.open", limited)
    monkeypatch.setattr("io.open", limited)
    if (accessor := getattr(pathlib, "_normal_accessor", None)) is not None:  # Python 3.10
        monkeypatch.setattr(accessor, "open", limited)


class _Full:
    """An open file with another ``write``."""

    def __init__(self, file: Any, write: Callable[[Any], int]) -> None:
        self._file = file
        self.write = write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _Full:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


@pytest.mark.usefixtures("full_disk")
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("before", [None, "old"], ids=["new file", "over an old one"])
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, writer: str, before: str | None) -> None:
    name, write = WRITERS[writer]
    path = tmp_path / name
    if before is not None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.write(descriptor, before.encode())
        os.close(descriptor)
    with pytest.raises(OSError, match="No space left on device") as caught:
        write(path)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(path)
    assert [p.name for p in tmp_path.iterdir()] == ([] if before is None else [name])
    assert before is None or path.read_text() == before


@pytest.mark.parametrize("writer", WRITERS)
def test_what_is_written_takes_the_place_of_what_was(tmp_path: Path, writer: str) -> None:
    name, write = WRITERS[writer]
    path, expected = tmp_path / name, tmp_path / f"other-{name}"
    path.write_text("old" * 1000)
    path.chmod(0o640)
    write(path)
    write(expected)
    assert path.read_bytes() == expected.read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert {p.name for p in tmp_path.iterdir()} == {path.name, expected.name}


@pytest.mark.usefixtures("full_disk")
def test_the_command_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot write .*a\.json \(No space left on device\): choose another place"):
        write_for_the_command(str(tmp_path / "a.json"), "a long text")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError], ids=lambda error: error.__name__)
def test_any_error_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    def stop() -> None:
        with written_whole(tmp_path / "a") as beside:
            beside.write_text("half")
            raise error

    with pytest.raises(error):
        stop()
    assert not list(tmp_path.iterdir())


def test_links_stay_links(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "a", tmp_path / "link"
    link.symlink_to(target)
    write_text(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs the device /dev/full")
def test_what_is_no_ordinary_file_is_written_in_place() -> None:
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        write_text("/dev/full", "new")
    assert os.path.exists("/dev/full")
    write_text(os.devnull, "new")
    assert not os.path.isfile(os.devnull)
