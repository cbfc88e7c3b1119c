"""Memory of devices and host: the options, what the planner is told, what the user is told, and what fits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from lightning_roundpipe import VirtualLink
from lightning_roundpipe.engine.virtual import TimedLink
from lightning_roundpipe.host_report import HostReport
from lightning_roundpipe.options import RoundPipeOptions
from lightning_roundpipe.planning import CallCost, CostProfile, Machine, Partition, Stage, StageKind
from lightning_roundpipe.workers import machine_of, make_pool

HOST = torch.device("cpu")
GIB = 2**30


@pytest.mark.parametrize(
    ("limit", "num_bytes"), [(None, None), (4 * GIB, 4 * GIB), ("24GiB", 24 * GIB), ("8 GB", 8 * 10**9)]
)
def test_a_memory_limit_is_bytes_or_a_size(limit: Any, num_bytes: int | None) -> None:
    options = RoundPipeOptions(device_memory_limit=limit, virtual_copies=True)
    assert options.device_memory_bytes == num_bytes
    pool = make_pool([HOST, HOST], options)
    assert [device.memory.limit for device in pool.devices] == [num_bytes] * 2
    assert machine_of(pool, options) == Machine(2, num_bytes)


def test_a_limit_without_copies_is_said_to_have_no_effect() -> None:
    options = RoundPipeOptions(device_memory_limit="1GiB")
    with pytest.warns(UserWarning, match=r"device_memory_limit='1GiB' has no effect.*virtual_copies=True"):
        pool = make_pool([HOST], options)
    assert pool.memory_limit is None


def test_a_virtual_link_is_that_of_devices_and_planner() -> None:
    options = RoundPipeOptions(virtual_copies=VirtualLink(gb_per_s=2.0, latency_us=500.0))
    pool = make_pool([HOST, HOST], options)
    # 2 MB at 2 GB/s, after half a millisecond.
    expected = Machine(2, None, h2d_bytes_per_ms=2e6, d2h_bytes_per_ms=2e6, transfer_latency_ms=0.5)
    assert machine_of(pool, options) == expected
    assert not pool[0].aliases_host


@pytest.mark.parametrize(("copies", "aliases"), [(False, True), (True, False)])
def test_without_numbers_links_are_fast(copies: bool, aliases: bool) -> None:
    options = RoundPipeOptions(virtual_copies=copies)
    pool = make_pool([HOST], options)
    assert pool[0].aliases_host is aliases
    assert machine_of(pool, options) == Machine(1)


def test_the_defaults_of_a_link_are_a_gpu_s() -> None:
    link = VirtualLink()
    assert TimedLink(link.bytes_per_ms, link.latency_ms).duration_ms(25_000_000) == pytest.approx(1.01)
    assert VirtualLink(gb_per_s=math.inf).bytes_per_ms == math.inf


@pytest.mark.parametrize(
    ("field", "value"),
    [("gb_per_s", 0.0), ("gb_per_s", -1), ("gb_per_s", math.nan), ("gb_per_s", "25"), ("gb_per_s", True),
     ("latency_us", -0.1), ("latency_us", math.inf), ("latency_us", math.nan), ("latency_us", None)],
)  # fmt: skip
def test_impossible_links_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"VirtualLink\({field}={value!r}\): pass a number"):
        VirtualLink(**{field: value})


COSTS = CostProfile(tuple(CallCost(f"call {i}", 1.0, 2.0, input_bytes=1000) for i in range(2)))
STAGES = Partition(
    2, (Stage(0, StageKind.FORWARD, 0, 1), Stage(1, StageKind.FUSED, 1, 2), Stage(2, StageKind.BACKWARD, 0, 1))
)


class Free:
    """A host with so much memory left."""

    def __init__(self, num_bytes: int | None) -> None:
        self.num_bytes = num_bytes

    def __call__(self) -> int | None:
        return self.num_bytes


def make_report(free: Free) -> HostReport:
    """Weights of 440 bytes, which are there already, gradients and AdamW state of 1320, which are not."""
    model = nn.Linear(10, 10)
    return HostReport(model, [torch.optim.AdamW(model.parameters())], free)


def test_the_host_is_checked_before_it_is_filled(recwarn: pytest.WarningsRecorder) -> None:
    make_report(Free(1320)).check()
    make_report(Free(None)).check()
    assert not recwarn
    with pytest.warns(UserWarning, match=r"may need 1\.72 KiB \(optimizer state 880 B, weights 440 B, gradients 440 B"):
        make_report(Free(1319)).check()


def test_the_host_is_checked_again_when_activations_are_known(recwarn: pytest.WarningsRecorder) -> None:
    report = make_report(Free(1320 + 5 * 2000))
    report.check()
    report.note_plan(STAGES, COSTS, 5)
    assert not recwarn
    with pytest.warns(UserWarning, match="activations 11.7 KiB.* still to be allocated, and 11.1 KiB are available"):
        report.note_plan(STAGES, COSTS, 6)
    before = len(recwarn)
    report.note_plan(STAGES, COSTS, 7)  # once is enough
    assert len(recwarn) == before


def test_what_the_host_needs_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    report = make_report(Free(0))
    with caplog.at_level("INFO"):
        report.note_step(working_copies=220)
        report.note_step(working_copies=220)
    (message,) = [record.message for record in caplog.records if "on the host" in record.message]
    assert message == (
        "this run needs up to 1.93 KiB (optimizer state 880 B, weights 440 B, gradients 440 B, working copies 220 B) "
        "on the host"
    )
