"""Builds the sdist and wheels of this package: ``python -m tests.package.builds dist``.

The build backend is asked directly, in a process of its own: it needs setuptools, and neither a network nor a front
end. It works on a copy, because setuptools leaves folders beside what it builds, and puts into a wheel what an earlier
build has left there.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Of a checkout, what is no source.
_LEFT_OUT = (".*", "__pycache__", "build", "dist", "site", "htmlcov", "*.egg-info", "lightning_logs", "checkpoints")


def copy_of_checkout(folder: Path) -> Path:
    """The sources of this checkout, in ``folder``, which is made."""
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*_LEFT_OUT))
    return folder


def build(what: str, source: Path, folder: Path) -> Path:
    """Builds the "sdist" or "wheel" of a source tree, and returns the file in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    program = f"import sys; from setuptools import build_meta; print(build_meta.build_{what}(sys.argv[1]))"
    command = [sys.executable, "-c", program, str(folder)]
    result = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False, timeout=600)
    if result.returncode:
        raise RuntimeError(f"the {what} of {source} cannot be built:\n{result.stderr}")
    return folder / result.stdout.splitlines()[-1]


def unpacked(sdist: Path, folder: Path) -> Path:
    """The source tree in an sdist, in ``folder``."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (tree,) = folder.iterdir()
    return tree


def main(folder: Path) -> None:
    """Builds both into a folder, the wheel out of the sdist."""
    work = folder / "work"
    try:
        sdist = build("sdist", copy_of_checkout(work / "checkout"), folder)
        wheel = build("wheel", unpacked(sdist, work / "sdist"), folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(sdist, wheel, sep="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
