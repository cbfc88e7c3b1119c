"""The memory of the host that the estimate counts, beside the runs that were measured on a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.models import FULL, RANK, Size
from benchmarks.gpu.models import LORA as LORA_SIZE
from lightning_roundpipe.cli.estimate.feasibility import Cluster, host_bytes
from lightning_roundpipe.cli.estimate.gpus import GPUS
from lightning_roundpipe.cli.estimate.models import read_shape
from lightning_roundpipe.cli.estimate.workload import Workload

MEASURED = Path(__file__).resolve().parents[2] / "docs" / "measurements" / "gpu"


def figures(stage: str, contender: str) -> dict[str, Any]:
    document = json.loads((MEASURED / f"{stage}.json").read_text(encoding="utf-8"))
    found = document["steps"][contender]["figures"]
    assert isinstance(found, dict)
    return found


def counted(size: Size, num_microbatches: int, round_size: int) -> dict[str, int]:
    """What the command counts for a model of the benchmarks."""
    config = {
        "model_type": "llama",
        "hidden_size": size.width,
        "intermediate_size": size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "vocab_size": size.vocabulary,
    }
    gpu = GPUS["h200"]
    lora_rank = RANK if size.lora else None
    workload = Workload(read_shape(config, "measured"), gpu, size.sequence, lora_rank=lora_rank)
    return host_bytes(workload, Cluster(1, gpu.memory_bytes, None, num_microbatches * size.rows, round_size), size.rows)


@pytest.mark.parametrize(
    ("contender", "round_size"),
    [("roundpipe", 2), ("roundpipe, round_size=2", 2), ("roundpipe, round_size=8", 8)],  # the first chose rounds of two
)
def test_host_memory_is_what_full_fine_tuning_took(contender: str, round_size: int) -> None:
    measured = figures("full", contender)
    memory = counted(FULL, FULL.microbatches, round_size)
    assert sum(memory.values()) == pytest.approx(measured["peak_host_bytes"], rel=0.1)
    locked = measured["timeline"]["page_locked"]
    own = locked["host.page_locked_own_bytes"]
    # Each term of it: what is left of the peak is the runtime, of the buffers the activations, which are at most these.
    fp32_table = FULL.vocabulary * FULL.width * 4
    assert memory["working copy"] == pytest.approx(locked["host.page_locked_in_place_bytes"] - fp32_table, rel=0.05)
    states = memory["master weights"] + memory["optimizer state"]
    rest = measured["peak_host_bytes"] - own - states - (locked["host.page_locked_in_place_bytes"] - fp32_table)
    assert memory["runtime"] == pytest.approx(rest, rel=0.1)
    assert 0.75 * memory["activations"] < own - memory["gradients"] < memory["activations"]


def test_host_memory_is_no_less_than_lora_took() -> None:
    """That run was ended in its fourth step, with the memory of all that was to come."""
    measured = figures("lora", "roundpipe")
    memory = counted(LORA_SIZE, 4, 2)
    assert 0 < sum(memory.values()) / measured["peak_host_bytes"] - 1 < 0.3
    locked = measured["timeline"]["page_locked"]["host.page_locked_in_place_bytes"]
    assert memory["frozen weights"] == pytest.approx(locked, rel=0.001)
