"""The layers of the package, checked on the source: imports point down only, and no piece outgrows its reader."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = "lightning_roundpipe"
ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / PACKAGE).rglob("*.py"))
MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 70


@dataclass(frozen=True)
class Rule:
    """What a part may import: parts of this package, and libraries besides the standard library."""

    parts: frozenset[str]
    libraries: frozenset[str]


def _rule(parts: str = "", libraries: str = "") -> Rule:
    return Rule(frozenset(parts.split()), frozenset(libraries.split()))


_ADAPTER_LIBRARIES = "lightning lightning_utilities torch torchmetrics typing_extensions"
_ALL_PARTS = " ".join({path.relative_to(ROOT / PACKAGE).parts[0].removesuffix(".py") for path in FILES})
_ABOVE_THE_STRATEGY = {"__init__", "cli", "lightning_cli", "timeline_callback"}
RULES = {
    "options": _rule("planning"),
    "planning": _rule("planning"),
    "common": _rule("common", "torch"),
    "engine": _rule("planning engine common", "torch"),
    "pictures": _rule("planning", "matplotlib"),
    "cli": _rule("cli planning pictures __about__", "huggingface_hub rich typing_extensions"),
    "accelerator": _rule("engine", "lightning torch typing_extensions"),
    "strategy": _rule(" ".join(set(_ALL_PARTS.split()) - _ABOVE_THE_STRATEGY), _ADAPTER_LIBRARIES),
    "lightning_cli": _rule("__about__", "lightning lightning_utilities"),
    "timeline_callback": _rule("strategy tracing", _ADAPTER_LIBRARIES),
    "__init__": _rule(_ALL_PARTS, _ADAPTER_LIBRARIES),
}


def rule_of(part: str) -> Rule:
    """Return the rule of a part; other modules at the top are helpers of the strategy, below it."""
    if part in RULES:
        return RULES[part]
    return Rule(RULES["strategy"].parts - {"strategy"}, RULES["strategy"].libraries)


def imported_modules(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute name) for every import in the source, wherever it stands."""
    for node in ast.walk(ast.parse(source)):
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


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """Return a line for each import that the rules forbid to the module (an absolute name)."""
    part = module.split(".")[1] if "." in module else "__init__"
    rule = rule_of(part)
    found = []
    for line, name in imported_modules(source, module, is_package):
        top, *rest = name.split(".")
        if top == PACKAGE:
            # the bare package would pull in everything above
            allowed = part == "__init__" or (bool(rest) and rest[0] in rule.parts)
        else:
            allowed = top in sys.stdlib_module_names or top in rule.libraries
        if not allowed:
            found.append(f"{module}:{line} imports {name}")
    return found


def _module_of(path: Path) -> tuple[str, bool]:
    parts = path.relative_to(ROOT).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    return ".".join(parts[:-1] if is_package else parts), is_package


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down_only(path: Path) -> None:
    module, is_package = _module_of(path)
    assert violations(path.read_text(encoding="utf-8"), module, is_package) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_small(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= MAX_FILE_LINES
    functions = [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    lengths = {node.name: (node.end_lineno or node.lineno) - node.lineno + 1 for node in functions}
    assert {name: length for name, length in lengths.items() if length > MAX_FUNCTION_LINES} == {}


@pytest.mark.parametrize(
    ("module", "source", "is_allowed"),
    [
        ("planning.costs", "import math\nfrom lightning_roundpipe.planning import schedule", True),
        ("planning.costs", "import torch", False),
        ("planning.costs", "from ..engine import units", False),
        ("planning.costs", "from ..common import sizes", False),
        ("common.sizes", "import torch\nfrom .errors import StepAborted", True),
        ("common.sizes", "import lightning", False),
        ("common.sizes", "from ..planning.costs import CallCost", False),
        ("common.sizes", "from ..engine import units", False),
        ("engine.units", "import torch.nn\nfrom ..planning.schedule import Schedule\nfrom .glue import x", True),
        ("engine.units", "from ..common.sizes import num_bytes_of", True),
        ("engine.units", "def f():\n    import lightning.pytorch", False),
        ("engine.units", "from pytorch_lightning import Trainer", False),
        ("engine.units", "import torchmetrics", False),
        ("engine.units", "from lightning_roundpipe.options import Options", False),
        ("engine.units", "import lightning_roundpipe", False),
        ("options", "import dataclasses", True),
        ("options", "import torch", False),
        ("pictures", "def draw():\n    from matplotlib.figure import Figure", True),
        ("pictures", "import torch", False),
        ("pictures", "from .tracing import TraceWriter", False),
        ("cli.plan", "from lightning_roundpipe.planning import Machine\nfrom .output import print_json", True),
        ("cli.plan", "from lightning_roundpipe.strategy import RoundPipeStrategy", False),
        ("cli.plan", "from lightning_roundpipe import RoundPipeStrategy", False),
        ("cli.plan", "def run():\n    import torch", False),
        ("accelerator", "from lightning_roundpipe.strategy import RoundPipeStrategy", False),
        ("helper", "import lightning\nfrom lightning_roundpipe.engine import units", True),
        ("helper", "from lightning_roundpipe.strategy import RoundPipeStrategy", False),
        ("strategy", "from lightning_roundpipe import engine", True),
        ("strategy", "from .timeline_callback import RoundPipeTimeline", False),
        ("timeline_callback", "from .strategy import RoundPipeStrategy", True),
    ],
)
def test_the_rules_themselves(module: str, source: str, is_allowed: bool) -> None:
    assert (violations(source, f"{PACKAGE}.{module}") == []) is is_allowed


def test_import_starts_no_thread_and_does_not_touch_cuda() -> None:
    program = (
        "import threading, lightning, torch, torchmetrics\n"
        "before = set(threading.enumerate())\n"
        f"import {PACKAGE}\n"
        "assert set(threading.enumerate()) <= before, threading.enumerate()\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
