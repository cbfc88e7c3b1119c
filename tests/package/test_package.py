"""What is published: sdist and wheel hold what they should, declare what they need, and work when installed."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterable, Iterator
from email.parser import HeaderParser
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

import lightning_roundpipe
from lightning_roundpipe import RoundPipeStrategy
from tests.package import builds
from tests.support.forks import Forks

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "lightning_roundpipe"
COMMAND = "lightning_roundpipe_command.py"


class Built(NamedTuple):
    """What was built: the wheel of the checkout, and another one of the sdist."""

    sdist: Path
    wheel: Path
    wheel_of_sdist: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("packages")
    checkout = builds.copy_of_checkout(folder / "checkout")
    sdist = builds.build("sdist", checkout, folder)
    tree = builds.unpacked(sdist, folder / "unpacked")
    return Built(sdist, builds.build("wheel", checkout, folder), builds.build("wheel", tree, folder / "of sdist"))


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


# --- files -----------------------------------------------------------------------------------------------------------


def test_the_wheel_has_the_package_and_nothing_else(built: Built) -> None:
    own = [path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    expected = {path.relative_to(ROOT).as_posix() for path in own} | {COMMAND}
    assert {"lightning_roundpipe/py.typed", "lightning_roundpipe/cli/estimate/configs.json"} <= expected
    files = {name for name in contents(built.wheel) if ".dist-info/" not in name}
    assert files == expected


def test_the_wheel_has_its_licence(built: Built) -> None:
    files = {name.partition(".dist-info/")[2]: data for name, data in contents(built.wheel).items()}
    for name in ("LICENSE", "NOTICE"):
        assert files[f"licenses/{name}"] == (ROOT / name).read_bytes()


def test_the_sdist_builds_the_same_wheel(built: Built) -> None:
    assert built.wheel.name == built.wheel_of_sdist.name
    assert contents(built.wheel) == contents(built.wheel_of_sdist)


def test_the_sdist_has_no_tests(built: Built, tmp_path: Path) -> None:
    tree = builds.unpacked(built.sdist, tmp_path)
    folders = {path.name for path in tree.iterdir() if path.is_dir()}
    assert folders == {"lightning_roundpipe", "lightning_roundpipe.egg-info"}
    assert {"CHANGELOG.md", "LICENSE", "NOTICE", "README.md", COMMAND} <= {path.name for path in tree.iterdir()}


# --- what is declared ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def metadata(built: Built) -> list[tuple[str, str]]:
    (text,) = (data for name, data in contents(built.wheel).items() if name.endswith(".dist-info/METADATA"))
    return HeaderParser().parsestr(text.decode("utf-8")).items()


def requirements(metadata: list[tuple[str, str]], extra: str | None) -> set[str]:
    """The names under which what is declared is imported: of the package itself, or of an extra."""
    found = set()
    for key, value in metadata:
        line, _, marker = value.partition(";")
        if key == "Requires-Dist" and (f'"{extra}"' in marker if extra else not marker):
            name = re.split(r"[\s\[<>=]", line)[0].replace("-", "_")
            found.add({"PyYAML": "yaml"}.get(name, name))
    return found


def _libraries(nodes: Iterable[ast.AST]) -> set[str]:
    """The libraries that are imported by these nodes, besides the standard library."""
    names = []
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.append(node.module or "")
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"lightning_roundpipe"}


def _outside_of_functions(tree: ast.AST) -> Iterator[ast.AST]:
    """The statements that an import of the module runs."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if not isinstance(node, (ast.expr, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _outside_of_functions(node)


def test_what_is_imported_is_declared_and_the_other_way_round(metadata: list[tuple[str, str]]) -> None:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")]
    always = _libraries(node for tree in trees for node in _outside_of_functions(tree))
    assert always == requirements(metadata, None)
    sometimes = _libraries(node for tree in trees for node in ast.walk(tree)) - always
    assert "matplotlib" in sometimes
    extras = set().union(*(requirements(metadata, extra) for extra in ("hf", "cli", "plot")))
    assert sometimes - extras == set()


def test_extras_have_the_others_in_them(metadata: list[tuple[str, str]]) -> None:
    extras = {value for key, value in metadata if key == "Provides-Extra"}
    assert extras == {"all", "hf", "peft", "cli", "plot", "docs", "test", "dev"}
    required = {value.replace("'", '"') for key, value in metadata if key == "Requires-Dist"}
    for line in ('[cli,hf,plot]; extra == "all"', '[all]; extra == "test"', '[hf]; extra == "peft"'):
        assert f"lightning-roundpipe{line}" in required


def test_the_version_stands_in_one_place_and_where_people_read_it(metadata: list[tuple[str, str]]) -> None:
    version = lightning_roundpipe.__version__
    assert dict(metadata)["Version"] == version
    assert version not in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)[0] == version


def test_classifiers_are_the_versions_of_python_that_are_tested(metadata: list[tuple[str, str]]) -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    (tested,) = re.findall(r"^\s*python: (\[.*\])$", workflow, re.MULTILINE)
    start = "Programming Language :: Python :: 3."
    classifiers = [value for key, value in metadata if key == "Classifier" and value.startswith(start)]
    assert [classifier.rpartition(" ")[2] for classifier in classifiers] == json.loads(tested)
    assert dict(metadata)["Requires-Python"] == f">={json.loads(tested)[0]}"


# --- hosting ---------------------------------------------------------------------------------------------------------


def test_the_workflow_runs_targets_that_exist() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    runs = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    used = {target for run in runs for target in re.findall(r"^make ([a-z-]+)$", run, re.MULTILINE)}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert used <= set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE))
    needed = re.findall(r"^make ([a-z-]+)$", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE)
    assert {"lint", "test", "test-simulated"} == set(needed) <= used


def test_what_contributing_names_exists() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"`make ([a-z-]+)`", text))
    assert targets >= {"test", "test-simulated", "test-network", "test-kills", "gpu"}
    assert targets <= set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE))
    paths = [*re.findall(r"\]\((\w[^)#]*)", text), *re.findall(r"`((?:tests|lightning_roundpipe)/[\w./]+)`", text)]
    assert len(paths) > 5
    assert [path for path in paths if not (ROOT / path).exists()] == []
    house = re.findall(r"(?:^| )([a-z]+)/ ", text.split("```")[1], re.MULTILINE)
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert sorted(house) == sorted(folders)


@pytest.mark.parametrize("name", ["bug", "speed", "feature"])
def test_issue_forms_ask_for_what_the_doctor_says(name: str) -> None:
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text(encoding="utf-8"))
    fields = {field["id"]: field for field in form["body"]}
    assert "roundpipe doctor" in fields["doctor"]["attributes"]["label"]
    assert fields["doctor"].get("validations", {}).get("required", False) is (name != "feature")


# --- the public names ------------------------------------------------------------------------------------------------


def test_every_public_name_and_option_is_stable_or_experimental() -> None:
    text = inspect.getdoc(lightning_roundpipe) or ""
    stable, experimental = text.split("\nStable:\n")[1].split("\nExperimental:\n")
    marked = [re.findall(r"``([a-zA-Z_]+)``", part) for part in (stable, experimental)]
    names = [name for part in marked for name in part if name != "roundpipe"]
    options = [name for name in inspect.signature(RoundPipeStrategy).parameters]
    assert sorted(names) == sorted([*lightning_roundpipe.__all__, *options])


# --- installed -------------------------------------------------------------------------------------------------------

TRAINING = """
import sys
from pathlib import Path

# The libraries are those of the process that this is a fork of; this package is the installed one alone.
folder, checkout = sys.argv[1:]
sys.path[:] = [folder, *(path for path in sys.path if path != checkout)]

import lightning as L
import torch

import lightning_roundpipe
from lightning_roundpipe.cli import machine_facts

assert Path(lightning_roundpipe.__file__).is_relative_to(folder), lightning_roundpipe.__file__
assert {"torch", "lightning"} <= set(machine_facts.requirements())  # which `roundpipe doctor` looks for


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.mse_loss(self.blocks(batch), batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), fused=True)


data = torch.utils.data.DataLoader(torch.randn(16, 8), batch_size=8)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = L.Trainer(strategy="roundpipe", accelerator="cpu", devices=2, max_epochs=1, **quiet)
trainer.fit(Net(), data)
print("trained", trainer.global_step, "of", trainer.strategy.last_step.num_microbatches)
"""


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment, which has the wheel, and sees the libraries of this one."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    python = str(folder / "bin" / "python")
    install = ["-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--no-compile", "--quiet"]
    subprocess.run([sys.executable, *install, str(built.wheel)], check=True, timeout=600)
    # A line of such a file is a folder to look into. Files of this kind that lie there are not read: an editable
    # installation of this package stays out.
    libraries = dict.fromkeys(sysconfig.get_paths()[name] for name in ("purelib", "platlib"))
    lines = "".join(f"{path}\n" for path in libraries)
    (packages_of(folder) / "libraries.pth").write_text(lines, encoding="utf-8")
    return folder


def packages_of(environment: Path) -> Path:
    (packages,) = (environment / "lib").glob("python*/site-packages")
    return packages


def test_the_installed_package_trains(installed: Path, forks: Forks, tmp_path: Path) -> None:
    script = tmp_path / "training.py"
    script.write_text(TRAINING, encoding="utf-8")
    output = forks.run(script, str(packages_of(installed)), str(ROOT), folder=tmp_path)
    assert output.splitlines()[-1] == "trained 2 of 4"


def test_the_installed_command_runs_outside_of_the_checkout(installed: Path, tmp_path: Path) -> None:
    """Its configuration is in the wheel."""
    assert (installed / "bin" / "roundpipe-lightning").exists()
    arguments = ("--model", "qwen3-1.7b", "--gpu", "rtx4090", "--seq-len", "512", "--devices", "1")
    result = subprocess.run(
        [installed / "bin" / "roundpipe", "estimate", *arguments],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    assert "tokens/s" in result.stdout
