"""Host memory of RoundPipe and device memory of bound stages, added up by hand."""

from __future__ import annotations

from lightning_roundpipe.cli.memory import bound_memory, host_memory
from lightning_roundpipe.planning import (
    CallCost,
    CostProfile,
    Partition,
    Stage,
    StageKind,
    StepPlan,
    gpipe,
    looped_bfs,
    one_f_one_b,
)

F, FUSED, B = StageKind.FORWARD, StageKind.FUSED, StageKind.BACKWARD


def call(name: str, input_bytes: int, *, weights: int = 10, is_frozen: bool = False) -> CallCost:
    """A call of `weights` bf16 weights."""
    return CallCost(name, 1.0, 2.0, 2 * weights, 0 if is_frozen else 2 * weights, input_bytes)


PROFILE = CostProfile((call("a", 100), call("b", 7), call("frozen", 3, is_frozen=True), call("b", 5)))
PARTITION = Partition(4, (Stage(0, F, 0, 2), Stage(1, FUSED, 2, 4), Stage(2, B, 0, 2)))
PLAN = StepPlan(PARTITION, (1, 1, 1), round_size=1)


def test_host_states_count_each_unit_once() -> None:
    memory = host_memory(PLAN, PROFILE, 5, "bf16")
    # a, b (once) and frozen have 10 weights each
    assert memory["frozen weights"] == 10 * 2
    assert memory["master weights"] == 20 * 4
    assert memory["working copy"] == 20 * 2
    assert memory["gradients"] == 2 * 20 * 4  # new ones come beside those of the last step
    assert memory["optimizer state"] == 20 * 8
    assert memory["activations"] == 2 * (100 + 7 + 3)  # of two rounds; what the fused stage hands on inside stays there
    assert memory["total"] == sum(size for name, size in memory.items() if name != "total")


def test_fp32_masters_travel_themselves() -> None:
    memory = host_memory(PLAN, PROFILE, 1, "fp32")
    assert memory["frozen weights"] == 20
    assert memory["master weights"] == 40
    assert memory["working copy"] == 0
    assert memory["gradients"] == 40
    assert memory["optimizer state"] == 80


def test_bound_stages_keep_everything_on_the_device() -> None:
    memory = bound_memory((2, 2), PROFILE, gpipe(2, 3), "bf16")
    # weights, gradients, fp32 masters and two moments: 2 + 2 + 4 + 8 bytes; a frozen weight: 2. Inputs of all three
    # micro-batches, and those of the call that runs.
    assert memory == (20 * 16 + 3 * 107 + 100, 10 * 16 + 10 * 2 + 3 * 8 + 5)


def test_bound_stages_in_fp32_have_no_masters_beside() -> None:
    # half as many weights in the same bytes: 4 + 4 + 8 bytes
    assert bound_memory((4,), PROFILE, gpipe(1, 1), "fp32") == (2 * 5 * 16 + 5 * 4 + 115 + 100,)


def test_1f1b_holds_fewer_micro_batches() -> None:
    first, last = bound_memory((2, 2), PROFILE, one_f_one_b(2, 8), "bf16")
    assert (first, last) == (20 * 16 + 2 * 107 + 100, 10 * 16 + 10 * 2 + 1 * 8 + 5)


def test_stages_of_a_looped_device_add_up() -> None:
    memory = bound_memory((1, 1, 1, 1), PROFILE, looped_bfs(4, 2, 2), "bf16")
    # Device 0 has a and frozen, and the most when the backward of a begins: frozen has let its inputs go. Device 1 has
    # b twice, its weights once, and the most when the last forward runs.
    assert memory == (10 * 16 + 10 * 2 + 2 * 100 + 100, 10 * 16 + 2 * 12 + 5)


def test_bound_stages_keep_the_graph_of_the_head_alone() -> None:
    """Other calls are recomputed one by one; the head waits with its graph for the backward."""
    calls = tuple(
        CallCost(name, 1.0, 2.0, workspace_bytes=size) for name, size in (("a", 50), ("b", 70), ("head", 1000))
    )
    profile = CostProfile(calls)
    assert bound_memory((1, 2), profile, gpipe(2, 4), "bf16") == (50, 4 * 1000 + 70)
    assert bound_memory((1, 2), profile, one_f_one_b(2, 4), "bf16") == (50, 1000 + 70)
