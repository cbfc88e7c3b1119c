"""The estimate against every throughput that the RoundPipe paper (arXiv 2604.27085) measured, with its options.

The paper's system runs every stage on one device at a time, and so does what is compared with it. One set of
assumptions holds for all models, numbers of GPUs and both machines: it was chosen by the RTX 4090s alone.
``python -m tests.cli.test_cli_paper`` prints the comparison that docs/how-to/command-line.md shows. That the page shows
what is printed now is a test of tests/test_docs.py; so the tests here read the page.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lightning_roundpipe.cli import estimate
from lightning_roundpipe.cli.estimate.feasibility import choose_microbatch_size, speed
from lightning_roundpipe.cli.estimate.resolve import load_shape
from lightning_roundpipe.cli.estimate.workload import Workload
from lightning_roundpipe.cli.output import Table
from tests.cli.conftest import RunJson, quick_search
from tests.planning.paper import MODELS

HUB_NAMES = {
    "Qwen3-1.7B": "qwen3-1.7b",
    "Llama-3.1-8B": "llama-3.1-8b",
    "GPT-OSS-20B": "gpt-oss-20b",
    "Qwen3-32B": "qwen3-32b",
    "Qwen3-235B LoRA": "qwen3-235b-a22b",
}


@dataclass(frozen=True)
class Run:
    """What the paper measured of a model on a machine, in tokens/s; None for what it did not."""

    model: str
    gpu: str
    num_devices: int
    synchronous: int | None
    asynchronous: int


# Those of the A800, and of GPT-OSS-20B on fewer GPUs, are in the data that the authors published with the paper.
RUNS = (
    Run("Qwen3-1.7B", "rtx4090", 1, None, 8881),
    Run("Qwen3-1.7B", "rtx4090", 4, None, 33178),
    Run("Qwen3-1.7B", "rtx4090", 8, 56489, 65417),
    Run("Qwen3-1.7B", "a800", 8, 66243, 84692),
    Run("Llama-3.1-8B", "rtx4090", 1, None, 3142),
    Run("Llama-3.1-8B", "rtx4090", 4, None, 12278),
    Run("Llama-3.1-8B", "rtx4090", 8, 18888, 24275),
    Run("Llama-3.1-8B", "a800", 8, 22703, 28427),
    Run("GPT-OSS-20B", "rtx4090", 1, None, 3022),
    Run("GPT-OSS-20B", "rtx4090", 4, None, 9670),
    Run("GPT-OSS-20B", "rtx4090", 8, 12549, 18122),
    Run("GPT-OSS-20B", "a800", 8, 15612, 26203),
    Run("Qwen3-32B", "rtx4090", 1, None, 740),
    Run("Qwen3-32B", "rtx4090", 4, None, 2897),
    Run("Qwen3-32B", "rtx4090", 8, 4164, 5516),
    Run("Qwen3-32B", "a800", 8, 5180, 6301),
    Run("Qwen3-235B LoRA", "rtx4090", 1, None, 480),
    Run("Qwen3-235B LoRA", "rtx4090", 2, None, 808),
    Run("Qwen3-235B LoRA", "rtx4090", 4, None, 1281),
    Run("Qwen3-235B LoRA", "rtx4090", 8, 1592, 1820),
    Run("Qwen3-235B LoRA", "a800", 8, 1680, 2132),
)
CASES = [(run, optimizer) for run in RUNS for optimizer in ("synchronous", "asynchronous") if getattr(run, optimizer)]
# What was measured lies outside of the range: by how much, as a share of it.
OUTSIDE = {
    ("Qwen3-235B LoRA", "rtx4090", 4, "asynchronous"): 0.11,
    ("Qwen3-1.7B", "a800", 8, "asynchronous"): 0.02,
    ("Qwen3-235B LoRA", "a800", 8, "synchronous"): 0.03,
}


# Those of the table, on which all models were measured.
MACHINES = (("rtx4090", 1), ("rtx4090", 4), ("rtx4090", 8), ("a800", 8))
ROOT = Path(__file__).resolve().parents[2]


def command(run: Run, optimizer: str) -> list[str]:
    """The arguments of ``roundpipe`` for a run."""
    common = ("estimate", "--model", HUB_NAMES[run.model], "--gpu", run.gpu, "--devices", str(run.num_devices))
    sizes = ("--seq-len", "2048", "--batch-size", str(MODELS[run.model].num_sequences))
    options = ("--dtype", "fp16", "--fp16-accumulation", "--chunked-loss", "--no-split")
    return [*common, *sizes, *options, "--optimizer", optimizer]


def ends(run: Run, optimizer: str, *more: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The slow and the fast end: what the command does, but only for the method that was measured."""
    parser = argparse.ArgumentParser()
    estimate.add_parser(parser.add_subparsers())
    args = parser.parse_args([*command(run, optimizer), *more])
    gpu = estimate._gpu_of(args)
    cluster = estimate._cluster_of(args, gpu)
    wanted: dict[str, Any] = {"dtype": "fp16", "fp16_accumulation": True, "chunked_loss": True}
    lora_rank = args.lora_rank if MODELS[run.model].is_lora else None
    workload = Workload(load_shape(args.model), gpu, args.seq_len, lora_rank=lora_rank, **wanted)
    size = choose_microbatch_size(workload, cluster)
    slow, fast = (speed(workload, cluster, size, pace) for pace in cluster.paces)
    return slow, fast


def shares(run: Run, optimizer: str, *more: str) -> tuple[float, float]:
    """Both ends of the estimated speed, as shares of the measured one."""
    slow, fast = (end["tokens_per_s"] / getattr(run, optimizer) for end in ends(run, optimizer, *more))
    return slow, fast


@cache
def shares_on_the_page() -> dict[tuple[Run, str], tuple[float, float]]:
    """What ``shares`` gives, as far as it is shown."""
    text = (ROOT / "docs" / "how-to" / "command-line.md").read_text(encoding="utf-8")
    shown = re.findall(r"([\d,]+): ([\d.]+)-([\d.]+)", text)
    cases = [case for _, row in rows_of_the_table() for case in row if getattr(*case)]
    assert [f"{getattr(*case):,}" for case in cases] == [measured for measured, _, _ in shown]
    return {case: (float(slow), float(fast)) for case, (_, slow, fast) in zip(cases, shown, strict=True)}


@pytest.mark.parametrize(
    ("run", "optimizer"), CASES, ids=[f"{run.model} {run.num_devices}x{run.gpu} {which}" for run, which in CASES]
)
def test_measured_speed_lies_in_the_range(run: Run, optimizer: str) -> None:
    slow, fast = shares_on_the_page().get((run, optimizer)) or shares(run, optimizer)
    distance = round(max(slow - 1, 1 - fast), 2)  # as exact as the page
    allowed = OUTSIDE.get((run.model, run.gpu, run.num_devices, optimizer))
    assert distance <= 0 if allowed is None else 0 < distance <= allowed
    # A range that says something: neither end is far away.
    assert slow > 0.45
    assert fast < 2.15
    assert fast < 3.1 * slow


def test_large_models_are_bound_by_the_copies_of_all_gpus() -> None:
    """With a host that gives eight links what they can take, the estimate would be two to four times too fast."""
    (run,) = (run for run in RUNS if run.model == "Qwen3-235B LoRA" and run.synchronous and run.gpu == "rtx4090")
    fast_host = ("--host-bandwidth", "200GB/s")
    with quick_search():
        assert [end["bound_by"] for end in ends(run, "asynchronous")] == ["host memory", "host memory"]
        assert all(end["bound_by"] != "host memory" for end in ends(run, "asynchronous", *fast_host))
        slow, fast = shares(run, "asynchronous", *fast_host)
    assert slow > 1.8
    assert fast > 4


def test_the_function_here_is_the_command(run_json: RunJson) -> None:
    run = RUNS[0]
    with quick_search():
        found = run_json(*command(run, "asynchronous"))["methods"]["full"]["speed"]
        expected = [end["tokens_per_s"] for end in ends(run, "asynchronous")]
    assert expected == [found[name]["tokens_per_s"] for name in ("slow", "fast")]


def rows_of_the_table() -> list[tuple[str, list[tuple[Run, str]]]]:
    """Names, and what is in their cells."""
    found = {(run.model, run.gpu, run.num_devices): run for run in RUNS}
    return [
        (f"{model}, {name}", [(found[(model, *machine)], optimizer) for machine in MACHINES])
        for optimizer, name in (("asynchronous", "async"), ("synchronous", "sync"))
        for model in HUB_NAMES
    ]


def cell(run: Run, optimizer: str) -> str:
    """What the paper measured, and both ends of the estimate as shares of it."""
    measured = getattr(run, optimizer)
    if measured is None:
        return ""
    slow, fast = shares(run, optimizer)
    return f"{measured:,}: {slow:.2f}-{fast:.2f}"


def comparison() -> str:
    """The table of docs/how-to/command-line.md."""
    rows = [(name, *(cell(*case) for case in cases)) for name, cases in rows_of_the_table()]
    return Table("", ("model", *(f"{count} x {gpu}" for gpu, count in MACHINES)), rows, num_text=1).format() + "\n"


if __name__ == "__main__":
    print(comparison(), end="")
