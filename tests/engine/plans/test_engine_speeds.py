"""Devices that differ: their speeds are measured, and plans give the slower ones less."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from time import perf_counter

import pytest
import torch

from lightning_roundpipe.devices.pool import DevicePool
from lightning_roundpipe.devices.virtual import VirtualDevice
from lightning_roundpipe.engine.costs import DeviceSpeeds
from lightning_roundpipe.engine.runner import Engine, StepResult
from lightning_roundpipe.planning import CostProfile, DeviceTraits, Machine, StepPlan, plan_training, stage_costs
from tests.support.engine.modelled import Model, ModelledDevice, Work, modelled_pool, run

NUM_MICROBATCHES = 12


class UnequalDevice(ModelledDevice):
    """Its time is that of the units, over its speed."""

    has_own_speed = True
    speed = 1.0

    def elapsed_ms(self, start: float, end: float) -> float | None:
        return (end - start) / self.speed


def unequal_pool(speeds: Sequence[float]) -> DevicePool:
    pool = modelled_pool(len(speeds))
    pool.devices = tuple(UnequalDevice(index) for index in range(len(speeds)))
    set_speeds(pool, speeds)
    return pool


def set_speeds(pool: DevicePool, speeds: Sequence[float]) -> None:
    for device, speed in zip(pool.devices, speeds, strict=True):
        assert isinstance(device, UnequalDevice)
        device.has_own_speed, device.speed = True, speed


def planner(costs: CostProfile, machine: Machine, num_microbatches: int, training: bool) -> StepPlan:
    return plan_training(costs, machine, num_microbatches=num_microbatches)


def engine_on(pool: DevicePool) -> tuple[Engine, Model]:
    model = Model([Work(ms, 2 * ms) for ms in (4.0, 5.0, 3.0, 4.0, 6.0)])
    return Engine(model, pool, planner, num_threads=1), model


def steps(engine: Engine, model: Model, count: int) -> list[StepResult]:
    return [run(engine, model, rows=NUM_MICROBATCHES, num_microbatches=NUM_MICROBATCHES) for _ in range(count)]


def work_shares(engine: Engine, result: StepResult) -> list[float]:
    """Of each device, in the time that it would take at speed 1."""
    assert result.schedule is not None
    assert result.partition is not None
    profile = engine.costs("train")
    assert profile is not None
    costs = stage_costs(result.partition, profile)
    work = [sum(costs[action.stage_index].duration_ms for action in actions) for actions in result.schedule.devices]
    return [ms / sum(work) for ms in work]


@pytest.mark.parametrize("speeds", [(0.4, 1.0), (1.0, 1.0, 0.5), (1.0, 0.6, 0.3)], ids=str)
def test_devices_get_work_in_proportion_to_their_speed(speeds: tuple[float, ...]) -> None:
    """And costs are those at the speed of the median device."""
    engine, model = engine_on(unequal_pool(speeds))
    last = steps(engine, model, 5)[-1]
    assert work_shares(engine, last) == pytest.approx([speed / sum(speeds) for speed in speeds], abs=0.06)
    if speeds != (1.0, 1.0, 0.5):
        return
    profile = engine.costs("train")
    assert profile is not None
    assert [call.forward_ms for call in profile.calls] == pytest.approx([4.0, 5.0, 3.0, 4.0, 6.0])
    assert [call.backward_ms for call in profile.calls] == pytest.approx([8.0, 10.0, 6.0, 8.0, 12.0])


def test_a_device_that_slows_down_gets_less_soon() -> None:
    """Not only with the next plan that is due, which would be after step 32."""
    pool = unequal_pool((1.0, 1.0, 1.0))
    engine, model = engine_on(pool)
    before = steps(engine, model, 17)[-1]
    set_speeds(pool, (1.0, 0.5, 1.0))
    results = steps(engine, model, 14)
    assert any(result.replanned for result in results)
    assert work_shares(engine, before)[1] == pytest.approx(1 / 3, abs=0.05)
    assert work_shares(engine, results[-1])[1] == pytest.approx(0.5 / 2.5, abs=0.06)


def test_devices_that_are_nearly_alike_take_turns() -> None:
    engine, model = engine_on(unequal_pool((1.0, 0.93, 1.05)))
    last = steps(engine, model, 9)[-1]
    assert last.schedule is not None
    assert {len(actions) for actions in last.schedule.devices} == {len(last.schedule.devices[0])}


def test_plans_are_made_once_where_algorithms_are_deterministic() -> None:
    """What is measured must not decide in which order gradients are added up."""
    pool = unequal_pool((1.0, 0.5))
    engine, model = engine_on(pool)
    torch.use_deterministic_algorithms(True)
    try:
        results = steps(engine, model, 9)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not any(result.replanned for result in results)
    assert len({result.schedule for result in results[1:]}) == 1


def test_speeds_are_found_although_no_call_has_run_everywhere() -> None:
    """Two calls tie the devices together: cost times slowness explains all times."""
    speeds, costs = DeviceSpeeds(3), {"a": 10.0, "b": 3.0, "c": 70.0}
    slowness = (1.0, 2.0, 0.8)
    for call, device in (("a", 0), ("a", 1), ("b", 1), ("b", 2), ("c", 2)):
        speeds.note(call, device, costs[call] * slowness[device], False)
    found = speeds.changed(Machine(3))
    assert found is not None
    assert [found[0] / speed for speed in found] == pytest.approx([slow / slowness[0] for slow in slowness], rel=1e-3)
    traits = tuple(DeviceTraits(speed) for speed in found)
    assert speeds.changed(Machine(3, devices=traits)) is None


def test_what_never_ran_twice_tells_nothing() -> None:
    speeds = DeviceSpeeds(2)
    for call, device in itertools.product(range(3), range(2)):
        speeds.note((call, device), device, 5.0 + 3 * device, False)
    assert speeds.changed(Machine(2)) is None


def test_a_virtual_device_of_half_the_speed_is_busy_for_twice_the_time() -> None:
    device = VirtualDevice(0, speed=0.5)
    started = device.stamp()
    while device.elapsed_ms(started, device.stamp()) < 2.0:
        pass
    computed_s = perf_counter() - started
    assert device.end(started) - started >= 2 * computed_s


def test_speeds_of_a_pool_are_checked() -> None:
    cpus = [torch.device("cpu")] * 2
    assert DevicePool(cpus, speeds=[1.0, 0.5]).has_own_speeds
    assert not DevicePool(cpus).has_own_speeds
    with pytest.raises(ValueError, match=r"speeds=\[1.0\] for 2 devices: pass one number for each"):
        DevicePool(cpus, speeds=[1.0])
