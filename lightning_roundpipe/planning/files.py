"""Files that are there whole or not at all: a disk that is full in the middle leaves what was there before."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def written_whole(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give the path to write to: a new file beside `path`, which takes its place in the end.

    What is no ordinary file (`/dev/stdout`, a pipe), or lies in a folder that takes no new file, is written in place.

    Raises:
        OSError: If it cannot be written, naming `path`. Nothing half written is left beside it.
    """
    file = Path(os.path.realpath(path))  # a link stays a link
    in_place = file.exists() and not (file.is_file() and os.access(file.parent, os.W_OK))
    beside = file if in_place else file.with_name(f".roundpipe-{secrets.token_hex(8)}")
    try:
        try:
            yield beside
            if not in_place:
                if file.exists():
                    shutil.copymode(file, beside)
                os.replace(beside, file)
        except OSError as error:
            raise OSError(error.errno, error.strerror or str(error), os.fspath(path)) from error
    finally:
        if not in_place:
            beside.unlink(missing_ok=True)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` into a file, as UTF-8, whole or not at all.

    Raises:
        OSError: As `written_whole`.
    """
    with written_whole(path) as beside:
        beside.write_text(text, encoding="utf-8")
