"""The house, checked on the source: imports point down only, without cycles, and nothing outgrows its reader.

A floor may import the floors below it, whichever they are; a folder inside a floor counts as part of it. Imports count
wherever they stand, also in functions. Under ``TYPE_CHECKING`` nothing of this package may be imported at all: it would
be a dependency that points up in disguise.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.support.forks import Forks

PACKAGE = "lightning_roundpipe"
ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / PACKAGE).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
NATIVE = sorted(path for ending in ("*.h", "*.cpp") for path in (ROOT / "tests").rglob(ending))
MAX_FILE_LINES = 420
MAX_TEST_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_MODULES = 14  # of a folder
FOLDERS = sorted({path.parent for path in [*FILES, *TESTS]})

_TORCH = "torch"
_LIGHTNING = "lightning_utilities torch torchmetrics typing_extensions"
# From the top down: each part with the libraries that it may import besides the standard library.
_FLOORS: list[tuple[str, str]] = [
    ("__init__", _LIGHTNING),
    ("strategy", _LIGHTNING),
    ("integration", _LIGHTNING),
    ("reporting", f"{_LIGHTNING} matplotlib"),
    ("accelerator", _LIGHTNING),
    ("lightning_packages", f"{_LIGHTNING} lightning"),
    ("engine", _TORCH),
    ("autograd", _TORCH),
    ("usercode", _TORCH),
    ("optimizer", _TORCH),
    ("weights", _TORCH),
    ("ranks", _TORCH),
    ("devices", _TORCH),
    ("common", _TORCH),
    ("options", ""),
    ("planning", ""),
]


@dataclass(frozen=True)
class Rule:
    """What a part may import: parts of this package, and libraries besides the standard library."""

    parts: frozenset[str]
    libraries: frozenset[str]


def _rules() -> dict[str, Rule]:
    names = [name for name, _ in _FLOORS]
    rules = {
        name: Rule(frozenset(names[place:]), frozenset(libraries.split()))
        for place, (name, libraries) in enumerate(_FLOORS)
    }
    rules["__init__"] = Rule(rules["__init__"].parts | {"__about__", "lightning_cli"}, rules["__init__"].libraries)
    rules["cli"] = Rule(
        frozenset({"cli", "planning", "reporting.pictures", "__about__"}),
        frozenset({"typing_extensions"}),
    )
    # It imports torch when it is asked for facts, as `roundpipe doctor` does, and no other command.
    machine = {"__about__", "common", "devices"}
    rules["cli.machine_facts"] = Rule(frozenset(machine), frozenset({_TORCH}))
    # It builds models that no formula describes, when one is asked for.
    rules["cli.estimate.built"] = Rule(frozenset({"cli"}), frozenset({_TORCH, "transformers"}))
    rules["__about__"] = Rule(frozenset(), frozenset())
    rules["lightning_cli"] = Rule(
        frozenset({"__about__", "lightning_packages"}), frozenset({"lightning_utilities", "yaml"})
    )
    return rules


RULES = _rules()


def imported_modules(source: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute name) for every import in the source, wherever it stands."""
    for node in ast.walk(source):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            name = node.module or ""
            if node.level:
                parents = module.split(".")
                base = parents[: len(parents) - node.level + (1 if is_package else 0)]
                name = ".".join([*base, *filter(None, [node.module])])
            # "from package import part" names the part only in the imported name
            yield from ((node.lineno, f"{name}.{alias.name}") for alias in node.names)


def imports_for_types(source: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute name) for every import of this package under ``TYPE_CHECKING``."""
    for node in ast.walk(source):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            imports = imported_modules(node, module, is_package)
            yield from ((line, name) for line, name in imports if name.split(".")[0] == PACKAGE)


def violations(tree: ast.Module, module: str, is_package: bool = False) -> list[str]:
    """Return a line for each import that the rules forbid to the module (an absolute name)."""
    part = module.split(".")[1] if "." in module else "__init__"
    rule = RULES.get(module.partition(".")[2]) or RULES[part]
    found = [f"{module}:{line} imports {name} for types" for line, name in imports_for_types(tree, module, is_package)]
    for line, name in imported_modules(tree, module, is_package):
        top, *rest = name.split(".")
        if top == PACKAGE:
            # the bare package would pull in everything above
            allowed = part == "__init__" or bool({".".join(rest[:1]), ".".join(rest[:2])} & rule.parts)
        else:
            allowed = top in sys.stdlib_module_names or top in rule.libraries
        if not allowed:
            found.append(f"{module}:{line} imports {name}")
    return found


def cycle_in(imports: Mapping[str, set[str]]) -> list[str]:
    """Return the modules of a ring of imports; none if there is none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@functools.cache
def _tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _module_of(path: Path) -> tuple[str, bool]:
    parts = path.relative_to(ROOT).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    return ".".join(parts[:-1] if is_package else parts), is_package


def _imports_between(files: list[Path]) -> dict[str, set[str]]:
    trees = {_module_of(path): _tree_of(path) for path in files}
    modules = {module for module, _ in trees}
    imports: dict[str, set[str]] = {}
    for (module, is_package), tree in trees.items():
        targets = imports[module] = set()
        for _, name in imported_modules(tree, module, is_package):
            while name and name not in modules:
                name = name.rpartition(".")[0]
            if name and name != module:
                targets.add(name)
    return imports


def test_imports_point_down_only() -> None:
    found = []
    for path in FILES:
        module, is_package = _module_of(path)
        found += violations(_tree_of(path), module, is_package)
    assert found == []


def test_one_module_names_the_packages_of_lightning() -> None:
    names = ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric")
    found = {
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in FILES
        if path.name not in ("lightning_packages.py", "attributes.py")  # which knows objects of the user's
        for node in ast.walk(_tree_of(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value
        if node.value.startswith(names)
    }
    assert found == set()


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert cycle_in(_imports_between(FILES)) == []
    assert cycle_in({"a": {"b"}, "b": {"a"}}) == ["a", "b", "a"]


def _num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_files_stay_small() -> None:
    limits = {**dict.fromkeys(FILES, MAX_FILE_LINES), **dict.fromkeys([*TESTS, *NATIVE], MAX_TEST_FILE_LINES)}
    found = {
        str(path.relative_to(ROOT)): _num_lines(path) for path, limit in limits.items() if _num_lines(path) > limit
    }
    assert found == {}


def _functions_of(path: Path) -> Iterator[tuple[str, int]]:
    """Yield (place and name, number of lines) for every function, wherever it stands."""
    statements: list[ast.AST] = [_tree_of(path)]
    while statements:  # without their expressions, which are most of a tree
        node = statements.pop()
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            statements += getattr(node, field, ())
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            place = f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
            yield place, (node.end_lineno or node.lineno) - node.lineno + 1


def test_functions_stay_small() -> None:
    long = [path for path in [*FILES, *TESTS] if _num_lines(path) > MAX_FUNCTION_LINES]
    functions = [function for path in long for function in _functions_of(path)]
    assert [(name, length) for name, length in functions if length > MAX_FUNCTION_LINES] == []


def test_folders_stay_small() -> None:
    counts = {folder: len([*folder.glob("*.py")]) - (folder / "__init__.py").exists() for folder in FOLDERS}
    assert {str(path.relative_to(ROOT)): n for path, n in counts.items() if n > MAX_MODULES} == {}


def unnamed_or_gone(folder: Path) -> set[str]:
    """Return what the docstring of a folder's ``__init__`` leaves out of it, and the modules that it only names."""
    text = ast.get_docstring(_tree_of(folder / "__init__.py")) or ""
    there = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    named = set(re.findall(r"`(\w+)`", text))
    return (there - {"__init__", "__main__"} - named) | (set(re.findall(r":mod:`(\w+)`", text)) - there)


def test_the_docstring_of_a_folder_names_what_is_in_it() -> None:
    folders = {path.parent for path in FILES} - {ROOT / PACKAGE}
    found = {str(folder.relative_to(ROOT)): unnamed_or_gone(folder) for folder in folders}
    assert {folder: names for folder, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("module", "source", "is_allowed"),
    [
        ("engine.gate", "import torch.nn\nfrom ..planning.schedule import Schedule\nfrom ..usercode import lock", True),
        ("engine.gate", "def f():\n    import lightning.pytorch", False),
        ("strategy", "import lightning.pytorch as pl", False),
        ("strategy", "from .lightning_packages import pl", True),
        ("engine.gate", "import lightning_roundpipe", False),
        ("weights.units", "if TYPE_CHECKING:\n    from .casts import Casts", False),
        ("weights.units", "if TYPE_CHECKING:\n    from torch import Tensor", True),
        ("weights.units", "from ..optimizer.updates import Updates", False),
        ("options", "import dataclasses", True),
        ("options", "import torch", False),
        ("cli.plan", "from lightning_roundpipe.strategy import RoundPipeStrategy", False),
        ("cli.machine_facts", "def gpus():\n    import torch\n    from lightning_roundpipe.devices import links", True),
        ("integration.loss", "from lightning_roundpipe.strategy import RoundPipeStrategy", False),
    ],
)
def test_the_rules_themselves(module: str, source: str, is_allowed: bool) -> None:
    assert (violations(ast.parse(source), f"{PACKAGE}.{module}") == []) is is_allowed


IMPORT = f"""
import sys, threading
import lightning as L, torch, torchmetrics
threads, modules = set(threading.enumerate()), set(sys.modules)
import {PACKAGE}
assert not torch.cuda.is_initialized()
extras = {{"transformers", "peft", "jsonargparse", "matplotlib"}}
assert not extras & {{name.split(".")[0] for name in set(sys.modules) - modules}}
trainer = L.Trainer(strategy="roundpipe", accelerator="cpu", devices=2, barebones=True)
assert type(trainer.strategy).__name__ == "RoundPipeStrategy"
assert set(threading.enumerate()) == threads, threading.enumerate()
"""


def test_import_starts_no_thread_and_touches_neither_cuda_nor_extras(forks: Forks, tmp_path: Path) -> None:
    script = tmp_path / "imports.py"
    script.write_text(IMPORT)
    forks.run(script, folder=tmp_path)
