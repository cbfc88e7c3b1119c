"""What a run says of its links, and where it measures none; what it plans with them."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from lightning_roundpipe import VirtualLink
from lightning_roundpipe.integration import links
from lightning_roundpipe.integration import pool as pool_module
from lightning_roundpipe.integration.links import Links, describe
from lightning_roundpipe.options import RoundPipeOptions
from lightning_roundpipe.planning.costs import CallCost, CostProfile, DeviceTraits, Machine, SharedLink
from tests.support.engine.lazy_link import cpu_pool
from tests.support.parity import make_loader, make_trainer
from tests.support.small import Small

measure = Links.measure
GB_PER_S = 1e6  # bytes per ms


@pytest.mark.parametrize("copies", [False, VirtualLink(1000.0)])
def test_links_of_virtual_devices_are_not_measured(
    copies: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Links, "measure", measure)
    with caplog.at_level("INFO"):
        trainer = make_trainer(options={"virtual_copies": copies})
        trainer.fit(Small(), make_loader())
    assert "links:" not in caplog.text
    assert trainer.strategy._links.of(trainer.strategy.pool) is None


def test_additions_on_the_host_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three buffers of 64 MiB pass in a second, if the clock says so."""
    monkeypatch.setattr(links, "repeat", lambda add, number, repeat: [1.0] * repeat)
    assert links.added_bytes_per_ms(1) == pytest.approx(3 * 64 * 2**20 / 1e3)


def test_the_log_says_what_all_devices_have_in_common() -> None:
    machine = Machine(
        2,
        h2d_bytes_per_ms=25 * GB_PER_S,
        d2h_bytes_per_ms=26 * GB_PER_S,
        transfer_latency_ms=0.0123,
        host_bytes_per_ms=180 * GB_PER_S,
    )
    assert describe(machine) == (
        "links: 25.0 GB/s to and 26.0 GB/s from every device; latency 12.3 us, memory of the host 180 GB/s"
    )


def test_the_log_says_what_differs_and_what_is_shared() -> None:
    own = [DeviceTraits(1.0, None, up * GB_PER_S, 26 * GB_PER_S) for up in (25, 6, 25)]
    shared = (SharedLink((0, 2), 26 * GB_PER_S),)
    machine = Machine(3, None, 25 * GB_PER_S, 26 * GB_PER_S, 0.01, 180 * GB_PER_S, devices=own, shared_links=shared)
    assert describe(machine) == (
        "links: 25.0 GB/s to and 26.0 GB/s from devices 0, 2, 6.00 GB/s to and 26.0 GB/s from device 1; "
        "latency 10.0 us, memory of the host 180 GB/s\n"
        "devices that share a link: 0, 2 (26.0 GB/s)"
    )


@pytest.mark.parametrize("training", [True, False])
def test_plans_split_a_stage_over_devices_where_that_is_faster(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "Engine", lambda root, pool, planner, **options: planner)
    planner: Any = pool_module.make_engine(nn.Linear(1, 1), cpu_pool(3), RoundPipeOptions(), None, None)
    profile = CostProfile(tuple(CallCost(name, ms, 2 * ms) for name, ms in (("a", 1.0), ("b", 6.0), ("c", 1.0))))
    assert max(planner(profile, Machine(3), 3, training).splits) > 1
