"""Every wait and every hold of devices on GPUs is needed: leaving out any one of them is found out.

Mutation testing on simulated GPUs whose kernels and copies are late. Two uses of memory that nothing orders count as a
race there, whatever the timing was; fresh and freed memory is NaN. So each mutation shows: as a race, in the numbers,
as an error, or as memory that is left. Two waits are not among them because they order nothing: ``throttle``, which
bounds the memory that queued work takes, and the lane's wait for a chunk, which lets activations overtake.
"""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_roundpipe.common.attributes import attribute_set
from lightning_roundpipe.devices.device import Device
from lightning_roundpipe.devices.gpu.device import GpuDevice, _Freed
from lightning_roundpipe.devices.gpu.driver import GpuDriver, driver_of
from lightning_roundpipe.devices.gpu.lanes import GpuLane, GpuTransfer
from lightning_roundpipe.devices.pool import DevicePool
from lightning_roundpipe.devices.transfer import Edge
from tests.support.engine.lazy_link import cpu_pool
from tests.support.engine.wide_units import WIDTH, train

pytestmark = pytest.mark.accelerator

DELAY_US = 300
LATE_COPIES_US = 3000
# Longer than a thread may be without its processor, which would hide the lateness.
VERY_LATE_US = 300_000


@functools.cache
def right() -> dict[str, Tensor]:
    return train(cpu_pool(2))


def wrong_training() -> str | None:
    pool = DevicePool([torch.device("sim", index) for index in range(2)])
    found = train(pool)
    left = [torch.sim.memory_allocated(index) for index in range(2)]
    if left != [0, 0]:
        return f"{left} bytes are left"
    try:
        torch.testing.assert_close(found, right(), rtol=1e-4, atol=1e-6)
    except AssertionError as error:
        return str(error)
    return None


def wrong_copies() -> str | None:
    """Uploads whose sources nothing else holds, also at the end of a step, and downloads that take memory of their
    size."""
    device = GpuDevice(0, 0, driver=driver_of("sim"))
    device.open()
    device.enter()
    problems: list[str] = []
    try:
        with driver_of("sim").on(device.d2h._activations):
            torch.sim._sleep(VERY_LATE_US)
        for value in range(3):
            source, _ = device.page_locked.buffers.empty_like(torch.empty(WIDTH))
            upload = device.upload([source.fill_(value)], "up")
            del source
            made = torch.full((WIDTH,), -1.0, device=device.torch_device)
            download = device.download([made], "down")
            passing = device.free([made], after=download)
            del made
            torch.sim.current_stream(0).synchronize()
            if passing.is_done() and not download.is_done():
                problems.append("the books give out memory that is still read")
            (copy,) = upload.wait(Edge.INPUTS)
            if not copy.cpu().eq(value).all() or not download.wait(Edge.GRADIENTS)[0].eq(-1).all():
                problems.append("a copy is not what was copied")
            del copy, upload, download, passing
        device.upload([device.page_locked.buffers.empty_like(torch.empty(WIDTH))[0].fill_(9)], "never read")
        device.close()
        device.open()
        made = torch.full((WIDTH,), -1.0, device=device.torch_device)
        downloads = [device.download([made], "in the next step") for _ in range(4)]  # as many as were let go
        for download in downloads:
            download.await_done()
    finally:
        device.close()
        device.dispose()
    return "; ".join(problems) or None


def wrong_weights() -> str | None:
    """Weights are read late, and let go at once: the next ones, of the same size, may not get their memory before."""
    device = GpuDevice(0, 0, driver=driver_of("sim"))
    device.open()
    device.enter()
    sums: list[Tensor] = []
    try:
        for value in range(3):
            source, _ = device.page_locked.buffers.empty_like(torch.empty(WIDTH))
            upload = device.upload([source.fill_(value)], "weights", is_bulk=True)
            (copy,) = upload.wait(Edge.WEIGHTS)
            upload.await_done()
            torch.sim._sleep(LATE_COPIES_US)
            sums.append(copy.sum())
            del copy
            device.free(upload.tensors)
            alive = weakref.ref(upload)
            del upload
            while alive() is not None:  # the lane's thread may still hold it, and what was copied
                time.sleep(0)
        return None if [float(each) for each in sums] == [0, WIDTH, 2 * WIDTH] else "weights were overwritten"
    finally:
        device.close()
        device.dispose()


def memory_of_a_step() -> str | None:
    """What a step has let go of is free when it has ended, however late it was read."""
    device = GpuDevice(0, 0, driver=driver_of("sim"))
    device.open()
    device.enter()
    made = torch.full((WIDTH,), 1.0, device=device.torch_device)
    before = torch.sim.memory_allocated(0)
    torch.sim._sleep(VERY_LATE_US)
    device.free([made])
    del made
    device.close()
    left = torch.sim.memory_allocated(0)
    device.dispose()
    return None if left < before else "memory is not free after the step"


@contextlib.contextmanager
def late(copies_us: int) -> Iterator[None]:
    """Kernels and copies are late, and copies between the host and devices by ``copies_us`` more."""
    copy = GpuDriver.copy

    def copy_late(driver: GpuDriver, destination: Tensor, source: Tensor) -> None:
        torch.sim._sleep(copies_us)
        copy(driver, destination, source)

    torch.sim.reset_stats()
    torch.sim.set_delay(DELAY_US)
    with attribute_set(GpuDriver, "copy", copy_late):
        yield
    torch.sim.set_delay(0)
    for index in range(2):
        torch.sim.synchronize(index)
    torch.sim.empty_cache()


SCENARIOS: list[tuple[Callable[[], str | None], int]] = [
    (wrong_training, 0),
    (wrong_training, LATE_COPIES_US),
    (wrong_copies, LATE_COPIES_US),
    (wrong_weights, 0),
    (memory_of_a_step, 0),
]


def problem() -> str | None:
    """What goes wrong on simulated GPUs; None if nothing does."""
    for scenario, copies_us in SCENARIOS:
        with late(copies_us):
            try:
                found = scenario()
            except (RuntimeError, AssertionError) as error:
                found = repr(error)
        if races := torch.sim.stats()["races"]:
            return f"{races} races"
        if found is not None:
            return found
    return None


def test_without_a_mutation_nothing_is_wrong() -> None:
    assert problem() is None


# --- mutations ---------------------------------------------------------------------------------------------------

Patch = pytest.MonkeyPatch


def readers_do_not_wait_for(is_bulk: bool) -> Callable[[Patch], None]:
    """An upload that is read is only issued, not awaited by the compute stream."""

    def mutate(patch: Patch) -> None:
        await_on = GpuTransfer.await_on

        def issued_only(transfer: GpuTransfer, stream: Any) -> None:
            if transfer.is_bulk is is_bulk and transfer._lane.direction == "h2d" and stream is transfer._lane._compute:
                transfer._await_go_on()
            else:
                await_on(transfer, stream)

        patch.setattr(GpuTransfer, "await_on", issued_only)

    return mutate


def downloads_do_not_wait_for_compute(is_bulk: bool) -> Callable[[Patch], None]:
    def mutate(patch: Patch) -> None:
        await_sources = GpuLane._await_sources

        def without(lane: GpuLane, job: Any, stream: Any) -> None:
            is_left_out = lane.direction == "d2h" and job.transfer.is_bulk is is_bulk
            await_sources(lane, job._replace(ready=None) if is_left_out else job, stream)

        patch.setattr(GpuLane, "_await_sources", without)

    return mutate


def uploads_do_not_wait_for_downloads(patch: Patch) -> None:
    await_sources = GpuLane._await_sources

    def without(lane: GpuLane, job: Any, stream: Any) -> None:
        if isinstance(job.after, GpuTransfer):
            job.after._await_go_on()
            job = job._replace(after=None)
        await_sources(lane, job, stream)

    patch.setattr(GpuLane, "_await_sources", without)


def activations_are_not_recorded(patch: Patch) -> None:
    patch.setattr(GpuDriver, "record_stream", lambda driver, tensor, stream: None)


def the_host_does_not_wait_for_downloads(patch: Patch) -> None:
    settle = GpuTransfer.settle
    written: list[Any] = []  # held until streams have passed: what writes to memory that is gone ends the process

    def ends_early(transfer: GpuTransfer) -> None:
        transfer._await_go_on()
        if transfer._lane.direction == "d2h" and not transfer._has_ended:
            written.append(transfer.pairs)
            transfer.end()
        else:
            settle(transfer)

    patch.setattr(GpuTransfer, "settle", ends_early)


def transfers_hold_nothing(patch: Patch) -> None:
    issued = GpuTransfer.issued

    def lets_go(transfer: GpuTransfer, event: Any) -> None:
        issued(transfer, event)
        transfer.pairs = []

    patch.setattr(GpuTransfer, "issued", lets_go)


def freed_memory_is_not_held(patch: Patch) -> None:
    make = _Freed.__init__
    patch.setattr(_Freed, "__init__", lambda freed, tensors, *args: make(freed, [], *args))


def freed_memory_does_not_wait_for_compute(patch: Patch) -> None:
    class Reached:
        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            pass

    make = _Freed.__init__
    patch.setattr(_Freed, "__init__", lambda freed, tensors, event, after: make(freed, tensors, Reached(), after))


def freed_memory_does_not_wait_for_its_transfer(patch: Patch) -> None:
    free = GpuDevice.free
    patch.setattr(GpuDevice, "free", lambda device, tensors, after=None: free(device, tensors))


def destinations_belong_to_the_compute_stream(patch: Patch) -> None:
    def transfer(lane: GpuLane, *args: Any, **kwargs: Any) -> Any:
        with lane._driver.on(lane._compute):
            return make(lane, *args, **kwargs)

    make = GpuLane._transfer
    patch.setattr(GpuLane, "_transfer", transfer)


def what_is_offloaded_is_no_snapshot(patch: Patch) -> None:
    patch.setattr(Device, "snapshot", lambda device, tensor: tensor.detach())


def a_step_ends_before_compute(patch: Patch) -> None:
    patch.setattr(GpuDevice, "_await_compute", lambda device: None)


def a_step_ends_before_its_copies(patch: Patch) -> None:
    close = GpuLane.close

    def without(lane: GpuLane) -> None:
        with lane._work:
            lane._is_open = False
            thread, lane._thread = lane._thread, None
            lane._work.notify_all()
        if thread is not None:
            thread.join()
        for under_way in lane._under_way.values():
            under_way.clear()
        close(lane)

    patch.setattr(GpuLane, "close", without)


MUTATIONS = {
    "the compute stream does not wait for weights": readers_do_not_wait_for(is_bulk=True),
    "the compute stream does not wait for activations": readers_do_not_wait_for(is_bulk=False),
    "gradients go home before they are made": downloads_do_not_wait_for_compute(is_bulk=True),
    "activations go home before they are made": downloads_do_not_wait_for_compute(is_bulk=False),
    "uploads do not wait for downloads": uploads_do_not_wait_for_downloads,
    "activations are not recorded": activations_are_not_recorded,
    "the host does not wait for downloads": the_host_does_not_wait_for_downloads,
    "transfers hold nothing": transfers_hold_nothing,
    "freed memory is not held": freed_memory_is_not_held,
    "freed memory does not wait for compute": freed_memory_does_not_wait_for_compute,
    "freed memory does not wait for its transfer": freed_memory_does_not_wait_for_its_transfer,
    "destinations belong to the compute stream": destinations_belong_to_the_compute_stream,
    "what is offloaded is no snapshot": what_is_offloaded_is_no_snapshot,
    "a step ends before compute": a_step_ends_before_compute,
    "a step ends before its copies": a_step_ends_before_its_copies,
}


@pytest.mark.parametrize("mutate", MUTATIONS.values(), ids=MUTATIONS.keys())
def test_a_mutation_is_found_out(mutate: Callable[[Patch], None], monkeypatch: Patch) -> None:
    right()
    with monkeypatch.context() as patch:
        mutate(patch)
        found = problem()
    assert found is not None
