"""Operators and backwards on several devices, streams and threads.

That they compute what the host does is for the parity tests to say, which run on this accelerator.
"""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.accelerator


def test_operator_on_tensors_of_two_devices_is_refused() -> None:
    for other in ("sim:1", "cpu"):
        with pytest.raises(RuntimeError, match=f"same device, but found at least two devices, sim:0 and {other}"):
            torch.ones(3, device="sim:0") + torch.ones(3, device=other)


def test_backward_runs_on_a_thread_for_each_device() -> None:
    threads: dict[int, set[int]] = {0: set(), 1: set()}
    for index, seen in threads.items():
        x = torch.ones(3, device=f"sim:{index}", requires_grad=True)
        y = x * 2
        y.register_hook(lambda _, seen=seen: seen.add(threading.get_ident()))
        y.sum().backward()
    found = threads[0] | threads[1]
    assert len(found) == 2
    assert threading.get_ident() not in found


def test_backward_runs_on_the_stream_of_the_forward(sim: ModuleType) -> None:
    stream, seen = sim.Stream("sim:0"), []
    x = torch.ones(3, device="sim:0", requires_grad=True)
    stream.wait_stream(sim.current_stream(0))
    with sim.stream(stream):
        y = x * 2
        y.register_hook(lambda _: seen.append(sim.current_stream(0)))
        loss = y.sum()
    sim.current_stream(0).wait_stream(stream)
    loss.backward()
    assert seen == [stream]


def test_many_threads_on_streams_of_their_own_do_not_race(sim: ModuleType) -> None:
    results: list[Any] = []

    def work(index: int) -> None:
        try:
            device = f"sim:{index % 2}"
            with sim.stream(sim.Stream(device)):
                weight = torch.eye(64, device=device, requires_grad=True)
                for _ in range(10):
                    x = torch.ones(8, 64).pin_memory().to(device, non_blocking=True)
                    (x @ weight).sum().backward()
                assert weight.grad is not None
                results.append(weight.grad.cpu()[0, 0].item())
        except Exception as error:
            results.append(repr(error))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [80.0] * 8
    assert sim.stats()["races"] == 0
