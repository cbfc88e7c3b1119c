"""What the stages of ``make gpu`` share: files that go on, processes with a limit, probes, the table, the command."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import facts, machine, probes, processes
from benchmarks.gpu.measuring import Job, Meter
from benchmarks.gpu.models import TINY
from benchmarks.gpu.probes import LockSampler, device_figures
from benchmarks.gpu.results import (
    MEASURED,
    NOT_RUN,
    IncompleteError,
    NotRunError,
    Options,
    Progress,
    Results,
    Step,
    load,
)
from benchmarks.gpu.table import table
from tests.gpu.conftest import make_late

OPTIONS = Options(scale="tiny")
LIMIT_S = 800.0


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same machine and commit for all."""
    monkeypatch.setattr(machine, "describe", lambda: {"gpus": None, "torch": "2", "lightning": "3"})
    monkeypatch.setattr(machine, "commit", lambda: "abc")


def results_in(folder: Path, options: Options = OPTIONS, *, again: bool = False) -> Results:
    return Results(folder, "stage", "how it\n  was measured", options, again=again)


# --- files ---------------------------------------------------------------------------------------------------------


def test_a_run_that_is_killed_leaves_what_it_measured(tmp_path: Path) -> None:
    def killed(progress: Progress) -> dict[str, Any]:
        progress.save({"half": 1})
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        results_in(tmp_path).run([Step("one", lambda progress: {"a": 1}), Step("two", killed)], LIMIT_S)
    written = load(tmp_path / "stage.json")
    assert written is not None
    assert {name: (step["state"], step["figures"]) for name, step in written["steps"].items()} == {
        "one": ("measured", {"a": 1}),
        "two": ("incomplete", {"half": 1}),
    }
    assert written["method"] == "how it was measured"
    assert written["commit"] == written["steps"]["one"]["commit"] == "abc"


def test_what_was_measured_stays_and_what_was_never_tried_comes_first(tmp_path: Path) -> None:
    ran: list[str] = []

    def fails(progress: Progress) -> dict[str, Any]:
        ran.append("fails")
        raise ValueError("broken")

    def steps() -> list[Step]:
        return [Step(name, lambda progress, name=name: ran.append(name) or {}) for name in ("good", "new")]

    results_in(tmp_path).run([Step("fails", fails), steps()[0]], LIMIT_S)
    assert ran == ["fails", "good"]
    again = results_in(tmp_path)
    again.run([Step("fails", fails), *steps()], LIMIT_S)
    assert ran[2:] == ["new", "fails"]
    assert again.steps["fails"]["reason"] == "ValueError: broken"
    results_in(tmp_path, again=True).run(steps(), LIMIT_S)
    assert ran[4:] == ["good", "new"]


@pytest.mark.parametrize("change", ["options", "machine"])
def test_other_options_or_another_machine_measure_anew(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results_in(tmp_path).run([Step("one", lambda progress: {})], LIMIT_S)
    assert list(results_in(tmp_path).steps) == ["one"]
    if change == "machine":
        monkeypatch.setattr(machine, "describe", lambda: {"gpus": [{"name": "new"}]})
    assert results_in(tmp_path, Options(scale="tiny", rows=1 if change == "options" else None)).steps == {}


def test_steps_for_which_there_is_no_time_say_so(tmp_path: Path) -> None:
    results = results_in(tmp_path)
    results.run([Step("one", lambda progress: {})], 0.0)
    assert (results.steps["one"]["state"], results.steps["one"]["reason"]) == ("not run", "out of time")
    results.run([Step("one", lambda progress: {})], LIMIT_S)
    assert results.steps["one"]["state"] == "measured"


# --- processes -----------------------------------------------------------------------------------------------------


def test_a_process_ends_at_its_limit() -> None:
    code, _ = processes.run([sys.executable, "-c", "import time; time.sleep(600)"], 0.1)
    assert code is None
    assert processes.run([sys.executable, "-c", "print('why'); raise SystemExit(3)"], LIMIT_S) == (3, "why\n")


@pytest.mark.parametrize(
    ("written", "code", "error", "message"),
    [
        ({"figures": {"a": 1}}, None, IncompleteError, "it was ended after 9 s"),
        ({}, -9, IncompleteError, "it died with code -9: oh"),
        ({"figures": {}, "state": "failed", "reason": "why"}, 0, RuntimeError, "why"),
        ({"figures": {}, "state": "not run", "reason": "why"}, 0, NotRunError, "why"),
    ],
)
def test_how_a_training_may_end(written: Any, code: int | None, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}$"):
        processes._figures(written, code, "oh", 9.0)


def test_a_training_that_was_cut_off_after_its_last_step_was_measured() -> None:
    assert processes._figures({"figures": {"a": 1}, "state": "measured"}, None, "", 9.0) == {"a": 1}


def test_a_meter_stops_when_there_is_no_time_for_two_more_steps(tmp_path: Path) -> None:
    meter = Meter(Job("resident", TINY, is_tiny=True, steps=100, ends_at_s=0.0), tmp_path / "result.json", 0.0)
    num_steps = 0
    while meter.goes_on:
        meter.begin_step()
        meter.end_step(1.0)
        num_steps += 1
    assert num_steps == 5  # three of warm-up, one that counts, one to be profiled
    assert json.loads((tmp_path / "result.json").read_text())["state"] == "measured"


# --- probes --------------------------------------------------------------------------------------------------------


def test_the_share_of_time_in_which_the_lock_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def lateness(self: LockSampler) -> float:
        value = next(values, None)
        if value is None:
            self._is_over.set()
            return 0.0
        return value

    values: Iterator[float] = iter([1e-4] * probes._SAMPLES_OF_IDLE)
    monkeypatch.setattr(LockSampler, "_late_s", lateness)
    sampler = LockSampler()
    values = iter([1e-4, 3e-3, 5e-3])
    sampler.start()
    sampler._thread.join()
    found = sampler.stop()
    assert found["num_samples"] == 4
    assert found["share_taken"] == 0.5
    assert found["median_wait_us"] == pytest.approx(4000)


def test_threads_that_issue_work_are_told_from_others() -> None:
    assert probes._kind_of(1, "roundpipe-microbatch-3", is_python=True) == "host"
    assert probes._kind_of(1, "pt_autograd_0", is_python=False) == "host"
    assert probes._kind_of(1, "GPU 0 h2d", is_python=True) == "other_python"
    assert probes._kind_of(1, "python", is_python=False) == "native"


def test_a_trace_of_the_profiler() -> None:
    def copy(name: str, start: float, end: float, size: int) -> dict[str, Any]:
        return {"ph": "X", "cat": "gpu_memcpy", "name": name, "ts": start, "dur": end - start, "args": {"bytes": size}}

    events = [
        {"ph": "X", "cat": "kernel", "name": "one", "ts": 0.0, "dur": 40.0},
        {"ph": "X", "cat": "kernel", "name": "on another stream", "ts": 20.0, "dur": 40.0},
        {"ph": "X", "cat": "kernel", "name": "inside of it", "ts": 30.0, "dur": 5.0},
        copy("Memcpy HtoD (Pinned -> Device)", 50.0, 70.0, 400_000),
        copy("Memcpy HtoD (Pageable -> Device)", 70.0, 80.0, 1000),
        copy("Memcpy DtoH (Device -> Pinned)", 90.0, 100.0, 100_000),
        copy("Memcpy DtoD (Device -> Device)", 0.0, 1.0, 7),
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0.0, "dur": 500.0},
        {"ph": "M", "name": "process_name"},
    ]
    found = device_figures(events)
    assert found is not None
    assert found["busy_share"] == 0.6
    assert found["copies"]["h2d page-locked"] == {"bytes": 400_000, "copies": 1, "gb_per_s": 20.0}
    assert found["copies"]["d2h page-locked"]["gb_per_s"] == 10.0
    assert found["pageable_bytes"] == 1000
    assert found["copies_under_kernels"] == 0.25
    assert device_figures([]) is None


# --- late work -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("late", "waited"), [("compute", ["record main"]), ("h2d", ["copy up"]), ("d2h", ["copy down"])]
)
def test_work_is_made_late_where_it_is_asked_for(late: str, waited: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    driver = SimpleNamespace(
        default_stream=lambda device: main,
        record=lambda stream, *, is_timed=False: log.append(f"record {stream.name}"),
        copy=lambda destination, source: log.append("copy up" if source.device.type == "cpu" else "copy down"),
    )
    main, other = (SimpleNamespace(name=name, device=None) for name in ("main", "other"))
    here, there = torch.zeros(1), torch.zeros(1, device="meta")
    make_late(monkeypatch, driver, late, lambda stream: log.append("wait"))
    driver.record(main, is_timed=True)
    driver.record(other)
    driver.copy(there, here)
    driver.copy(here, there)
    assert [log[place + 1] for place, entry in enumerate(log) if entry == "wait"] == waited
    assert [entry for entry in log if entry != "wait"] == ["record main", "record other", "copy up", "copy down"]


def test_late_work_of_an_unknown_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = SimpleNamespace(record=None, copy=None)
    with pytest.raises(pytest.UsageError, match="'soon'"):
        make_late(monkeypatch, driver, "soon", lambda stream: None)


# --- the command ---------------------------------------------------------------------------------------------------


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main([]) == 0
    assert capsys.readouterr().out == command.NO_GPU + "\n"


def test_a_stage_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["fats"])
    assert "'fats' is none of facts, tests" in capsys.readouterr().err


class InThisProcess:
    """A stage that is run where it is started: elsewhere everything would be imported again."""

    def __init__(self, arguments: list[str], **settings: Any) -> None:
        assert arguments[:3] == [sys.executable, "-m", "benchmarks.gpu"]
        assert command.main(arguments[3:]) == 0

    def wait(self, limit_s: float) -> None:
        pass

    def poll(self) -> int:
        return 0


def numbers(found: Any) -> list[float]:
    """All numbers in nested figures."""
    if isinstance(found, dict):
        return [number for value in found.values() for number in numbers(value)]
    return [found] if isinstance(found, float) else []


def test_a_stage_is_run_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.undo()  # this machine as it is
    monkeypatch.setattr(command, "subprocess", SimpleNamespace(Popen=InThisProcess))
    monkeypatch.setattr(facts, "_ROUNDS", 1)
    torch.set_num_threads(1)
    assert command.main(["facts", "--scale", "tiny", "--folder", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "| facts | products | bf16, 64: tflops" in shown
    assert "- facts, register: not run: needs CUDA" in shown
    assert "- full: not run" in shown
    written = load(tmp_path / "facts.json")
    assert written is not None
    assert written["options"]["scale"] == "tiny"
    assert written["machine"]["torch"] == str(torch.__version__)
    states = {name: step["state"] for name, step in written["steps"].items()}
    assert states == {step.name: NOT_RUN if step.name == "register" else MEASURED for step in facts.steps(OPTIONS)}
    measured = numbers({name: step["figures"] for name, step in written["steps"].items()})
    assert len(measured) == 9
    assert all(number > 0 for number in measured)


def test_a_stage_is_ended_at_its_limit_with_all_that_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []
    started: list[Any] = []

    class Endless:
        pid = 17

        def __init__(self, arguments: list[str], **settings: Any) -> None:
            started.append((arguments, settings))

        def wait(self, limit_s: float | None = None) -> None:
            if limit_s is not None:
                raise command.subprocess.TimeoutExpired("it", limit_s)

        def poll(self) -> int | None:
            return -9 if killed else None

    monkeypatch.setattr(command.subprocess, "Popen", Endless)
    monkeypatch.setattr(command.os, "killpg", lambda group, signal: killed.append(group))
    args = command.parse(["full", "--again", "--rows", "2", "--scale", "tiny", "--folder", str(tmp_path)])
    command.supervise("full", args, 1.0)
    assert killed == [17]
    ((arguments, settings),) = started
    assert settings["start_new_session"]
    inner = command.parse(arguments[3:])
    assert (inner.stages, inner.inside, inner.again, inner.rows) == (["full"], True, True, 2)
    assert (inner.scale, inner.folder, inner.minutes, inner.cap_gib) == ("tiny", tmp_path, 9.0, 24.0)


def test_the_table_says_what_is_there_and_what_is_not(tmp_path: Path) -> None:
    def trained(progress: Progress) -> dict[str, Any]:
        copies = {"h2d page-locked": {"bytes": 5, "copies": 1, "gb_per_s": 20.0}}
        return {
            "losses": [1.0],
            "tokens_per_second": {"median": 1234.0},
            "peak_device_bytes": {"reserved": 3 * 2**30},
            "device": {"busy_share": 0.5, "pageable_bytes": 2**20, "copies": copies},
        }

    def absent(progress: Progress) -> dict[str, Any]:
        raise NotRunError("it is not installed")

    tested = {"passed": 3, "failed": 1, "skipped": 0, "failures": {"test_x": "lines"}, "began": [], "reasons": []}
    for stage, steps in {
        "facts": [Step("copies", lambda progress: {"256 MiB, page-locked": {"h2d_gb_per_s": 25.0}})],
        "tests": [Step("file", lambda progress: tested)],
        "full": [Step("roundpipe", trained), Step("other", absent)],
    }.items():
        Results(tmp_path, stage, "how", OPTIONS).run(steps, LIMIT_S)
    lines = table(
        {stage: load(tmp_path / f"{stage}.json") for stage in ("facts", "tests", "full", "lora")}
    ).splitlines()
    assert lines[0].startswith("no GPU; torch 2; Lightning 3; commit abc; ")
    assert "| tests | file | 3 passed, 1 failed, 0 skipped; failed: test_x |" in lines
    assert (
        "| full | roundpipe | 1234 tokens/s; peak 3.0 GiB on the GPU; GPU busy 50%; "
        "h2d page-locked 20.0 of 25.0 GB/s; pageable 1.0 MiB |"
    ) in lines
    assert lines[-2:] == ["- full, other: not run: it is not installed", "- lora: not run"]
    assert table({"facts": None}).startswith("Nothing was measured.")
