"""``DeviceStatsMonitor`` shows the pool, with every accelerator that the strategy can meet."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning.pytorch.accelerators.cpu
import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.pytorch.callbacks import DeviceStatsMonitor, device_stats_monitor
from lightning.pytorch.loggers import CSVLogger

from lightning_roundpipe import RoundPipeStrategy
from tests.support.parity import make_loader, make_trainer
from tests.support.small import Small

NAMES = ("unit_runs", "h2d_bytes", "d2h_bytes")
PEAKS = tuple(f"peak_{kind}_bytes" for kind in ("weights", "gradients", "activations"))


def fit(module: Any, loader: Any, tmp_path: Path, **kwargs: Any) -> list[dict[str, str]]:
    """Trains with the monitor, and returns what the logger has got at the ends of batches."""
    trainer = make_trainer(logger=CSVLogger(tmp_path), log_every_n_steps=1, options={"virtual_copies": True}, **kwargs)
    trainer.fit(module, loader)
    assert "get_device_stats" not in vars(trainer.accelerator), "the accelerator is as it was"
    with (Path(trainer.logger.log_dir) / "metrics.csv").open(encoding="utf-8") as file:
        prefix = "DeviceStatsMonitor.on_train_batch_end/"
        rows = [
            {k.removeprefix(prefix): v for k, v in row.items() if k.startswith(prefix)} for row in csv.DictReader(file)
        ]
    return [row for row in rows if any(row.values())]


def test_figures_of_the_pool(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU: the accelerator roundpipe would take it")
    pytest.importorskip("psutil")
    callbacks = [DeviceStatsMonitor()]
    rows = fit(Small(), make_loader(), tmp_path, accelerator="roundpipe", callbacks=callbacks)
    assert len(rows) == 3
    for name in NAMES:
        for device in (0, 1):
            values = [float(row[f"device{device}.{name}"]) for row in rows]
            assert 0 <= values[0] <= values[1] <= values[2], "counters only grow"
            assert values[2] > 0
    assert all(0 <= float(row["cpu_percent"]) <= 100 for row in rows)


def test_without_psutil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's monitor asks for psutil unless it is told to show the host's figures."""
    monkeypatch.setattr(lightning.pytorch.accelerators.cpu, "_PSUTIL_AVAILABLE", False)
    callbacks = [DeviceStatsMonitor(cpu_stats=True)]
    rows = fit(Small(), make_loader(), tmp_path, callbacks=callbacks)
    assert {f"device{device}.{name}" for device in (0, 1) for name in NAMES + PEAKS} == set(rows[-1])


def test_with_an_accelerator_that_knows_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """``accelerator="cuda"`` is asked about the host, where the strategy has its root, and cannot answer."""
    accelerator = CUDAAccelerator()
    strategy = RoundPipeStrategy(2, accelerator=accelerator)
    strategy.parallel_devices = [torch.device("cpu")] * 2
    strategy.setup_environment()
    assert "device1.unit_runs" in accelerator.get_device_stats(strategy.root_device)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"asked": device})
    gpu = torch.device("cuda", 0)
    assert accelerator.get_device_stats(gpu) == {"asked": gpu}, "about a GPU it answers as ever"


def test_the_accelerator_outlives_the_strategy() -> None:
    """An accelerator object of the user's own shows the pool during a run only."""
    pytest.importorskip("psutil")
    accelerator = CPUAccelerator()
    seen: list[dict[str, Any]] = []

    class Asks(Small):
        def on_train_batch_end(self, *args: Any) -> None:
            seen.append(self.trainer.accelerator.get_device_stats("cpu"))

    make_trainer(accelerator=accelerator).fit(Asks(), make_loader())
    assert all("device0.unit_runs" in figures for figures in seen)
    assert len(seen) == 3
    assert not any("device" in name for name in accelerator.get_device_stats("cpu"))


@pytest.mark.parametrize("cpu_stats", [None, True, False])
def test_the_host_is_asked_as_plain_lightning_asks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpu_stats: bool | None
) -> None:
    """As often, and by the function that users may have replaced."""
    asked: list[str] = []
    logged: dict[str, set[str]] = {"plain": set(), "roundpipe": set()}

    class Logger(CSVLogger):
        def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
            names = (name.split("/")[-1] for name in metrics)
            logged[asked_by].update(name for name in names if not name.startswith("device"))

    def figures() -> dict[str, float]:
        asked.append(asked_by)
        return {"cpu_percent": 5.0}

    monkeypatch.setattr(lightning.pytorch.accelerators.cpu, "get_cpu_stats", figures)
    monkeypatch.setattr(device_stats_monitor, "_PSUTIL_AVAILABLE", True)
    for asked_by in ("plain", "roundpipe"):
        callbacks = [DeviceStatsMonitor(cpu_stats=cpu_stats)]
        trainer = make_trainer(asked_by, logger=Logger(tmp_path), log_every_n_steps=1, callbacks=callbacks)
        trainer.fit(Small(), make_loader())
    assert asked.count("plain") == (0 if cpu_stats is False else 6)
    assert asked.count("roundpipe") == asked.count("plain")
    assert logged["roundpipe"] == logged["plain"]
