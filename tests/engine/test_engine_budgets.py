"""Steps on devices whose memory is short: less is fetched ahead, then it fails; what comes out is the same."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_roundpipe.devices.memory import DeviceOutOfMemoryError
from lightning_roundpipe.devices.pool import DevicePool
from lightning_roundpipe.devices.virtual import Link, TimedLink
from lightning_roundpipe.engine.runner import Engine
from tests.support.lazy_link import LazyLink
from tests.support.random_graphs import (
    WIDTH,
    Cell,
    Graph,
    Instruction,
    names,
    plain_gradients,
    planner,
    programs,
    run,
    some_units,
)


def make_engine(graph: nn.Module, seed: int, devices: int, link: Link, limit: int | None) -> tuple[Engine, DevicePool]:
    pool = DevicePool([torch.device("cpu")] * devices, link=link, memory_limit=limit)
    return Engine(graph, pool, planner(seed), round_size=2, unit_classes=[Cell], num_threads=1), pool


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    program=programs,
    frozen=some_units,
    devices=st.integers(1, 3),
    num_microbatches=st.integers(1, 4),
    share=st.floats(0.3, 1.0),
    lazy=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_a_limit_is_kept_and_changes_no_result(
    program: list[Instruction],
    frozen: frozenset[int],
    devices: int,
    num_microbatches: int,
    share: float,
    lazy: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    graph = Graph(program, frozen, dropout=0.0).double()
    rows = torch.randn(5, WIDTH, dtype=torch.float64)
    expected = plain_gradients(graph, rows, num_microbatches)
    free, pool = make_engine(graph, seed, devices, LazyLink(), None)
    for step in range(3):
        run(free, graph, rows, num_microbatches, seed=step)
    limit = int(share * max(device.memory.peak for device in pool.devices))
    engine, pool = make_engine(graph, seed, devices, LazyLink() if lazy else TimedLink(), limit)
    for step in range(3):
        try:
            result = run(engine, graph, rows, num_microbatches, seed=step)
        except DeviceOutOfMemoryError:
            assert share < 1.0
            continue
        finally:
            assert all(device.memory.peak <= limit for device in pool.devices)
            assert all(
                device.memory.peaks.keys() == {"weights", "gradients", "activations", "other"}
                for device in pool.devices
            )
        assert names(graph, result.gradients) == names(graph, expected)
        for parameter, gradient in expected.items():
            torch.testing.assert_close(result.gradients[parameter], gradient, rtol=1e-9, atol=1e-12)
    engine.close()
    assert [device.memory.used for device in pool.devices] == [0] * devices
