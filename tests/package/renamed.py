"""A copy of the checkout whose tests train with the package ``pytorch_lightning``, for ``make test-pytorch-lightning``.

    python -m tests.package.renamed FOLDER

The package itself is copied as it is: it has to find out by itself which Lightning there is.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_COPIED = ("lightning_roundpipe", "tests", "examples", "docs", "benchmarks")
_FILES = ("lightning_roundpipe_command.py", "pyproject.toml", "README.md")
# What stands in a program -> what takes its place. In errors and pages, dots may be escaped.
_NAMES = (
    (r"\bL\.(pytorch|fabric)\.callbacks\b", r"L.callbacks"),
    (r"\bL\.pytorch\.", r"L."),
    (r"\bL\.fabric\.", r"sys.modules['lightning_fabric']."),
    (r"\blightning(\\?)\.pytorch\b", r"pytorch_lightning"),
    (r"\blightning(\\?)\.fabric\b", r"lightning_fabric"),
    (r"\bimport lightning\b(?!\.)", r"import pytorch_lightning"),
    (r"\bfrom lightning import\b", r"from pytorch_lightning import"),
)


def renamed(text: str) -> str:
    """A program with the names of the other package."""
    for pattern, name in _NAMES:
        text = re.sub(pattern, name, text)
    return text


def copy(folder: Path) -> None:
    """Fills a folder, which must not be there."""
    for name in _COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in _FILES:
        shutil.copy(ROOT / name, folder / name)
    for name in _COPIED[1:]:
        for ending in ("*.py", "*.md", "*.yaml"):
            for path in (folder / name).rglob(ending):
                path.write_text(renamed(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    copy(Path(sys.argv[1]))
