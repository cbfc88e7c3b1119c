"""``roundpipe simulate``: each schedule against the simulator, what cannot run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_roundpipe.cli import main
from lightning_roundpipe.planning import (
    CostProfile,
    Machine,
    balanced_cuts,
    bound_stage_costs,
    gpipe,
    interleaved_one_f_one_b,
    looped_bfs,
    one_f_one_b,
    plan_training,
    round_robin,
    simulate,
    stage_costs,
)
from tests.cli.conftest import RunFailing, RunJson

pytestmark = pytest.mark.usefixtures("quick_plans")
PIPELINE = ("--devices", "4", "--microbatches", "8")
NAMES = ["GPipe", "1F1B", "interleaved 1F1B", "looped BFS", "RoundPipe synchronous", "RoundPipe asynchronous"]


def rows(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in document["schedules"]}


def test_bound_schedules_take_the_fastest_number_of_stages(
    llama: CostProfile, llama_file: str, run_json: RunJson
) -> None:
    found = rows(run_json("simulate", "--profile", llama_file, *PIPELINE, "--hop-ms", "3.2"))
    assert list(found) == NAMES
    times = [2 * call.forward_ms + call.backward_ms for call in llama.calls]
    times[-1] -= llama.calls[-1].forward_ms  # the head keeps its graph
    for name, schedules in (
        ("GPipe", [gpipe(4, 8)]),
        ("1F1B", [one_f_one_b(4, 8)]),
        ("interleaved 1F1B", [interleaved_one_f_one_b(num_stages, 8, 4) for num_stages in (8, 12)]),
        ("looped BFS", [looped_bfs(num_stages, 8, 4) for num_stages in (8, 12)]),
    ):
        cuts = [balanced_cuts(times, schedule.num_stages // 2) for schedule in schedules]
        results = [
            (simulate(schedule, bound_stage_costs(calls_per_stage, llama), Machine(4, hop_ms=3.2)), calls_per_stage)
            for schedule, calls_per_stage in zip(schedules, cuts, strict=True)
        ]
        simulation, calls_per_stage = min(results, key=lambda result: result[0].step_ms)
        assert found[name]["step_ms"] == simulation.step_ms, name
        assert found[name]["bubble_ratio"] == simulation.timeline.bubble_ratio
        assert found[name]["num_stages"] == len(calls_per_stage)
        assert found[name]["stages"] == f"calls per stage: {' '.join(map(str, calls_per_stage))}"
        assert found[name]["binds_stages"]


@pytest.mark.parametrize("slowest", [1.0, 0.4])
def test_synchronous_roundpipe_is_the_plan(llama_file: str, run_json: RunJson, tmp_path: Path, slowest: float) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({"machine": {"num_devices": 4, "devices": [{}] * 3 + [{"speed": slowest}]}}))
    arguments = ("--profile", llama_file, *PIPELINE, "--hop-ms", "3.2", "--machine", str(path))
    found = rows(run_json("simulate", *arguments, "--only", "roundpipe-sync"))["RoundPipe synchronous"]
    planned = run_json("plan", *arguments)
    assert found["stages"] == planned["partition"]
    for key in ("step_ms", "bubble_ratio", "bubble_parts", "bound_by"):
        assert found[key] == planned[key]
    assert found["memory_bytes"] == [device["memory_bytes"] for device in planned["devices"]]


def test_asynchronous_roundpipe_overlaps_steps(llama: CostProfile, llama_file: str, run_json: RunJson) -> None:
    arguments = ("simulate", "--profile", llama_file, *PIPELINE, "--hop-ms", "3.2", "--steps", "3")
    found = rows(run_json(*arguments, "--only", "roundpipe-async"))["RoundPipe asynchronous"]
    machine = Machine(4, hop_ms=3.2)
    plan = plan_training(llama, machine, num_microbatches=8, round_size=8)
    schedule = round_robin(plan.partition.num_stages, 8, 4, splits=plan.splits, num_steps=3)
    costs = stage_costs(plan.partition, llama)
    simulation = simulate(schedule, costs, machine, microbatches_per_step=8, optimizer="asynchronous")
    assert found["stages"] == plan.partition.format()
    assert found["step_ms"] == simulation.step_ms
    assert found["bubble_ratio"] == simulation.timeline.bubble_parts["inside"]


def test_speeds_are_relative_to_the_fastest_that_binds_stages(llama_file: str, run_json: RunJson) -> None:
    found = rows(run_json("simulate", "--profile", llama_file, *PIPELINE, "--hop-ms", "3.2"))
    best_ms = min(found[bound]["step_ms"] for bound in NAMES[:4])
    for row in found.values():
        assert row["speed"] == pytest.approx(best_ms / row["step_ms"])
    assert max(found[bound]["speed"] for bound in NAMES[:4]) == 1.0
    bubbles = [found[schedule]["bubble_ratio"] for schedule in NAMES]
    assert bubbles[1] > max(bubbles[2:4]) >= min(bubbles[2:4]) > max(bubbles[4:])
    ring = rows(run_json("simulate", "--profile", llama_file, *PIPELINE, "--hop-ms", "3.2", "--no-split"))
    # the order of the paper's table: 1F1B, looped schedules, synchronous, asynchronous
    assert min(bubbles[2:4]) > ring[NAMES[4]]["bubble_ratio"] > ring[NAMES[5]]["bubble_ratio"]
    assert ring[NAMES[4]]["step_ms"] > found[NAMES[4]]["step_ms"]
    assert ring[NAMES[5]]["step_ms"] >= found[NAMES[5]]["step_ms"]


def test_memory_is_compared_with_the_limit(llama_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["simulate", "--profile", llama_file, *PIPELINE]
    assert main([*arguments, "--device-memory", "20GiB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    marked = {line.split("  ")[0] for line in lines if "(!)" in line and not line.startswith("(!)")}
    assert marked == {"GPipe", "1F1B", "interleaved 1F1B", "looped BFS"}
    assert lines[-1] == "(!) More than the 20.0 GiB of a device: it would not run."
    assert main(arguments) == 0
    assert "(!)" not in capsys.readouterr().out


def test_one_device_over_the_limit_is_enough(
    llama_file: str, run_json: RunJson, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("simulate", "--profile", llama_file, *PIPELINE, "--only", "gpipe")
    memory = rows(run_json(*arguments))["GPipe"]["memory_bytes"]
    limit = max(memory) - 1
    assert min(memory) < limit
    assert main([*arguments, "--device-memory", f"{limit}B"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("GPipe"))
    assert "(!)" in line


def test_schedules_that_cannot_run_say_why(llama_file: str, run_json: RunJson) -> None:
    def found_on(number: str, microbatches: str, *names: str) -> dict[str, dict[str, Any]]:
        arguments = ("--devices", number, "--microbatches", microbatches, "--only", *names)
        return rows(run_json("simulate", "--profile", llama_file, *arguments))

    found = found_on("4", "6", "interleaved", "looped-bfs")
    assert found["interleaved 1F1B"]["skipped"] == "needs a multiple of 4 micro-batches, got 6"
    assert "step_ms" not in found["interleaved 1F1B"]
    assert found["looped BFS"]["skipped"] is None
    found = found_on("8", "8", "1f1b", "interleaved", "looped-bfs")
    for name in ("interleaved 1F1B", "looped BFS"):
        assert found[name]["skipped"] == "needs 2 calls for each of 8 devices, the profile has 13"
    assert found["1F1B"]["skipped"] is None
    found = found_on("16", "16", "gpipe", "1f1b", "roundpipe-sync")
    for name in ("GPipe", "1F1B"):
        assert found[name]["skipped"] == "needs a call for each of 16 devices, the profile has 13"
    assert found["RoundPipe synchronous"]["speed"] is None  # nothing to compare with


def test_text_names_what_was_left_out_and_the_rest_is_drawn(
    llama_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "p.png"
    arguments = ["simulate", "--profile", llama_file, *PIPELINE[:3], "6", "--only", "1f1b", "interleaved"]
    assert main([*arguments, "--png", str(picture)]) == 0
    text = capsys.readouterr().out
    assert "6 micro-batches on 4 devices" in text
    assert "interleaved 1F1B was left out: it needs a multiple of 4 micro-batches, got 6." in text
    assert "RoundPipe sync" not in text
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_nothing_is_refused(llama_file: str, run_failing: RunFailing) -> None:
    arguments = (*PIPELINE[:3], "6", "--only", "interleaved", "--png", "p.png")
    message = run_failing("simulate", "--profile", llama_file, *arguments)
    assert "--png has nothing to draw: none of the schedules can run" in message
