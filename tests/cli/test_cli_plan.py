"""``roundpipe plan``: the planner's own results, all of them, and what is refused."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from lightning_roundpipe.cli import main
from lightning_roundpipe.planning import (
    CostProfile,
    Machine,
    Timeline,
    plan_training,
    round_robin,
    simulate,
    stage_costs,
)
from tests.cli.conftest import RunFailing, RunJson

pytestmark = pytest.mark.usefixtures("quick_plans")
PIPELINE = ("--devices", "4", "--microbatches", "8")
MACHINE = (
    *("--device-memory", "24GiB", "--h2d", "25GB/s", "--d2h", "20GB/s", "--latency", "10us"),
    *("--host-bandwidth", "200GB/s", "--optimizer-rate", "4GB/s", "--hop-ms", "1.6"),
)
AS_PLANNED = Machine(4, 24 * 2**30, 25e6, 20e6, 0.01, 200e6, 4e6, hop_ms=1.6)


def test_json_is_what_the_planner_says(llama: CostProfile, llama_file: str, run_json: RunJson) -> None:
    document = run_json("plan", "--profile", llama_file, *PIPELINE, *MACHINE, "--round-size", "4")
    plan = plan_training(llama, AS_PLANNED, num_microbatches=8, round_size=4)
    partition, costs = plan.partition, stage_costs(plan.partition, llama)
    schedule = round_robin(partition.num_stages, 8, 4, round_size=4, splits=plan.splits)
    simulation = simulate(schedule, costs, AS_PLANNED)
    assert document["partition"] == partition.format()
    assert document["splits"] == [row["devices_at_a_time"] for row in document["stages"]] == list(plan.splits)
    assert document["reason"] == plan.reason
    assert document["step_ms"] == simulation.step_ms
    assert document["optimizer_ms"] == simulation.optimizer_ms > 0
    assert document["bubble_ratio"] == simulation.timeline.bubble_ratio
    assert document["bubble_parts"] == simulation.timeline.bubble_parts
    assert document["bound_by"] == simulation.bound_by
    assert document["lower_bounds_ms"] == simulation.lower_bounds_ms
    assert [device["memory_bytes"] for device in document["devices"]] == list(simulation.memory_bytes)
    assert [device["h2d_bytes"] for device in document["devices"]] == list(simulation.h2d_bytes)
    assert [device["d2h_bytes"] for device in document["devices"]] == list(simulation.d2h_bytes)
    busy = sum(device["busy_fraction"] for device in document["devices"]) / 4
    assert busy == pytest.approx(1 - document["bubble_ratio"])
    assert max(simulation.memory_bytes) <= 24 * 2**30
    assert document["machine"]["device_memory_bytes"] == 24 * 2**30
    for row, stage, cost in zip(document["stages"], partition.stages, costs, strict=True):
        assert (row["index"], row["kind"]) == (stage.index, stage.kind.value)
        assert row["units"] == [call.name for call in llama.calls[stage.start : stage.stop]]
        assert (row["duration_ms"], row["weight_bytes"]) == (cost.duration_ms, cost.weight_bytes)
        assert (row["gradient_bytes"], row["workspace_bytes"]) == (cost.gradient_bytes, cost.workspace_bytes)
        assert (row["input_bytes"], row["output_bytes"]) == (cost.input_bytes, cost.output_bytes)


def test_a_machine_that_is_left_out_is_unlimited(llama: CostProfile, llama_file: str, run_json: RunJson) -> None:
    document = run_json("plan", "--profile", llama_file, *PIPELINE)
    assert document["machine"]["h2d_bytes_per_ms"] is None  # infinite
    assert document["machine"]["device_memory_bytes"] is None
    assert document["round_size"] == 8  # two per device
    plan = plan_training(llama, Machine(4), num_microbatches=8, round_size=8)
    assert (document["partition"], document["splits"]) == (plan.partition.format(), list(plan.splits))


def test_every_stage_on_one_device_at_a_time(llama: CostProfile, llama_file: str, run_json: RunJson) -> None:
    document = run_json("plan", "--profile", llama_file, *PIPELINE, *MACHINE, "--no-split")
    plan = plan_training(llama, AS_PLANNED, num_microbatches=8, round_size=8, may_split=False)
    assert set(document["splits"]) == {1}
    assert document["partition"] == plan.partition.format()
    assert run_json("plan", "--profile", llama_file, *PIPELINE, *MACHINE)["step_ms"] < document["step_ms"]


def test_people_are_told_why_stages_are_split(llama_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--profile", llama_file, *PIPELINE, *MACHINE]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("Dispatch"))
    assert re.match(
        r"Dispatch    r=\d( to \d)?: [\d.]+ s a step, [\d.]+% less than with every stage on one device", line
    )


def test_a_round_holds_no_more_than_all_micro_batches(llama_file: str, run_json: RunJson) -> None:
    few = ("plan", "--profile", llama_file, "--devices", "4", "--microbatches", "2")
    assert run_json(*few)["round_size"] == run_json(*few, "--round-size", "7")["round_size"] == 2


def test_files_hold_what_was_planned(llama: CostProfile, llama_file: str, run_json: RunJson, tmp_path: Path) -> None:
    trace, picture = tmp_path / "t.json", tmp_path / "p.svg"
    arguments = ("--timeline", str(trace), "--png", str(picture))
    document = run_json("plan", "--profile", llama_file, *PIPELINE, *arguments)
    timeline = Timeline.from_chrome_trace(json.loads(trace.read_text(encoding="utf-8")))
    assert timeline.num_devices == 4
    assert timeline.bubble_ratio == pytest.approx(document["bubble_ratio"], abs=1e-6)
    schedule = round_robin(len(document["stages"]), 8, 4, splits=document["splits"])
    assert [timeline.actions(device) for device in range(4)] == list(map(list, schedule.devices))
    assert max(document["splits"]) > 1
    assert picture.read_text(encoding="utf-8").lstrip().startswith("<?xml")


def test_a_call_that_does_not_fit_is_named(llama_file: str, run_failing: RunFailing) -> None:
    message = run_failing("plan", "--profile", llama_file, *PIPELINE, "--device-memory", "0.5GiB")
    assert "'layers.0'" in message
    assert "over the 512 MiB" in message
    assert "num_microbatches" in message


def test_profiles_that_cannot_be_read_are_named(tmp_path: Path, run_failing: RunFailing) -> None:
    missing = str(tmp_path / "missing.json")
    message = run_failing("plan", "--profile", missing, *PIPELINE)
    assert message == (
        f"roundpipe plan: error: cannot read the profile {missing} (No such file or directory): "
        "RoundPipeStrategy(save_profile=...) writes one.\n"
    )
    broken = tmp_path / "broken.json"
    broken.write_text("{", encoding="utf-8")
    assert f"{broken}: The cost profile is not JSON" in run_failing("plan", "--profile", str(broken), *PIPELINE)
    empty = tmp_path / "empty.json"
    CostProfile(()).save(empty)
    assert f"the profile {empty} has no calls" in run_failing("plan", "--profile", str(empty), *PIPELINE)
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "roundpipe plan: error" in run_failing("plan", "--profile", str(binary), *PIPELINE)


@pytest.mark.parametrize("option", ["--timeline", "--png"])
def test_places_that_cannot_be_written_are_named(
    option: str, llama_file: str, tmp_path: Path, run_failing: RunFailing
) -> None:
    place = str(tmp_path / "missing" / "file.png")
    message = run_failing("plan", "--profile", llama_file, *PIPELINE, option, place)
    assert f"cannot write {place} (No such file or directory): choose another place." in message


def test_pictures_that_cannot_be_drawn_are_refused_before_the_work(
    llama_file: str, run_failing: RunFailing, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "'p.gif' has no suffix of a picture" in run_failing("plan", "--profile", "none", *PIPELINE, "--png", "p.gif")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = run_failing("plan", "--profile", "none", *PIPELINE, "--png", "p.png")
    assert "pip install lightning-roundpipe[plot]" in message


def test_ranks_add_up_their_gradients_over_the_network(llama: CostProfile, llama_file: str, run_json: RunJson) -> None:
    arguments = ("plan", "--profile", llama_file, *PIPELINE, "--ranks", "4", "--network", "1GB/s")
    planned = run_json(*arguments, "--network-latency", "1ms")
    num_bytes = sum(call.gradient_bytes for call in llama.calls)
    network_ms = planned["lower_bounds_ms"]["network"]
    assert network_ms > 6 / 4 * num_bytes / 1e6
    assert planned["step_ms"] >= network_ms
    assert run_json(*arguments)["lower_bounds_ms"]["network"] == pytest.approx(6 / 4 * num_bytes / 1e6)


def machine_file(tmp_path: Path, **machine: object) -> str:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({"machine": machine}))
    return str(path)


def test_a_saved_machine_is_planned_for_and_options_take_its_place(
    llama_file: str, run_json: RunJson, tmp_path: Path
) -> None:
    shared = [{"devices": [0, 1], "bytes_per_ms": 30e6}]
    devices = [{"speed": 0.5, "h2d_bytes_per_ms": 6e6}, *({} for _ in range(3))]
    known = {"num_devices": 4, "h2d_bytes_per_ms": 25e6, "transfer_latency_ms": 0.01}
    path = machine_file(tmp_path, **known, devices=devices, shared_links=shared)
    arguments = ("plan", "--profile", llama_file, *PIPELINE, "--machine", path)
    machine = run_json(*arguments)["machine"]
    assert (machine["h2d_bytes_per_ms"], machine["transfer_latency_ms"]) == (25e6, 0.01)
    assert [device["h2d_bytes_per_ms"] for device in machine["devices"]] == [6e6] + [25e6] * 3
    assert machine["shared_links"] == shared
    machine = run_json(*arguments, "--h2d", "20GB/s", "--device-memory", "24GiB")["machine"]
    assert (machine["h2d_bytes_per_ms"], machine["device_memory_bytes"]) == (20e6, 24 * 2**30)
    first = machine["devices"][0]
    assert (first["speed"], first["h2d_bytes_per_ms"], first["memory_bytes"]) == (0.5, 20e6, 24 * 2**30)


def test_a_machine_whose_devices_are_alike_serves_for_any_number(
    llama_file: str, run_json: RunJson, tmp_path: Path
) -> None:
    path = machine_file(tmp_path, num_devices=2, h2d_bytes_per_ms=25e6)
    machine = run_json("plan", "--profile", llama_file, *PIPELINE, "--machine", path)["machine"]
    assert (machine["num_devices"], machine["h2d_bytes_per_ms"]) == (4, 25e6)


def test_options_that_say_what_holds_without_a_file_take_its_place(
    llama_file: str, run_json: RunJson, tmp_path: Path
) -> None:
    path = machine_file(tmp_path, num_devices=4, transfer_latency_ms=0.5, num_ranks=4, hop_ms=1.5)
    arguments = ("plan", "--profile", llama_file, *PIPELINE, "--machine", path)
    for options, expected in (((), (0.5, 4, 1.5)), (("--latency", "0us", "--ranks", "1", "--hop-ms", "0"), (0, 1, 0))):
        machine = run_json(*arguments, *options)["machine"]
        assert (machine["transfer_latency_ms"], machine["num_ranks"], machine["hop_ms"]) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lanes", "holds no machine"),
        ("{}", "holds no machine ('machine')"),
        ('{"machine": 3}', "holds no machine"),
        ('{"machine": {"num_devices": 8, "lanes": 2}}', "holds no machine"),
        ('{"machine": {"num_devices": 8, "h2d_bytes_per_ms": 0}}', "must be > 0 bytes per ms"),
        ('{"machine": {"num_devices": 2, "devices": [{}, {"speed": 0.5}]}}', "has 2 devices that differ"),
    ],
)
def test_a_file_without_that_machine_is_refused(
    llama_file: str, run_failing: RunFailing, tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "machine.json"
    path.write_text(text)
    assert message in run_failing("plan", "--profile", llama_file, *PIPELINE, "--machine", str(path))
