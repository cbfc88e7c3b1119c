"""What needs a process of its own: settings that are read once, forks, faults, the exit, and the build."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import accelerator
from tests.support.accelerator import build

ROOT = Path(__file__).resolve().parents[3]
INSTALL = "import torch; from tests.support import accelerator; sim = accelerator.install()\n"
SEGMENTATION_FAULT = -11


def _run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONFAULTHANDLER": "", **variables}
    return subprocess.run(
        [sys.executable, "-c", INSTALL + code], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.accelerator
def test_host_that_touches_device_memory_crashes_if_it_is_protected() -> None:
    done = _run(
        "import ctypes\n"
        "x = torch.ones(4, device='sim:0')\n"
        "print(x.cpu().sum().item(), flush=True)\n"
        "ctypes.c_float.from_address(x.data_ptr()).value",
        SIM_PROTECT="1",
    )
    assert done.stdout == "4.0\n", done.stderr
    assert done.returncode == SEGMENTATION_FAULT, done.stderr


@pytest.mark.accelerator
def test_devices_are_as_many_as_it_was_installed_with_and_multiply_alike_whatever_threads_torch_had() -> None:
    """Where a product is split between threads, it adds up in another order."""
    done = _run(
        "print(sim.device_count(), sim.mem_get_info(2)[1], accelerator.install() is sim is torch.sim)\n"
        "x, y = torch.randn(35, 8), torch.randn(24, 8).t()\n"
        "found = []\n"
        "for device, threads in enumerate((1, 2, 4)):\n"
        "    torch.set_num_threads(threads)\n"
        "    found.append(torch.mm(x.to(f'sim:{device}'), y.to(f'sim:{device}')).cpu())\n"
        "print([torch.equal(it, found[0]) for it in found])",
        SIM_DEVICES="3",
        SIM_MEMORY_MB="64",
    )
    assert done.stdout == f"3 {64 << 20} True\n[True, True, True]\n", done.stderr


@pytest.mark.accelerator
def test_another_process_builds_nothing_and_ends_while_streams_are_busy() -> None:
    built = build._folder() / "native.so"
    before = built.stat().st_mtime_ns
    done = _run("sim._sleep(1000)\nx = torch.ones(3, device='sim:0') * 2")
    assert (done.returncode, done.stderr) == (0, "")
    assert built.stat().st_mtime_ns == before


@pytest.mark.accelerator
def test_forked_child_lets_go_and_computes_nothing() -> None:
    done = _run(
        "import os, threading\n"
        "held = torch.ones(3, device='sim:0')\n"
        "sim.synchronize()\n"
        "if not os.fork():\n"
        "    held = None\n"
        "    try:\n"
        "        torch.ones(2, device='sim:0')\n"
        "    except RuntimeError as error:\n"
        "        os._exit(7 if 'forked subprocess' in str(error) else 8)\n"
        "    os._exit(9)\n"
        "print(os.waitstatus_to_exitcode(os.wait()[1]), held.sum().item())"
    )
    assert done.stdout == "7 3.0\n", done.stderr


@pytest.mark.accelerator
def test_workers_of_a_data_loader_stay_away_from_it() -> None:
    done = _run(
        "data = [torch.ones(2) * i for i in range(4)]\n"
        "loader = torch.utils.data.DataLoader(data, num_workers=2, multiprocessing_context='fork', pin_memory=True)\n"
        "held = torch.ones(3, device='sim:0')\n"
        "print([batch.is_pinned() for batch in loader], sum(b.to('sim:0').sum().item() for b in loader))"
    )
    assert done.stdout == "[True, True, True, True] 12.0\n", done.stderr


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_knows_memory_of_devices", lambda: True)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no 'no-such-compiler'" in (accelerator.why_not() or "")


def test_with_a_torch_that_is_too_old_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_TORCH", tmp_path)
    monkeypatch.setattr(build.torch, "__version__", "2.6.0+cpu")
    assert "newer torch" in (accelerator.why_not() or "")
    assert "this is 2.6.0+cpu" in (accelerator.why_not() or "")


def test_where_it_cannot_be_used_it_cannot_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "why_not", lambda: "no reason")
    monkeypatch.setattr(accelerator, "install", accelerator.install.__wrapped__)
    with pytest.raises(RuntimeError, match="no reason"):
        accelerator.install()


def test_build_that_fails_shows_what_the_compiler_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho nothing works >&2\nexit 1\n", encoding="utf-8")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(tmp_path))
    with pytest.raises(RuntimeError, match="nothing works"):
        build.load.__wrapped__()
