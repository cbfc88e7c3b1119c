"""``roundpipe estimate``: verdicts, ranges against what the RoundPipe paper measured, and messages."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_roundpipe.cli import main
from lightning_roundpipe.cli.estimate.feasibility import (
    Cluster,
    choose_microbatch_size,
    device_needs,
    fits_device,
    fits_host,
    host_bytes,
    largest_seq_len,
    speed,
)
from lightning_roundpipe.cli.estimate.gpus import GPUS
from lightning_roundpipe.cli.estimate.resolve import load_shape
from lightning_roundpipe.cli.estimate.workload import FAST, SLOW, Workload
from tests.cli.conftest import RunFailing, RunJson
from tests.cli.test_cli_models import bundled
from tests.cli.test_cli_paper import HUB_NAMES
from tests.planning.paper import MODELS

# Longest sequence in K tokens, and the sequences of the step in which it was measured (the paper's artifact).
LONGEST = {
    "Qwen3-1.7B": (73, 10),
    "Llama-3.1-8B": (49, 10),
    "GPT-OSS-20B": (39, 1),
    "Qwen3-32B": (28, 1),
    "Qwen3-235B LoRA": (31, 4),
}


pytestmark = pytest.mark.usefixtures("quick_plans")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The first 4 layers of Llama-3.1-8B, with its embedding and its head."""
    path = tmp_path_factory.mktemp("small") / "config.json"
    path.write_text(json.dumps({**bundled("Llama-3.1-8B"), "num_hidden_layers": 4}), encoding="utf-8")
    return str(path)


def estimate(run_json: RunJson, name: str, *options: str) -> dict[str, Any]:
    return run_json("estimate", "--model", name, *options)


def tokens_per_s(method: dict[str, Any]) -> tuple[float, float]:
    return method["speed"]["slow"]["tokens_per_s"], method["speed"]["fast"]["tokens_per_s"]


@pytest.mark.parametrize("name", LONGEST)
def test_longest_sequence_is_within_a_factor_of_two(name: str) -> None:
    thousands, batch_size = LONGEST[name]
    lora_rank = 32 if MODELS[name].is_lora else None
    wanted = workload(HUB_NAMES[name], dtype="fp16", lora_rank=lora_rank, chunked_loss=True)
    longest, bound = largest_seq_len(wanted, cluster(batch_size=batch_size, host_bytes=780 * 10**9))
    assert 0.5 <= longest / (thousands * 1024) <= 2.0
    assert bound == "device memory"


def workload(name: str = "llama-3.1-8b", gpu: str = "rtx4090", **options: Any) -> Workload:
    return Workload(load_shape(name), GPUS[gpu], **{"seq_len": 2048, **options})


def cluster(gpu: str = "rtx4090", num_devices: int = 8, **options: Any) -> Cluster:
    usable = int(GPUS[gpu].memory_bytes * 0.9)
    defaults: dict[str, Any] = {"host_bytes": None, "batch_size": 64, "round_size": 2 * num_devices}
    return Cluster(num_devices, usable, **{**defaults, **options})


@pytest.mark.parametrize(
    ("name", "lora_rank", "fits"),
    [("qwen3-32b", None, True), ("qwen3-235b-a22b", None, False), ("qwen3-235b-a22b", 32, True)],
)
def test_full_fine_tuning_of_the_largest_model_alone_does_not_fit_the_papers_host(
    name: str, lora_rank: int | None, fits: bool
) -> None:
    wanted = workload(name, dtype="fp16", fp16_accumulation=True, chunked_loss=True, lora_rank=lora_rank)
    machine = cluster(host_bytes=800 * 10**9 - 16 * 2**30)
    size = choose_microbatch_size(wanted, machine)
    assert fits_device(wanted, machine, size)
    assert fits_host(wanted, machine, size) is fits


@pytest.mark.parametrize(
    ("name", "gpu", "num_devices", "options"),
    [
        ("qwen3-1.7b", "rtx4090", 8, {}),
        ("llama-3.1-8b", "a6000", 1, {"lora_rank": 32, "seq_len": 512}),  # the graphs of the fused stage add up
        ("gpt-oss-20b", "rtx5090", 1, {"lora_rank": 32, "seq_len": 8192, "chunked_loss": True}),
    ],
)
def test_the_plan_stays_within_the_device(name: str, gpu: str, num_devices: int, options: dict[str, Any]) -> None:
    wanted, machine = workload(name, gpu, **options), cluster(gpu, num_devices)
    size = choose_microbatch_size(wanted, machine)
    assert fits_device(wanted, machine, size)
    assert speed(wanted, machine, size, SLOW)["device_memory_bytes"] <= machine.device_bytes


def test_chosen_microbatches_are_as_large_as_useful() -> None:
    roomy = replace(cluster(), device_bytes=10**15)
    assert choose_microbatch_size(workload(), roomy) == 4  # 64 sequences: two micro-batches for each of 8 devices
    assert choose_microbatch_size(workload(), replace(roomy, batch_size=5)) == 1
    tight = cluster()
    size = choose_microbatch_size(workload(seq_len=1024), replace(tight, batch_size=4096))
    larger, needed = device_needs(workload(seq_len=1024), replace(tight, batch_size=4096), size + 1)
    assert 1 < size < 256
    assert needed + larger.weight_bytes + larger.gradient_bytes > tight.device_bytes


def test_one_round_is_taken_where_smaller_microbatches_do_not_fit_the_host() -> None:
    """Smaller ones make several rounds, with two sets of gradients; the smallest ones fit again, with few inputs."""
    roomy = replace(cluster(), device_bytes=10**15)
    needed = {size: sum(host_bytes(workload(), roomy, size).values()) for size in (1, 2, 4)}
    assert needed[1] < needed[4] < needed[2]
    assert choose_microbatch_size(workload(), replace(roomy, host_bytes=needed[4])) == 4
    assert choose_microbatch_size(workload(), replace(roomy, host_bytes=needed[4] - 1)) == 1


@pytest.mark.parametrize(("num_devices", "expected"), [(4, 12), (8, 16)])
def test_the_last_round_leaves_no_device_idle(num_devices: int, expected: int) -> None:
    """On four devices 15 sequences fit, which would make 9 micro-batches: a round of 8, and one of a single one."""
    machine = cluster(num_devices=num_devices, batch_size=128)
    wanted = workload("qwen3-32b", chunked_loss=True)
    size = choose_microbatch_size(wanted, machine)
    assert machine.num_microbatches(size) == expected
    assert fits_device(wanted, cluster(num_devices=4, batch_size=128), 15)


def test_host_memory_counts_what_is_in_flight() -> None:
    wanted = workload()
    one = wanted.host_bytes_per_sequence()
    assert host_bytes(wanted, cluster(), 1)["activations"] == 32 * one  # two rounds of 16
    assert host_bytes(wanted, cluster(), 3)["activations"] == 64 * one  # 22 micro-batches, but no more than the batch
    assert host_bytes(wanted, cluster(batch_size=7), 1)["activations"] == 7 * one
    gradients = 4 * wanted.shape.num_weights
    sets = [
        host_bytes(wanted, cluster(**options), size)["gradients"] / gradients
        for options, size in (({}, 4), ({}, 3), ({"accumulates": True}, 4))  # one round of 16, two, one
    ]
    assert sets == [1, 2, 2]
    needed = sum(host_bytes(wanted, cluster(), 1).values())
    assert fits_host(wanted, cluster(host_bytes=needed), 1)
    assert not fits_host(wanted, cluster(host_bytes=needed - 1), 1)


def test_longest_sequence_is_a_limit() -> None:
    for machine in (cluster(), cluster(host_bytes=150 * 10**9)):
        longest, bound = largest_seq_len(workload(), machine)
        small = replace(machine, batch_size=16)
        fitting, too_long = workload(seq_len=longest), workload(seq_len=longest + 256)
        assert longest % 256 == 0
        assert fits_device(fitting, small, 1)
        assert fits_host(fitting, small, 1)
        assert not (fits_device(too_long, small, 1) and fits_host(too_long, small, 1))
        assert bound == ("device memory" if machine.host_bytes is None else "host memory")
    bigger = workload(gpu="a100-80")
    assert largest_seq_len(bigger, cluster("a100-80"))[0] > 3 * largest_seq_len(workload(), cluster())[0]


def test_every_weight_is_updated_once_where_the_table_is_tied() -> None:
    wanted, machine = workload("qwen3-1.7b"), cluster()
    assert wanted.shape.is_tied
    bounds = speed(wanted, machine, 1, FAST)["lower_bounds_ms"]
    expected = wanted.shape.num_weights * FAST.optimizer_bytes / FAST.host_bytes_per_ms
    assert bounds["optimizer"] == pytest.approx(expected)


def test_short_device_memory_is_said_with_what_helps(small: str, run_json: RunJson) -> None:
    options = ("--gpu", "rtx4090", "--devices", "2", "--batch-size", "4", "--seq-len")

    def full(name: str, *more: str) -> dict[str, Any]:
        method = estimate(run_json, name, *options, *more)["methods"]["full"]
        assert isinstance(method, dict)
        return method

    (problem,) = full(small, "32768")["problems"]
    assert problem["what"] == "device memory for head"
    sequences, chunked, gpus = problem["helps"]
    assert chunked == "a loss in chunks (--chunked-loss)"
    assert gpus.startswith("GPUs with more than ")
    longest = int(sequences.removeprefix("sequences of at most ").removesuffix(" tokens").replace(",", ""))
    assert full(small, str(longest))["fits"]
    assert not full(small, str(longest + 1))["fits"]
    # a micro-batch that is too large is said to be
    (problem,) = full(small, "4096", "--microbatch-size", "4")["problems"]
    assert problem["helps"][0] == "--microbatch-size 2"
    # weights alone that are too large: no sequence is short enough
    method = full("qwen3-235b-a22b", "512", "--gpu-memory", "9GiB")
    assert method["largest_seq_len"] == 0
    helps = [text for problem in method["problems"] for text in problem["helps"]]
    assert not any("sequences" in text for text in helps)
    assert "LoRA" in helps


def test_short_host_memory_is_said_with_what_helps(small: str, run_json: RunJson) -> None:
    options = ("--gpu", "a100-80", "--devices", "4", "--seq-len", "8192", "--batch-size", "32")

    def first_help(*more: str) -> str:
        (problem,) = estimate(run_json, small, *options, *more)["methods"]["full"]["problems"]
        assert problem["what"] == "host memory"
        return str(problem["helps"][0])

    smaller = first_help("--host-memory", "77GB", "--microbatch-size", "4")
    assert smaller == "--microbatch-size 1"
    assert first_help("--host-memory", "70GB", "--microbatch-size", "4").endswith("with gradient accumulation")
    method = estimate(run_json, small, *options, "--host-memory", "77GB", "--microbatch-size", "4")["methods"]["full"]
    (round_size,) = (text for text in method["problems"][0]["helps"] if text.startswith("--round-size"))
    assert round_size == "--round-size 2"
    for host_memory, more in (
        ("77GB", smaller.split()),
        ("77GB", ["--microbatch-size", "4", *round_size.split()]),
        ("70GB", first_help("--host-memory", "70GB").split()[:2]),
    ):
        method = estimate(run_json, small, *options, "--host-memory", host_memory, *more)["methods"]["full"]
        assert method["fits"]


@pytest.mark.parametrize("num_gpus", [1, 8])
def test_the_host_memory_of_the_readme_is_enough(num_gpus: int, run_json: RunJson) -> None:
    text = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
    shown = re.findall(rf"^qwen3-8b +{num_gpus} +(\d+ GiB) +[\d,]+ to [\d,]+ +(\d+ GiB)", text, re.MULTILINE)
    for name, size in zip(("lora", "full"), *shown, strict=True):
        options = ("--gpu", "rtx4090", "--devices", str(num_gpus), "--seq-len", "2048")
        found = estimate(run_json, "qwen3-8b", *options, "--host-memory", size.replace(" ", ""))["methods"][name]
        free = found["host_memory"]["available"] - found["host_memory"]["total"]
        assert found["fits"]
        assert 0 <= free < 2**30


def test_report_has_a_verdict_and_a_table_for_each_question(
    small: str, run_json: RunJson, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("--seq-len", "2048", "--gpu", "rtx4090", "--devices", "8")
    limited = ("--model", "gpt-oss-20b", *common, "--host-memory", "300GB")
    assert main(["estimate", *limited]) == 0
    text = capsys.readouterr().out
    assert "20.91 billion weights (4.19 billion active) in 24 layers, on 8 x rtx4090 (24.0 GiB each), bf16" in text
    assert "\nFull fine-tuning does not fit: host memory is short by " in text
    assert "what helps: LoRA, or " in text
    assert "\nLoRA fits: " in text
    for title in ("Speed (", "Device memory (", "Host memory (", "Assumed to be reached", "Assumptions"):
        assert f"\n\n{title}" in text
    assert "a window of 128 tokens" in text
    assert re.search(
        r"^GPU, products of routed experts {2,}41 TFLOP/s \(25%\) {2,}83 TFLOP/s \(50%\)", text, re.MULTILINE
    )
    assert "\nworking copy" in text
    # a host that nothing is known of
    assert main(["estimate", "--model", small, *common]) == 0
    text = capsys.readouterr().out
    (size,) = re.findall(r"^Full fine-tuning fits a host with (\d+) GiB:", text, re.MULTILINE)
    document = run_json("estimate", "--model", small, *common)
    needed = document["methods"]["full"]["host_memory"]["total"] + document["host_reserve_bytes"]
    assert 0 <= int(size) * 2**30 - needed < 2**30

    document = run_json("estimate", *limited)
    full, lora = document["methods"]["full"], document["methods"]["lora"]
    assert lora["fits"]
    assert not full["fits"]
    assert full["speed"] is None
    assert full["largest_seq_len"] == 0
    (problem,) = full["problems"]
    assert problem["what"] == "host memory"
    assert problem["needed"] > 18 * document["model"]["weights"]
    assert problem["short_by"] == problem["needed"] - (300 * 10**9 - document["host_reserve_bytes"])
    assert "LoRA" in problem["helps"]


def test_custom_gpu_is_as_good_as_one_of_the_table(small: str, run_json: RunJson) -> None:
    gpu = GPUS["a100-80"]
    common = ("--seq-len", "2048", "--devices", "4", "--pcie", "20GB/s")
    known = estimate(run_json, small, "--gpu", "A100 80", *common)
    custom = ("--gpu", "custom", "--gpu-memory", "80GiB", "--tflops", "312", "--gpu-bandwidth", "1935GB/s")
    described = estimate(run_json, small, *custom, *common)
    assert described["methods"] == known["methods"]
    assert described["gpu"] == {**known["gpu"], "name": "custom"}
    assert known["gpu"]["tflops"] == gpu.tflops
    assert all(end["link_bytes_per_ms"] == 20e6 for end in known["assumed"].values())


def test_options_replace_figures_of_the_table(small: str, run_json: RunJson) -> None:
    common = ("--gpu", "rtx4090", "--seq-len", "2048")
    plain = estimate(run_json, small, *common)
    more = estimate(run_json, small, *common, "--gpu-memory", "48GiB", "--tflops", "300", "--dtype", "fp32")
    assert more["gpu"]["memory_bytes"] == 2 * plain["gpu"]["memory_bytes"]
    assert more["gpu"]["tflops"] == 600  # of the 16-bit types: the option is at --dtype
    assert more["assumed"]["slow"]["peak_tflops"] == 300
    slower = estimate(run_json, small, *common, "--host-bandwidth", "5GB/s")
    assert tokens_per_s(slower["methods"]["full"])[1] < tokens_per_s(plain["methods"]["full"])[1]


ASSUMED: list[tuple[tuple[str, ...], dict[str, tuple[float, float]]]] = [
    (
        ("--gpu", "rtx4090"),
        {
            "products_tflops": (99.12, 140.42),
            "attention_tflops": (66.08, 140.42),
            "device_bytes_per_ms": (806.4e6, 907.2e6),
            "link_bytes_per_ms": (15.752e6, 26.7784e6),
            "copies_bytes_per_ms": (15.752e6, 30e6),
            "optimizer_bytes_per_ms": (100e6, 300e6),
        },
    ),
    (
        ("--gpu", "rtx4090", "--dtype", "fp16", "--fp16-accumulation"),
        {"products_tflops": (198.18, 280.755), "attention_tflops": (66.08, 140.42)},
    ),
    # All GPUs together reach no less than one of them.
    (("--gpu", "h200"), {"link_bytes_per_ms": (31.504e6, 53.5568e6), "copies_bytes_per_ms": (31.504e6, 53.5568e6)}),
    (("--gpu", "rtx4090", "--pcie", "6GB/s"), {"link_bytes_per_ms": (6e6, 6e6), "copies_bytes_per_ms": (15e6, 30e6)}),
    (
        ("--gpu", "rtx4090", "--host-bandwidth", "5GB/s"),
        {"copies_bytes_per_ms": (5e6, 5e6), "optimizer_bytes_per_ms": (5e6, 5e6)},
    ),
]


@pytest.mark.parametrize(("options", "expected"), ASSUMED)
def test_assumed_rates_follow_the_machine_and_the_options(
    options: tuple[str, ...], expected: dict[str, tuple[float, float]], small: str, run_json: RunJson
) -> None:
    found = estimate(run_json, small, "--seq-len", "2048", *options)["assumed"]
    for key, (slow, fast) in expected.items():
        assert found["slow"][key] == pytest.approx(slow, rel=1e-3)
        assert found["fast"][key] == pytest.approx(fast, rel=1e-3)
    assert found["slow"]["expert_products_tflops"] is None


WRONG: list[tuple[tuple[str, ...], str]] = [
    (("--gpu", "custom"), "--gpu custom lacks --gpu-memory, --tflops, --gpu-bandwidth, --pcie: add"),
    (("--gpu", "gtx980"), "--gpu gtx980 is not in the table, which has rtx3090"),
    (("--gpu", "rtx4090", "--gpu-memory", "1GiB"), "is less than what CUDA itself takes"),
    (("--gpu", "rtx4090", "--fp16-accumulation"), "--fp16-accumulation is for --dtype fp16, got bf16"),
    (("--gpu", "rtx4090", "--microbatch-size", "65"), "--microbatch-size 65 is more than --batch-size 64"),
    (("--gpu", "rtx4090", "--microbatch-size", "many"), "'many' is not a whole number of at least 1. Or write auto."),
    (("--gpu", "rtx4090", "--tflops", "0"), "'0' is not a number of TFLOP/s"),
    (("--gpu", "rtx4090", "--host-memory", "800"), "'800' lacks a unit"),
    (("--gpu", "rtx4090", "--host-memory", "-64GB"), "'-64GB' is not a size: write one like 24GiB"),
    (("--gpu", "rtx4090", "--devices", "-1"), "'-1' is not a whole number of at least 1"),
    (("--gpu", "rtx4090", "--devices", "100000"), "'100000' is more than 64: pass the devices of one machine"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_options_that_are_refused(options: tuple[str, ...], message: str, run_failing: RunFailing) -> None:
    arguments = ("estimate", "--model", "llama-3.1-8b", "--seq-len", "2048", *options)
    assert message in run_failing(*arguments)


def test_models_that_are_refused(tmp_path: Path, run_failing: RunFailing) -> None:
    def message(model: str) -> str:
        return run_failing("estimate", "--gpu", "rtx4090", "--seq-len", "2048", "--model", model)

    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    assert "is not JSON" in message(str(tmp_path))
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    assert "holds no JSON object" in message(str(tmp_path / "config.json"))
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8}), encoding="utf-8")
    assert "there are no formulas for it" in message(str(tmp_path))
    for missing in (str(tmp_path / "other.json"), "another/small"):
        text = message(missing)
        assert f"--model {missing} is no file and no folder with a config.json, does not come with" in text
        assert "pass the path of its config.json or of a folder with one, or one of Qwen3-0.6B, " in text
        assert "hf download ORGANISATION/NAME config.json" in text
