"""Makes a page of the marks in the tests: ``python -m tests.compatibility.table``.

``docs/reference/compatibility.md`` tells users what works, by kind, and has a row for all that is refused, differs or
has a note. See [Note: compatibility rows]. Only sources are read, so that it does not depend on what is installed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from tests.support.rows import KINDS, Status, compat, compat_each

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

- [What does not work](#what-does-not-work) ends in a clear error, before work is lost. (Plain mistakes do, too.)
- [What differs](#what-differs) works, with the difference that is named.
- [What works](#what-works) does what it does in plain Lightning on one device
  ([rule of exactness](../explanation/exactness.md)).

"""


class TableError(Exception):
    """Marks that make no table. The message names file and line of each."""


@dataclass(frozen=True)
class Mark:
    """One ``compat`` mark.

    Attributes:
        arguments: kind, name, status and note.
        place: file and line.
        tests: ids of the tests that carry it, relative to the folder of the tests.
        needs: by test, the packages without which it is skipped.
    """

    kind: str
    name: str
    status: str
    note: str
    place: str
    tests: tuple[str, ...]
    needs: dict[str, list[str]] = field(default_factory=dict, compare=False)


@dataclass
class Feature:
    """A row: all marks of one feature taken together."""

    kind: str
    name: str
    status: str
    note: str = ""
    tests: list[str] = field(default_factory=list)
    needs: dict[str, list[str]] = field(default_factory=dict)


# --- from sources to marks ---------------------------------------------------------------------------------------


def _name_of(call: ast.Call) -> str | None:
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", None)


def _calls(node: ast.AST, *names: str) -> Iterator[ast.Call]:
    """Calls of ``name`` or of ``<anything>.name`` in the node; without names those that make rows."""
    for child in ast.walk(node):
        if isinstance(child, ast.Call) and _name_of(child) in (names or ("compat", "compat_each")):
            yield child


def _names(nodes: Iterable[ast.AST]) -> set[str]:
    return {child.id for node in nodes for child in ast.walk(node) if isinstance(child, ast.Name)}


def _rows(call: ast.Call, place: str) -> list[tuple[str, str, str, str]]:
    """Kind, name, status and note of every row that the call makes.

    Raises:
        TableError: if they are not literals, or make no row.
    """
    if not isinstance(call.func, ast.Name):
        raise TableError(f"{place}: use compat() of tests/support/rows.py, which names its arguments")
    try:
        positional = [ast.literal_eval(argument) for argument in call.args]
        keywords: dict[str, Any] = {str(entry.arg): ast.literal_eval(entry.value) for entry in call.keywords}
        make = compat_each if _name_of(call) == "compat_each" else compat
        kind, name, status, note = make(*positional, **keywords).mark.args
    except (TypeError, ValueError) as error:
        raise TableError(f"{place}: the arguments of compat() must be literals: {error}") from None
    if kind not in KINDS:
        raise TableError(f"{place}: unknown kind {kind!r}: one of {', '.join(KINDS)}, or add it to rows.py")
    if status not in STATUSES:
        raise TableError(f"{place}: unknown status {status!r} of {name!r}: one of {', '.join(STATUSES)}")
    if not name or name != name.strip():
        raise TableError(f"{place}: {name!r} is no name of a feature")
    if status != "equal" and not note:
        raise TableError(f"{place}: {name!r} has status {status!r}: its note must say what happens, and what to do")
    return [(kind, each, status, note) for each in (name.split() if make is compat_each else [name])]


def _refuse_hidden_skips(nodes: Iterable[ast.AST], place: str) -> None:
    """A row whose test never runs would show nothing."""
    for node in nodes:
        for child in ast.walk(node):
            mark = child.attr if isinstance(child, ast.Attribute) else None
            if mark in ("skip", "xfail", "gpu"):
                raise TableError(f"{place}: the test of a row must run and pass on a CPU, but is marked {mark!r}")
        for call in _calls(node, "skipif"):
            if not any(entry.arg == "reason" for entry in call.keywords):
                raise TableError(f"{place}: skipif without a reason: name what is missing")


@dataclass
class _File:
    """Marks of one file, and what is needed to find the tests that they belong to."""

    path: str  # relative to the folder of the tests
    tests: list[tuple[str, set[str]]] = field(default_factory=list)  # id, names in its decorators
    constants: dict[str, ast.AST] = field(default_factory=dict)  # what is assigned on the level of the module
    marks: list[Mark] = field(default_factory=list)
    shared: list[ast.AST] = field(default_factory=list)  # marks of the whole module
    needs: dict[str, list[str]] = field(default_factory=dict)  # packages without which a test is skipped

    def place(self, node: ast.AST) -> str:
        return f"tests/{self.path}:{getattr(node, 'lineno', 0)}"

    def add(self, nodes: Iterable[ast.AST], *tests: str) -> None:
        for node in nodes:
            for call in _calls(node):
                place = self.place(call)
                self.marks += [Mark(*row, place, tests, self.needs) for row in _rows(call, place)]
            for parameter in _calls(node, "param"):
                if any(_calls(parameter)):
                    _refuse_hidden_skips(parameter.keywords, self.place(parameter))

    def read(self, statements: Iterable[ast.stmt]) -> None:
        """Goes through a module."""
        for node in statements:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self._read_function(node)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                self._read_assignment(node)
            else:
                self._refuse_marks([node])

    def _read_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        test = f"{self.path}::{node.name}"
        if any(any(_calls(entry)) for entry in node.decorator_list):
            if not node.name.startswith("test"):
                raise TableError(f"{self.place(node)}: {node.name} has a compat() mark and is no test")
            direct = [entry for entry in node.decorator_list if not any(_calls(entry, "parametrize"))]
            _refuse_hidden_skips(direct, self.place(node))
            self.add(node.decorator_list, test)
        if node.name.startswith("test"):
            self.tests.append((test, _names(node.decorator_list)))
            self.needs[test] = [str(ast.literal_eval(c.args[0])) for c in _calls(node, "importorskip")]
        self._refuse_marks([*node.body, node.args])

    def _read_assignment(self, node: ast.Assign | ast.AnnAssign) -> None:
        names = _names(node.targets if isinstance(node, ast.Assign) else [node.target])
        if node.value is None:
            return
        if names == {"pytestmark"}:
            self.shared.append(node.value)
            self._refuse_marks([node.value])
        else:
            self.constants.update(dict.fromkeys(names, node.value))

    def _refuse_marks(self, nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            for call in _calls(node):
                raise TableError(f"{self.place(call)}: this compat() mark belongs to no test")

    def finish(self) -> list[Mark]:
        """Adds the marks in constants, which belong to the tests whose decorators name the constant."""
        for name, value in self.constants.items():
            tests = [test for test, names in self.tests if name in self._reached(names)]
            if any(_calls(value)) and not tests:
                raise TableError(f"{self.place(value)}: no test is parametrized with {name}, which has compat() marks")
            self.add([value], *tests)
        if self.marks:
            for value in self.shared:
                _refuse_hidden_skips([value], self.place(value))
        return self.marks

    def _reached(self, names: set[str]) -> set[str]:
        reached: set[str] = set()
        while names := names - reached:
            reached |= names
            names = _names(self.constants[name] for name in names if name in self.constants)
        return reached


def marks_of(source: str, path: str) -> list[Mark]:
    """Marks in the source of the test file ``path``, which is relative to the folder of the tests.

    Raises:
        TableError: for a mark that makes no row, that belongs to no test, or whose test does not run.
    """
    file = _File(path)
    file.read(ast.parse(source).body)
    return file.finish()


def all_marks(tests: Path = ROOT / "tests") -> list[Mark]:
    """Marks of all test files, in the order of their paths. Raises TableError, with all that is wrong."""
    marks, errors = [], []
    for path in sorted(tests.rglob("test_*.py")):
        source = path.read_text(encoding="utf-8")
        if "compat" not in source:
            continue
        try:
            marks += marks_of(source, path.relative_to(tests).as_posix())
        except TableError as error:
            errors.append(str(error))
    if errors:
        raise TableError("\n".join(errors))
    return marks


# --- from marks to the page -------------------------------------------------------------------------------------


def features_of(marks: Iterable[Mark]) -> list[Feature]:
    """One feature per kind and name, sorted by kind and name.

    Raises:
        TableError: if two marks of a feature give it different statuses or notes.
    """
    features: dict[tuple[str, str], Feature] = {}
    first: dict[tuple[str, str], Mark] = {}
    errors = []
    for mark in marks:
        key = (mark.kind, mark.name)
        other = first.setdefault(key, mark)
        feature = features.setdefault(key, Feature(mark.kind, mark.name, mark.status))
        if mark.status != feature.status:
            errors.append(f"{mark.name!r} is {mark.status!r} at {mark.place}, but {other.status!r} at {other.place}")
        if mark.note and feature.note and mark.note != feature.note:
            errors.append(f"{mark.name!r} has one note at {mark.place}, and another one at {other.place}")
        feature.note = feature.note or mark.note
        feature.tests += [test for test in mark.tests if test not in feature.tests]
        feature.needs |= {test: mark.needs.get(test, []) for test in mark.tests}
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
    features = features_of(all_marks())
    PAGE.write_text(page_of(features), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: {count_line(features)}")


if __name__ == "__main__":
    main()
