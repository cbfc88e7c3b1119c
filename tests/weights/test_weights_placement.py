"""Which weights are on a device when: who loads them, prefetch, what stays and what has to go."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe.devices.device import Device
from lightning_roundpipe.devices.transfer import Transfer
from lightning_roundpipe.devices.virtual import VirtualDevice
from lightning_roundpipe.engine.plans import Plan, stage_runs_of
from lightning_roundpipe.engine.runner import Planner, StepResult
from lightning_roundpipe.planning import CallCost, CostProfile, Partition, Stage, StageKind, round_robin, stage_costs
from lightning_roundpipe.weights import placement
from lightning_roundpipe.weights.gradients import GradientStore
from lightning_roundpipe.weights.parameters import Replica
from lightning_roundpipe.weights.placement import Loader, ReplicaCache, StageRun
from lightning_roundpipe.weights.units import Unit, UnitTable
from tests.support.engine.lazy_link import cpu_pool
from tests.support.engine.partitions import everything_kept, everything_recomputed
from tests.support.engine.steps import Steps

WIDTH = 32
NUM_BLOCKS = 4
BLOCK_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


class Block(nn.Module):
    """Tells a listener when it runs."""

    def __init__(self, index: int, listener: list[Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.index = index
        self.listener = (listener,)  # a tuple: not an attribute that is looked at for changed settings

    def forward(self, x: Tensor) -> Tensor:
        for listen in self.listener[0]:
            listen(self.index)
        return torch.tanh(self.linear(x))


class Model(nn.Module):
    def __init__(self, listeners: list[Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(i, listeners) for i in range(NUM_BLOCKS))

    def step(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Run(Steps):
    """Steps of a model on devices that copy lazily."""

    model: Model

    def __init__(
        self, num_devices: int = 1, memory_limit: int | None = None, planner: Planner = everything_recomputed
    ) -> None:
        torch.manual_seed(0)
        self.listeners: list[Any] = []
        pool = cpu_pool(num_devices, copies=True, memory_limit=memory_limit)
        super().__init__(Model(self.listeners), planner, pool=pool)

    def step(self, *, training: bool = True, num_microbatches: int = 2) -> StepResult:
        parts = torch.linspace(-1, 1, 2 * num_microbatches * WIDTH).reshape(-1, WIDTH).chunk(num_microbatches)
        return self.train(parts) if training else self.evaluate(parts)

    def loaded(self, device: int = 0) -> set[str]:
        replicas = self.engine._replicas._replicas[device].values()
        return {replica.unit.name for replica in replicas if replica.is_loaded}

    def watch(self, **kwargs: Any) -> list[tuple[int, set[int]]]:
        """Runs a step: which block ran, and which were on the device then, or on their way."""
        seen: list[tuple[int, set[int]]] = []
        self.listeners[:] = [lambda i: seen.append((i, {int(name[-1]) for name in self.loaded()}))]
        self.step(**kwargs)
        self.listeners.clear()
        assert len(seen) >= 2 * NUM_BLOCKS
        return seen


def test_slots_are_runs_of_a_stage_numbered_by_their_first_microbatches() -> None:
    model = Model([])
    units = tuple(UnitTable(model).units.values())
    stages = (
        Stage(0, StageKind.FORWARD, 0, 2),
        Stage(1, StageKind.FUSED, 2, 4),
        Stage(2, StageKind.BACKWARD, 0, 2),
    )
    costs = CostProfile(tuple(CallCost(unit.name, 1.0, 2.0) for unit in units))
    plan = Plan(units, Partition(4, stages), activation_bytes=((10, 1), (20, 2), (30, 3)), costs=costs)
    slots = stage_runs_of(plan, round_robin(3, 4, 2, round_size=2))
    for stage, names in enumerate(["01", "23", "10"]):
        found = [slot for row in slots for slot in row if slot.stage == stage]
        assert sorted(slot.ordinal for slot in found) == [0, 1], "one slot for each of two rounds"
        assert {"".join(unit.name[-1] for unit in slot.units) for slot in found} == {names}
        assert {slot.has_gradients for slot in found} == {stage > 0}
        assert {slot.activation_bytes for slot in found} == {12 * (stage + 1)}, "one in the stage, two that wait"


def test_the_next_slot_is_on_its_way_while_one_runs() -> None:
    run = Run()
    run.step()
    seen = run.watch()
    forward = [here for index, here in seen[: 2 * (NUM_BLOCKS - 1)]]
    for position, here in enumerate(forward):
        block = position // 2
        assert {block, block + 1} <= here
        assert not any(later in here for later in range(block + 2, NUM_BLOCKS)), "one slot ahead, not more"


def test_without_room_nothing_is_fetched_ahead() -> None:
    """Room for one block with its gradients and its activations, the least that a step needs."""
    roomy = Run()
    for _ in range(2):
        expected = roomy.step()
    activations = roomy.pool[0].memory.peaks["activations"]
    assert activations < BLOCK_BYTES
    run = Run(memory_limit=2 * BLOCK_BYTES + activations)
    run.step()
    seen = run.watch()
    assert all(len(here) <= 2 for _, here in seen)
    assert [here for index, here in seen if index == 2][-1] == {2}, "in the backward there is room for one"
    result = run.step()
    for wanted, found in zip(expected.gradients.values(), result.gradients.values(), strict=True):
        assert torch.equal(wanted, found)


def test_weights_that_must_come_leave_the_headroom_free_as_long_as_others_can_go() -> None:
    """Room for two blocks without their activations, or for one with them."""
    run = Run(memory_limit=2 * BLOCK_BYTES)
    units = list(UnitTable(run.model).units.values())
    replicas, device = run.engine._replicas, run.pool[0]
    run.pool.open()
    try:
        replicas.expect(device, {units[2]: 0})
        replicas.load(units[0], device)
        replicas.load(units[1], device)
        assert run.loaded() == {"blocks.0", "blocks.1"}
        device.memory.headroom = BLOCK_BYTES // 2
        replicas.load(units[2], device)
        assert run.loaded() == {"blocks.2"}, "the others were not in use"
        replicas.expect(device, {units[2]: 0, units[3]: 0})
        replicas.load(units[3], device)
        assert run.loaded() == {"blocks.2", "blocks.3"}, "both are needed in this stage run"
    finally:
        run.pool.close()
    assert device.memory.headroom == 0


def test_the_headroom_is_for_activations_of_the_stage_run_that_runs_and_of_the_next_one() -> None:
    """Of one micro-batch in the stage, and of both that wait for the stage after it."""
    run = Run()
    result = run.step()
    costs = run.engine.costs("train")
    assert costs is not None
    assert result.partition is not None
    needed = [cost.workspace_bytes + 2 * cost.handover_bytes for cost in stage_costs(result.partition, costs)]
    seen: dict[int, int] = {}  # in the first run of each block, which is its forward
    run.listeners[:] = [lambda i: seen.setdefault(i, run.pool[0].memory.headroom)]
    run.step()
    assert seen == {i: max(needed[i : i + 2]) for i in range(NUM_BLOCKS)}
    assert needed[NUM_BLOCKS - 1] > needed[NUM_BLOCKS - 2], "the fused stage keeps a graph"


@contextlib.contextmanager
def opened(memory_limit: int) -> Iterator[tuple[Run, list[Unit], ReplicaCache, Device]]:
    """A run in a training step that has begun, its units, their replicas, and its device."""
    run = Run(memory_limit=memory_limit)
    replicas, units = run.engine._replicas, list(UnitTable(run.model).units.values())
    replicas.weights.begin_step("train", training=True)
    run.pool.open()
    try:
        yield run, units, replicas, run.pool[0]
    finally:
        run.pool.close()


@pytest.mark.parametrize(
    ("blocks", "activations", "loaded"),
    [
        (["0", "12"], 0, ["01", "12"]),
        (["0", "1", "2"], 1, ["0", "1", "2"]),
        (["0", "1", "2", "0", "1"], 0, ["01", "12", "02", "01", "1"]),
        (["0", "1", "0", "2"], 0, ["01", "01", "02", "2"]),
    ],
    ids=["in the order of need", "beside activations", "for what is needed later", "what is not needed again goes"],
)
def test_stage_runs_share_room_for_two_blocks(blocks: list[str], activations: int, loaded: list[str]) -> None:
    """Those of the next one are fetched as far as there is room; what is needed last makes room for it.

    Args:
        blocks: of each stage run.
        activations: bytes of each.
        loaded: blocks that are on the device once it has begun.
    """
    with opened(2 * BLOCK_BYTES) as (run, units, replicas, device):
        rows = [tuple(units[int(block)] for block in row) for row in blocks]
        stage_runs = [StageRun(i, row, False, 0, activations) for i, row in enumerate(rows)]
        loader = Loader([stage_runs], run.pool, replicas, GradientStore(), is_recording=False)
        loader.send_ahead(device)
        assert run.loaded() == {unit.name for unit in rows[0]}, "the first one alone"
        loader.begin(device)
        found = []
        for stage_run in stage_runs:
            found.append("".join(sorted(name[-1] for name in run.loaded())))
            for unit in stage_run.units:
                replicas._find(unit, device, is_low=False).activate()
            if stage_run is not stage_runs[-1]:
                loader.end_stage_run(0)
    assert found == loaded


def test_what_makes_room_for_a_unit_leaves_alone_what_is_there_of_it() -> None:
    """A call off the plan, of which no stage run tells that it is needed now."""
    with opened(2 * BLOCK_BYTES - 1) as (run, units, replicas, device):
        run.model.blocks[0].linear.bias.requires_grad_(False)
        replicas.load(units[0], device)
        replicas._find(units[0], device, is_low=False).unload(unless=replicas.weights.outlast_step)  # the bias stays
        replicas.load(units[1], device)
        replicas.load(units[0], device)
        assert run.loaded() == {"blocks.0"}


def test_a_unit_is_on_a_device_in_one_form() -> None:
    with opened(2 * BLOCK_BYTES) as (_, units, replicas, device):
        for is_low in (False, True, False):
            replicas._make_loaded(replicas._find(units[0], device, is_low=is_low))
            assert [replica.is_low for replica in replicas._replicas[0].values() if replica.is_loaded] == [is_low]


def test_what_is_being_updated_is_not_waited_for_ahead_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "is_pending", lambda parameters: True)
    with opened(BLOCK_BYTES) as (run, units, replicas, device):
        assert not replicas.prefetch(units[0], device)
        assert run.loaded() == set()


def test_memory_that_is_still_written_is_not_given_out() -> None:
    with opened(BLOCK_BYTES) as (_, units, replicas, device):
        replicas.load(units[0], device)
        assert replicas.evict(0)
        assert not device.memory.try_reserve("weights", BLOCK_BYTES), "the upload is on its way"
        device.memory.reserve("weights", BLOCK_BYTES)


def test_what_a_step_needs_again_stays_and_is_not_fetched_twice() -> None:
    run = Run()
    run.step()
    assert bytes_of_weights(run) == NUM_BLOCKS * BLOCK_BYTES, "although three of them have two slots"
    assert run.pool[0].memory.peaks["weights"] == NUM_BLOCKS * BLOCK_BYTES
    assert run.loaded() == set(), "after an update they would not be right"


def bytes_of_weights(run: Run, **kwargs: Any) -> int:
    """Bytes of weights that one step brings to the first device."""
    run.engine.trace = True
    labels = [span.label for span in run.step(**kwargs).timeline.spans if span.kind == "h2d"]
    run.engine.trace = False
    return BLOCK_BYTES * sum(label.startswith("weights") for label in labels)


def test_frozen_weights_stay_from_step_to_step() -> None:
    run = Run()
    for block in list(run.model.blocks)[:3]:
        block.requires_grad_(False)
    run.step()
    for _ in range(2):
        assert bytes_of_weights(run) == BLOCK_BYTES, "the last block alone is trained"
    assert run.loaded() == {"blocks.0", "blocks.1", "blocks.2"}


def test_weights_stay_from_batch_to_batch_of_an_evaluation() -> None:
    run = Run()
    run.step(training=False)
    assert bytes_of_weights(run, training=False) == 0
    run.step()
    assert bytes_of_weights(run, training=False) == NUM_BLOCKS * BLOCK_BYTES


def test_what_is_needed_last_goes_first() -> None:
    """Room for three blocks in an evaluation of four: of those that stay, the one used last is given up, because the
    next batch needs the others before it."""
    run = Run()
    for _ in range(2):
        run.step(training=False)
    activations = run.pool[0].memory.peaks["activations"]
    # A micro-batch that moves on may still have its two rows there when the next one begins.
    limit = 3 * BLOCK_BYTES + activations + 2 * 4 * WIDTH
    run = Run(memory_limit=limit)
    for _ in range(2):
        run.step(training=False)
    moved = [bytes_of_weights(run, training=False) // BLOCK_BYTES for _ in range(3)]
    assert all(n < NUM_BLOCKS for n in moved), "with the oldest given up first, all of them would travel each time"
    assert run.loaded() == {"blocks.0", "blocks.2", "blocks.3"}, "the next batch begins at once"
    assert run.pool[0].memory.peak <= limit


def test_a_failed_step_leaves_nothing_behind() -> None:
    run = Run(num_devices=2)
    run.step()

    def fail(index: int) -> None:
        if index == 2:
            raise ValueError("a unit failed")

    run.listeners[:] = [fail]
    with pytest.raises(ValueError, match="a unit failed"):
        run.step()
    run.listeners.clear()
    assert [run.loaded(device) for device in range(2)] == [set(), set()]
    assert [device.memory.used for device in run.pool.devices] == [0, 0]
    assert len(run.step().gradients) == 2 * NUM_BLOCKS


@pytest.mark.parametrize("nth", [1, 2, 5])
def test_what_could_not_be_uploaded_is_not_on_the_books(monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
    """As where a GPU has less memory than its books, or no more memory of the host can be page-locked."""
    run = Run()
    for block in run.model.blocks:
        block.linear.bias.requires_grad_(False)  # travels apart
    run.step()
    uploads, upload = itertools.count(1), VirtualDevice.upload

    def fail(*args: Any, **kwargs: Any) -> Transfer:
        if next(uploads) == nth:
            raise MemoryError
        return upload(*args, **kwargs)

    monkeypatch.setattr(VirtualDevice, "upload", fail)
    with pytest.raises(MemoryError):
        run.step()
    run.engine.close()
    assert run.pool[0].memory.used == 0


# --- who loads, and what is waited for -------------------------------------------------------------------------------


@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_the_thread_that_runs_the_step_loads_nothing(num_microbatches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(num_devices=2)
    run.step()
    loaders: list[str] = []
    load = Replica.load

    def noting(replica: Replica, *args: Any, **kwargs: Any) -> bool:
        loaders.append(threading.current_thread().name)
        return load(replica, *args, **kwargs)

    monkeypatch.setattr(Replica, "load", noting)
    run.step(num_microbatches=num_microbatches)
    assert loaders
    assert all(name.startswith("roundpipe-microbatch-") for name in loaders)


@pytest.mark.parametrize(("num_devices", "planner"), [(1, everything_kept), (2, everything_recomputed)])
def test_a_unit_does_not_wait_for_an_update_of_another(
    num_devices: int, planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block 1, of the same stage or on another device, is loaded when block 0 has begun to run, and not before."""
    run = Run(num_devices, planner=planner)
    run.step()
    first_runs = threading.Event()
    run.listeners[:] = [lambda index: index or first_runs.set()]
    second = run.model.blocks[1]
    is_pending, load = placement.is_pending, Replica.load
    in_time: list[bool] = []

    def seems_pending(parameters: Any) -> bool:
        found = list(parameters)
        is_waited_for = any(p is second.linear.weight for p in found) and not first_runs.is_set()
        return is_waited_for or is_pending(found)

    def load_when_updated(replica: Replica, *args: Any, **kwargs: Any) -> bool:
        if replica.unit.module is second and not in_time:
            in_time.append(first_runs.wait(20))  # as an upload that waits for an update
        return load(replica, *args, **kwargs)

    monkeypatch.setattr(placement, "is_pending", seems_pending)
    monkeypatch.setattr(Replica, "load", load_when_updated)
    run.step()
    assert in_time == [True]
