"""How many intra-op threads the threads of a run get."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest
import torch

from lightning_roundpipe.devices import gpu_driver
from lightning_roundpipe.devices.gpu_lanes import GpuTransfer
from lightning_roundpipe.integration.pool import ThreadBudget
from lightning_roundpipe.weights.gradients import GradientStore
from tests.support.engine.gpu_stub import StubDriver


class Pool:
    """As far as the number of threads asks for it."""

    def __init__(self, num_devices: int, is_virtual: bool) -> None:
        self._num_devices = num_devices
        self.is_virtual = is_virtual

    def __len__(self) -> int:
        return self._num_devices


@pytest.mark.parametrize(
    ("cores", "num_devices", "is_virtual", "microbatch", "beside"),
    [
        (1, 1, True, 1, 1),
        (2, 2, True, 1, 1),
        (16, 3, True, 5, 4),
        (1, 1, False, 1, 1),
        (2, 8, False, 1, 1),
        (16, 1, False, 1, 15),
        (16, 8, False, 1, 8),
        (64, 8, False, 1, 56),
    ],
)
def test_what_runs_beside_the_devices_leaves_cores_to_them(
    monkeypatch: pytest.MonkeyPatch, cores: int, num_devices: int, is_virtual: bool, microbatch: int, beside: int
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
    pool = cast(Any, Pool(num_devices, is_virtual))
    assert ThreadBudget.of(pool) == ThreadBudget(microbatch, updates=beside, additions=beside)
    assert ThreadBudget.of(pool, 3) == ThreadBudget(3, updates=beside, additions=beside)


def test_micro_batches_on_gpus_have_one_thread_each_and_additions_the_rest(
    small: Any, make_trainer: Any, make_loader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = StubDriver()
    monkeypatch.setattr(gpu_driver, "driver_of", lambda device_type: driver)
    computing, adding = set(), set()
    take_in = GradientStore._take_in

    def noted(store: GradientStore, source: Any, part: Any) -> None:
        if isinstance(part[1], GpuTransfer):
            adding.add((threading.current_thread().name, torch.get_num_threads()))
        take_in(store, source, part)

    monkeypatch.setattr(GradientStore, "_take_in", noted)

    class Model(small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            computing.add(torch.get_num_threads())
            return super().training_step(batch, batch_idx)

    torch.set_num_threads(4)
    trainer = make_trainer(options={"optimizer_overlap": "off"}, num_microbatches=8)
    trainer.strategy.parallel_devices = [torch.device("cuda", 0)]
    trainer.fit(Model(), make_loader(40, 5))
    assert computing == {1}
    assert adding == {("roundpipe-accumulation", 3)}
    assert torch.get_num_threads() == 4
    assert not any(thread.name == "roundpipe-accumulation" for thread in threading.enumerate())
