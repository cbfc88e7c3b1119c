"""Memory of devices: poisoned, used again in stream order, counted and limited."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

pytestmark = pytest.mark.accelerator

MIB = 1 << 20


def _bytes(num_bytes: int, device: str = "sim:1") -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_fresh_memory_is_nan(dtype: torch.dtype) -> None:
    assert torch.empty(100, device="sim:1", dtype=dtype).isnan().all().item()


def test_storage_that_grows_is_poison_where_it_grew() -> None:
    x = torch.ones(8, device="sim:0")
    storage = x.untyped_storage()
    storage.resize_(64)
    grown = torch.empty(0, device="sim:0").set_(storage).cpu()
    assert (grown[:8] == 1).all()
    assert grown[8:].isnan().all()
    storage.resize_(0)
    assert storage.nbytes() == 0


def test_memory_used_after_it_was_freed_is_poison_and_a_race(sim: ModuleType) -> None:
    side, x = sim.Stream("sim:0"), torch.ones(1000, device="sim:0")
    side.wait_stream(sim.current_stream(0))
    address = x.data_ptr()
    with sim.stream(side):
        with sim.held():
            y = x + 1
            del x
            with sim.stream(sim.default_stream(0)):
                again = torch.empty(1000, device="sim:0")
            sim.default_stream(0).synchronize()
        found = y.cpu()
    assert again.data_ptr() == address
    assert found.isnan().all()
    assert sim.stats()["races"] > 0


def test_recorded_memory_is_kept_until_the_stream_has_passed(sim: ModuleType) -> None:
    side, x = sim.Stream("sim:0"), torch.ones(1000, device="sim:0")
    side.wait_stream(sim.current_stream(0))
    address = x.data_ptr()
    with sim.stream(side), sim.held():
        y = x + 1
        x.record_stream(side)
        del x
        with sim.stream(sim.default_stream(0)):
            again = torch.empty(1000, device="sim:0")
    assert again.data_ptr() != address
    with sim.stream(side):
        assert (y.cpu() == 2).all()
    assert sim.stats()["races"] == 0


def test_free_that_a_later_wait_orders_is_no_race_unless_frees_are_eager(sim: ModuleType) -> None:
    for eager, num_races in ((0, 0), (1, 1)):
        with sim.options(eager_free=eager):
            side, x = sim.Stream("sim:0"), torch.ones(1000, device="sim:0")
            side.wait_stream(sim.current_stream(0))
            with sim.stream(side):
                _ = x + 1
            sim.reset_stats()
            del x
            sim.current_stream(0).wait_stream(side)
            torch.empty(1000, device="sim:0")
            assert sim.stats()["races"] == num_races
            sim.synchronize(0)


def test_memory_is_counted_as_allocated_and_as_peak(sim: ModuleType) -> None:
    before = sim.memory_allocated(1)
    sim.reset_peak_memory_stats(1)
    x = _bytes(MIB)
    assert sim.memory_allocated(1) == torch.accelerator.memory_allocated(1) == before + MIB
    assert sim.memory_reserved(1) >= MIB
    del x
    assert sim.memory_allocated(1) == before
    assert sim.max_memory_allocated(1) == before + MIB
    sim.empty_cache()
    assert sim.mem_get_info(1)[0] == sim.mem_get_info(1)[1] - sim.memory_reserved(1)


def test_memory_over_the_limit_raises_and_what_is_cached_is_given_up(sim: ModuleType) -> None:
    sim.set_memory_limit(sim.memory_allocated(1) + 2 * MIB, 1)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
            _bytes(3 * MIB)
        for size in (2 * MIB, MIB, 3 * MIB // 2, 2 * MIB):
            _bytes(size)
    finally:
        sim.set_per_process_memory_fraction(1.0, 1)
    counts = sim.stats()
    assert counts["ooms"] == 1
    assert counts["cache_flushes"] > 0
    assert sim.get_per_process_memory_fraction(1) == 1.0


def test_memory_held_back_by_a_stream_is_waited_for_at_the_limit(sim: ModuleType) -> None:
    side = sim.Stream("sim:0")
    sim.set_memory_limit(sim.memory_allocated(0) + 2 * MIB, 0)
    try:
        x = _bytes(2 * MIB, "sim:0")
        x.record_stream(side)
        with sim.stream(side):
            sim._sleep(1000)
        del x
        assert _bytes(2 * MIB, "sim:0").numel() == 2 * MIB
    finally:
        sim.set_per_process_memory_fraction(1.0, 0)
    assert sim.stats()["ooms"] == 0
