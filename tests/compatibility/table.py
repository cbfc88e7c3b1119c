"""Makes a page of the marks in the tests: ``python -m tests.compatibility.table``.

``docs/reference/compatibility.md`` tells users what works, by kind, and has a row for all that is refused, differs or
has a note. See [Note: compatibility rows]. Only sources are read, so that it does not depend on what is installed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from tests.support.rows import KINDS, Status, compat

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "compatibility.md"
COMMAND = "python -m tests.compatibility.table"
STATUSES: tuple[str, ...] = get_args(Status)
_COMPLETE = """\
All arguments, methods and attributes of the Trainer work, all hooks, methods and attributes of LightningModule and
LightningDataModule, and all hooks of callbacks, but for those above. So do [LightningCLI](../how-to/lightning-cli.md)
and [checkpoints](../migration/index.md#checkpoints-there-and-back) of other strategies."""
# What works of the other kinds is not listed: pages of their own tell of LightningCLI and migration.
LISTED = ("Callback", "Logger", "Profiler", "Precision", "Plugin", "Library")
HEADINGS = {"Library": "Other libraries"}
# Mistakes whose error needs no more words are not listed.
SAYS_ALL = "The error "
# Where a name alone would not tell whose it is.
OWNERS = {
    "Trainer attribute": "trainer.",
    "LightningModule method": "self.",
    "LightningModule attribute": "self.",
}

# Libraries of which many features have rows.
FAMILIES = ("PEFT", "transformers")

_INTRODUCTION = """\
# Compatibility

How features of Lightning and other libraries behave with `strategy="roundpipe"`. A feature is here if a test shows it,
on virtual devices: no [GPU](../explanation/limits.md#gpus) has run these tests.

- [What does not work](#what-does-not-work) ends in a clear error, before work is lost.
- [What differs](#what-differs) works, with the difference that is named.
- [What works](#what-works) does what it does in plain Lightning on one device
  ([rule of exactness](../explanation/exactness.md)).

"""


class TableError(Exception):
    """Marks that make no table. The message names file and line of each."""


@dataclass(frozen=True)
class Feature:
    """A row.

    Attributes:
        kind: with name, status and note, what ``compat`` was given.
        place: file and line of the mark.
    """

    kind: str
    name: str
    status: str
    note: str
    place: str = ""


# --- from sources to rows ----------------------------------------------------------------------------------------


def _rows(call: ast.Call, place: str) -> Iterator[Feature]:
    """Every row that a call of ``compat`` makes. Raises TableError if it makes none."""
    try:
        positional = [ast.literal_eval(argument) for argument in call.args]
        keywords: dict[str, Any] = {str(entry.arg): ast.literal_eval(entry.value) for entry in call.keywords}
        kind, names, status, note = compat(*positional, **keywords).mark.args
    except (TypeError, ValueError) as error:
        raise TableError(f"{place}: the arguments of compat() must be literals: {error}") from None
    if kind not in KINDS:
        raise TableError(f"{place}: unknown kind {kind!r}: one of {', '.join(KINDS)}, or add it to rows.py")
    if status not in STATUSES:
        raise TableError(f"{place}: unknown status {status!r} of {names!r}: one of {', '.join(STATUSES)}")
    if status != "equal" and not note:
        raise TableError(f"{place}: {names!r} has status {status!r}: its note must say what happens, and what to do")
    for name in names.split("; "):
        if not name or name != name.strip():
            raise TableError(f"{place}: {name!r} is no name of a feature")
        yield Feature(kind, name, status, note, place)


def rows_of(source: str, path: str) -> list[Feature]:
    """Rows of the marks in the source of the test file ``path``. Raises TableError for a mark that makes no row."""
    if "compat(" not in source:  # most files; to parse one takes long
        return []
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    named = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "compat"]
    return [row for call in named for row in _rows(call, f"{path}:{call.lineno}")]


def all_rows(tests: Path = ROOT / "tests") -> list[Feature]:
    """Rows of all test files, in the order of their paths. Raises TableError, with all that is wrong."""
    rows, errors = [], []
    for path in sorted(tests.rglob("test_*.py")):
        try:
            rows += rows_of(path.read_text(encoding="utf-8"), str(path.relative_to(tests.parent)))
        except TableError as error:
            errors.append(str(error))
    if errors:
        raise TableError("\n".join(errors))
    return rows


# --- from rows to the page --------------------------------------------------------------------------------------


def features_of(rows: Iterable[Feature]) -> list[Feature]:
    """One row per kind and name, sorted by kind and name.

    Raises:
        TableError: if two rows of a feature give it different statuses or notes.
    """
    features: dict[tuple[str, str], Feature] = {}
    errors = []
    for row in rows:
        other = features.setdefault((row.kind, row.name), row)
        if row.status != other.status:
            errors.append(f"{row.name!r} is {row.status!r} at {row.place}, but {other.status!r} at {other.place}")
        if row.note and other.note and row.note != other.note:
            errors.append(f"{row.name!r} has one note at {row.place}, and another one at {other.place}")
        if row.note and not other.note:
            features[row.kind, row.name] = row
    if errors:
        raise TableError("\n".join(errors))
    return sorted(features.values(), key=lambda feature: (KINDS.index(feature.kind), feature.name.lower()))


def count_line(features: list[Feature]) -> str:
    """The compatibility count."""
    equal, refused, differs = (sum(feature.status == status for feature in features) for status in STATUSES)
    return f"{len(features)} features: {equal} equal, {refused} refused with a clear error, {differs} with a difference"


def _name_cell(name: str) -> str:
    """The name as code, and what is said about the case as text; a phrase, or what has code in it, is text."""
    base, *case = name.split(" (", 1)
    return _cell(name if " " in base or "`" in base else " (".join([f"`{base}`", *case]))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _list(names: Iterable[str]) -> str:
    """Names in one line, with semicolons where names have commas."""
    cells = [_name_cell(name) for name in names]
    return ("; " if any("," in cell for cell in cells) else ", ").join(cells)


def _works(features: list[Feature]) -> Iterator[str]:
    """A line for each kind of what works and needs no note; cases of what works are left out."""
    yield _COMPLETE
    yield ""
    for kind in LISTED:
        names = [f.name for f in features if f.kind == kind and f.status == "equal" and not f.note]
        plain = [name for name in names if name.split(" (")[0] not in names or " (" not in name]
        families = FAMILIES if kind == "Library" else ()
        for family in families:
            found = [name.removeprefix(f"{family} ") for name in plain if name.startswith(f"{family} ")]
            if found:
                yield f"- **{family}**: {_list(found)}"
        if rest := [name for name in plain if not name.startswith(tuple(f"{family} " for family in families))]:
            yield f"- **{HEADINGS.get(kind, kind)}**: {_list(rest)}"


def _rows_with_notes(features: list[Feature], status: str) -> Iterator[str]:
    """One row for the features that share a note."""
    groups: dict[str, list[str]] = {}
    for feature in features:
        if (
            feature.status == status
            and feature.note
            and not (status == "refused" and feature.note.startswith(SAYS_ALL))
        ):
            groups.setdefault(feature.note, []).append(OWNERS.get(feature.kind, "") + feature.name)
    for note, names in groups.items():
        yield f"| {_list(names)} | {_cell(note)} |"


def page_of(features: list[Feature]) -> str:
    """The text of ``docs/reference/compatibility.md``."""
    tables = {
        status: [f"| Feature | {title} |", "|---|---|", *_rows_with_notes(features, status)]
        for status, title in (("refused", "What to do, or why"), ("differs", "Difference"), ("equal", "Note"))
    }
    lines = [f"{_INTRODUCTION}{count_line(features)}.", ""]
    lines += ["## What does not work", "", *tables["refused"], ""]
    lines += ["## What differs", "", *tables["differs"], ""]
    lines += ["## What works", "", *_works(features), "", *tables["equal"]]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Writes the page."""
    features = features_of(all_rows())
    PAGE.write_text(page_of(features), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: {count_line(features)}")


if __name__ == "__main__":
    main()
