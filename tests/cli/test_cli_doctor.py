"""``roundpipe doctor``: what it finds wrong, and that nothing on a machine makes it fail."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_roundpipe.cli import doctor, machine_facts, main
from lightning_roundpipe.cli.doctor import findings
from lightning_roundpipe.cli.machine_facts import collect
from tests.support.forks import Forks

GIB = 2**30
# A machine with one GPU, of which nothing is wrong.
HEALTHY: dict[str, Any] = {
    "versions": {"python": "3.11.7", "torch": "2.10.0+cu128", "lightning": "2.5", "torchmetrics": "1.0", "peft": None},
    "requirements": {"torch": "2.6", "lightning": "2.5", "torchmetrics": "any"},
    "package_import": True,
    "torch_build": {"version": "2.10.0+cu128", "cuda": "12.8", "rocm": None, "backends": ["gloo", "nccl"]},
    "boards": [{"name": "A card", "driver": "570.1", "pcie_generation": "4", "lanes": "16", "most_lanes": "16"}],
    "gpus": [
        {
            **{"device": "cuda:0", "name": "A card", "compute_capability": "8.9", "peers": [], "error": None},
            **{"memory_bytes": 24 * GIB, "free_bytes": 23 * GIB},
        }
    ],
    "links": {"h2d_bytes_per_ms": [25e6], "d2h_bytes_per_ms": [26e6], "shared": []},
    "page_locking": {"limit_bytes": 8 * 2**20, "tried_bytes": 64 * 2**20, "error": 0},
    "host_memory": {
        **{"total_bytes": 128 * GIB, "available_bytes": 100 * GIB, "limit_bytes": None},
        **{"swap_bytes": 0, "shared_bytes": 64 * GIB},
    },
    "cores": {"usable": 16, "threads": 16, "auto_devices": 1, "numa_nodes": 1, "is_spread": None},
    "environment": {},
    "fused_adamw": True,
    "compilers": {"host": "/usr/bin/g++", "triton": True},
}


def machine(**changes: Any) -> dict[str, Any]:
    """A healthy machine but for these: fact="key" of it -> its value, or fact -> all of it."""
    facts = copy.deepcopy(HEALTHY)
    for path, value in changes.items():
        fact, _, key = path.partition("__")
        entry = facts[fact][0] if isinstance(facts[fact], list) else facts[fact]
        if key:
            entry[key] = value
        else:
            facts[fact] = value
    return facts


WITHOUT_GPU = {"boards": [], "gpus": [], "links": {}}
WRONG: list[tuple[dict[str, Any], bool, str]] = [
    # what differs, whether it stops training, what is said (what, value, remedy)
    ({"versions__torchmetrics": None}, True, "torchmetrics is not installed (none): pip install torchmetrics"),
    ({"versions__torch": "2.5.9"}, True, "torch is too old (2.5.9): pip install 'torch>=2.6'"),
    ({"gpus": [], "torch_build__cuda": None}, True, "torch has no CUDA for A card (2.10.0+cu128): install a build"),
    (
        {"gpus": [], "environment": {"CUDA_VISIBLE_DEVICES": ""}},
        *(True, "torch may not see A card (CUDA_VISIBLE_DEVICES=): unset CUDA_VISIBLE_DEVICES"),
    ),
    ({"gpus": []}, True, "torch does not see A card (driver 570.1, torch with CUDA 12.8): update the driver"),
    ({"gpus__error": "no kernel image"}, True, "cuda:0 does not compute (no kernel image): install a torch with"),
    ({"gpus__free_bytes": 11 * GIB}, False, "cuda:0 is in use (11.0 GiB of 24.0 GiB are free): end the processes"),
    ({"boards__lanes": "4"}, False, "A card has fewer lanes than it could (x4 of x16): move it to a slot"),
    (
        {"environment": {"CUDA_LAUNCH_BLOCKING": "1"}},
        *(False, "nothing overlaps with what a GPU computes (CUDA_LAUNCH_BLOCKING=1): unset CUDA_LAUNCH_BLOCKING"),
    ),
    (
        {"page_locking__error": 2},
        *(False, "memory cannot be page-locked: copies are slow (error 2, limit 8.00 MiB): ulimit -l unlimited"),
    ),
    (
        {"page_locking__limit_bytes": 16 * GIB},
        *(False, "less memory may be page-locked than there is (16.0 GiB): ulimit -l unlimited"),
    ),
    (
        {"host_memory__limit_bytes": 32 * GIB},
        *(False, "the container may use a part of the memory only (32.0 GiB of 128 GiB): raise the container's limit"),
    ),
    (
        {"host_memory__shared_bytes": 64 * 2**20},
        *(False, "there is little shared memory (64.0 MiB are free): start a container with --shm-size"),
    ),
    (
        {"cores__numa_nodes": 2, "cores__is_spread": False},
        *(False, "weights may all lie on one NUMA node (2 nodes): start trainings with numactl --interleave=all"),
    ),
    (
        {"cores__threads": 8},
        *(False, "the update of weights leaves cores idle (8 threads on 16 cores): unset OMP_NUM_THREADS"),
    ),
    (
        {"torch_build__backends": []},
        *(False, "several processes cannot train together (backends: none): install a build of torch with gloo"),
    ),
    ({"compilers__host": None}, False, "torch.compile has no C++ compiler (none of CXX, g++, clang++): install g++"),
    ({"compilers__triton": False}, False, "torch.compile has no Triton (none): install triton"),
]
FINE: list[dict[str, Any]] = [
    {},
    WITHOUT_GPU,
    # Without a GPU nothing is locked, and nothing needs Triton.
    {**WITHOUT_GPU, "compilers__triton": False, "page_locking__tried_bytes": None},
    {"versions__torch": "2.6.0a0+git", "versions__lightning": "2.5.0.post0"},
    {"boards__lanes": "[N/A]"},
    {"page_locking__limit_bytes": None},
    {"page_locking__limit_bytes": 128 * GIB},
    {"host_memory__limit_bytes": 128 * GIB},
    {"host_memory__total_bytes": None, "host_memory__limit_bytes": GIB},
    {"cores__numa_nodes": 2, "cores__is_spread": True},
    {"cores__threads": 9},
    {"environment": {"CUDA_LAUNCH_BLOCKING": "0", "CUDA_VISIBLE_DEVICES": "0"}},
]
UNKNOWN: list[tuple[str, bool, str]] = [
    ("package_import", True, "the package cannot be imported (OSError: why): install torch and Lightning again"),
    ("gpus", True, "torch fails to use a GPU (OSError: why): look at nvidia-smi"),
    ("links", False, "links: not to be found out (OSError: why): free memory of the GPUs"),
    ("page_locking", False, "page locking: not to be found out (OSError: why)"),
    ("fused_adamw", False, "AdamW(fused=True) does not run on the host (OSError: why): install a newer torch"),
]


def said(facts: dict[str, Any], unknown: dict[str, str]) -> list[tuple[bool, str]]:
    return [(found.stops, f"{found.what} ({found.value}): {found.remedy}") for found in findings(facts, unknown)]


@pytest.mark.parametrize(("changes", "stops", "expected"), WRONG, ids=[entry[2][:40] for entry in WRONG])
def test_one_wrong_fact_is_one_finding_with_value_and_remedy(
    changes: dict[str, Any], stops: bool, expected: str
) -> None:
    ((is_stopping, text),) = said(machine(**changes), {})
    assert text.startswith(expected)
    assert is_stopping is stops


@pytest.mark.parametrize("changes", FINE, ids=[" ".join(changes) or "healthy" for changes in FINE])
def test_nothing_is_found_where_nothing_is_wrong(changes: dict[str, Any]) -> None:
    assert said(machine(**changes), {}) == []


@pytest.mark.parametrize("fact", HEALTHY)
def test_facts_that_are_not_known_are_passed_over(fact: str) -> None:
    facts = machine()
    del facts[fact]
    expected = [(stops, text) for name, stops, text in UNKNOWN if name == fact]
    found = said(facts, {fact: "OSError: why"})
    assert len(found) == len(expected)
    for (stops, text), (expected_stops, start) in zip(found, expected, strict=True):
        assert text.startswith(start)
        assert stops is expected_stops


def test_what_stops_training_comes_first() -> None:
    found = findings(machine(compilers__host=None, boards__lanes="4", versions__torch="1.13"), {})
    assert [finding.stops for finding in found] == [True, False, False]


def test_a_library_that_is_missing_explains_why_the_package_cannot_be_imported() -> None:
    facts = machine(versions__torch=None)
    del facts["package_import"]
    (found,) = findings(facts, {"package_import": "ModuleNotFoundError: No module named 'torch'"})
    assert found.what == "torch is not installed"


# --- the command -----------------------------------------------------------------------------------------------------

Machine = Callable[[dict[str, Any]], None]


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Puts the command on a machine with these facts; an exception is raised by its probe."""

    def put(facts: dict[str, Any]) -> None:
        def probe_of(name: str) -> Callable[[], Any]:
            def probe() -> Any:
                if isinstance(facts[name], Exception):
                    raise facts[name]
                return facts[name]

            probe.__name__ = name
            return probe

        monkeypatch.setattr(doctor, "PROBES", tuple(map(probe_of, facts)))

    return put


def test_the_report_has_all_facts_and_no_finding(on: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    on(machine(boards=[*HEALTHY["boards"], {**HEALTHY["boards"][0], "name": "Another"}]))
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    lines = {line.split("  ")[0]: line for line in text.splitlines()}
    for fact in HEALTHY:
        assert fact.replace("_", " ") in lines
    assert lines["links"].endswith("h2d 25.0 GB/s, d2h 26.0 GB/s")
    assert lines["versions"].endswith("torch 2.10.0+cu128, lightning 2.5, torchmetrics 1.0")
    assert lines["host memory"].endswith("total 128 GiB, available 100 GiB, swap 0 B, shared 64.0 GiB")
    assert "\n                name Another, driver 570.1" in text
    assert "verify=2" in text
    assert text.splitlines()[-1] == "Verdict: ready."


def test_the_report_ends_with_findings_and_says_that_there_is_no_gpu(
    on: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    on(machine(**WITHOUT_GPU, compilers__host=None))
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "\n\nWARNING: torch.compile has no C++ compiler (none of CXX, g++, clang++).\n  Remedy: install g++" in text
    assert "\nThere is no GPU to train on: devices are virtual, on the cores of the host.\n" in text
    last = text.splitlines()[-1]
    assert last == "Verdict: ready, and better if you: install g++ or clang++, or leave compile_units=True out."


def test_the_verdict_has_three_things_to_change_at_most_and_first_what_stops_training(
    on: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"boards__lanes": "4", "compilers__host": None, "versions__torch": "1.13"}
    begin = "Verdict: not ready before you: pip install 'torch>=2.6'; move it to a slot with all lanes: weights travel"
    for more, end in (({}, "leave compile_units=True out."), ({"cores__threads": 8}, " (the first 3 of 4).")):
        on(machine(**changes, **more))
        assert main(["doctor"]) == 1
        last = capsys.readouterr().out.splitlines()[-1]
        assert last.startswith(begin)
        assert last.endswith(end)
        assert last.count("; ") == 2


def test_a_probe_that_fails_says_so_in_its_row(on: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    on(machine(boards=PermissionError("no way in\nmore"), host_memory=ZeroDivisionError()))
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "boards          not known (PermissionError: no way in)\n" in text
    assert "host memory     not known (ZeroDivisionError)\n" in text


def test_nothing_that_fails_makes_the_command_fail(on: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    on({name: OSError("gone") for name in HEALTHY})
    assert main(["doctor"]) == 1  # the package cannot be imported
    text = capsys.readouterr().out
    assert text.count("not known (OSError: gone)") == len(HEALTHY)
    assert "There is no GPU" not in text  # that is not known either


@pytest.mark.parametrize(("changes", "status"), [({}, 0), ({"boards__lanes": "8"}, 0), ({"versions__torch": "2"}, 1)])
def test_json_has_facts_reasons_and_findings(
    on: Machine, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], status: int
) -> None:
    facts = machine(**changes)
    on({**facts, "environment": KeyError("HOME")})
    assert main(["doctor", "--json"]) == status
    document = json.loads(capsys.readouterr().out)
    del facts["environment"]
    assert document["facts"] == facts
    assert document["unknown"] == {"environment": "KeyError: 'HOME'"}
    assert document["verdict"].startswith(("ready", "not ready")[status])
    assert [sorted(finding) for finding in document["findings"]] == [["remedy", "stops", "value", "what"]] * len(
        changes
    )


# --- the probes ------------------------------------------------------------------------------------------------------


# What the command finds out in a process where Lightning is not to be had.
PROGRAM = """
import json, sys
sys.modules.update({name: None for name in sys.modules if name.partition(".")[0] == "lightning"})  # imported already
import lightning_roundpipe_command
sys.argv = ["roundpipe", "--version"]
try:
    lightning_roundpipe_command.main()
except SystemExit:
    pass
from lightning_roundpipe.cli.machine_facts import PROBES, collect
probes = [probe for probe in PROBES if probe.__name__ != "package_import"]
print(json.dumps(collect(probes)))
"""


def test_probes_know_this_machine_without_lightning(forks: Forks, tmp_path: Path) -> None:
    """The machine of these tests is made like what the probes give, as far as there is one without a GPU."""
    script = tmp_path / "probes.py"
    script.write_text(PROGRAM, encoding="utf-8")
    facts, unknown = json.loads(forks.run(script, folder=tmp_path).splitlines()[-1])
    assert unknown == {}
    assert facts.keys() == HEALTHY.keys() - {"package_import"}
    for name in ("torch_build", "page_locking", "host_memory", "cores", "compilers"):
        assert facts[name].keys() == HEALTHY[name].keys()
    assert facts["versions"]["torch"].startswith(facts["torch_build"]["version"].partition("+")[0])
    assert facts["requirements"]["torch"] == "2.6"
    assert "hf" not in facts["requirements"]
    assert facts["cores"]["usable"] >= 1


def test_the_import_is_tried_and_one_that_fails_is_known_by_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = [(0, ""), (1, "Traceback\n  ...\nImportError: libcudart.so\n")]

    def run(command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
        assert command == [sys.executable, "-c", "import lightning_roundpipe"]
        code, printed = ends.pop(0)
        return subprocess.CompletedProcess(command, code, stdout="", stderr=printed)

    monkeypatch.setattr(subprocess, "run", run)
    assert collect([machine_facts.package_import]) == ({"package_import": True}, {})
    assert collect([machine_facts.package_import]) == ({}, {"package_import": "ImportError: libcudart.so"})


def test_boards_are_those_of_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "NVIDIA GeForce RTX 4090, 570.86, 4, 8, 16\nNVIDIA GeForce RTX 4090, 570.86, [N/A], 16, 16\n\n"
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(
        subprocess, "run", lambda *args, **kwargs: subprocess.CompletedProcess(args, 0, stdout=text, stderr="")
    )
    first, second = machine_facts.boards()
    assert first.keys() == HEALTHY["boards"][0].keys()
    assert (first["name"], first["lanes"], first["most_lanes"]) == ("NVIDIA GeForce RTX 4090", "8", "16")
    assert second["pcie_generation"] == "[N/A]"
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert machine_facts.boards() == []


def test_variables_that_matter_are_shown_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in tuple(os.environ):
        monkeypatch.delenv(name)
    shown = {"OMP_NUM_THREADS": "4", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "LOCAL_RANK": "0"}
    for name, value in {**shown, "HF_TOKEN": "secret", "PATH": "/bin"}.items():
        monkeypatch.setenv(name, value)
    assert machine_facts.environment() == dict(sorted(shown.items()))


@pytest.mark.parametrize(
    ("nodes", "policy", "expected"), [(1, None, None), (2, "default", False), (2, "interleave:0-1", True)]
)
def test_memory_is_spread_where_the_kernel_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nodes: int, policy: str | None, expected: bool | None
) -> None:
    for node in range(nodes):
        (tmp_path / f"node{node}").mkdir()
    (tmp_path / "numa_maps").write_text(f"7f00 {policy} anon=1\n")
    monkeypatch.setattr(machine_facts, "_NODES", tmp_path)
    monkeypatch.setattr(machine_facts, "_PLACEMENT", tmp_path / "numa_maps")
    found = machine_facts.cores()
    assert (found["numa_nodes"], found["is_spread"]) == (nodes, expected)
