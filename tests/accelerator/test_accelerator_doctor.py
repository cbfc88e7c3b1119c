"""What ``roundpipe doctor`` finds out about simulated GPUs."""

from __future__ import annotations

import gc
from types import ModuleType

import pytest

from lightning_roundpipe.cli.machine_facts import collect, gpus, links, page_locking

pytestmark = pytest.mark.accelerator


def test_probes_of_gpus_know_all_of_them_and_leave_nothing(sim: ModuleType) -> None:
    gc.collect()
    before = sim.memory_allocated(0), sim.pinned_bytes()  # of tests before, which may let it go meanwhile
    facts, unknown = collect([gpus, links, page_locking])
    assert unknown == {}
    assert [gpu["device"] for gpu in facts["gpus"]] == [f"sim:{index}" for index in range(sim.device_count())]
    assert all(gpu["error"] is None for gpu in facts["gpus"])
    assert all(0 < gpu["free_bytes"] <= gpu["memory_bytes"] for gpu in facts["gpus"])
    for way in ("h2d_bytes_per_ms", "d2h_bytes_per_ms"):
        assert len(facts["links"][way]) == sim.device_count()
    assert facts["page_locking"]["tried_bytes"] > 0
    assert facts["page_locking"]["error"] == 0
    gc.collect()
    assert sim.memory_allocated(0) <= before[0]
    assert sim.pinned_bytes() <= before[1]


def test_a_gpu_that_cannot_compute_is_known_by_its_error(sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no kernel image is available\nfor this device")

    monkeypatch.setattr("torch.ones", fail)
    assert {gpu["error"] for gpu in gpus()} == {"RuntimeError: no kernel image is available"}
