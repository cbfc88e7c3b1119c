"""The benchmark of the optimizer at its smallest size: all that it says is there, and adds up."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks import optimizer
from lightning_roundpipe.integration import overlap


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread, updates that overlap however small they are; what the benchmark silences is put back."""
    monkeypatch.setattr(overlap, "MIN_BYTES", 0)
    torch.set_num_threads(1)
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    with warnings.catch_warnings():
        yield
    logger.setLevel(level)


def test_the_quick_run_reports_every_mode(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["optimizer", "--quick", "--width", "8", "--forward-ms", "0.5"])
    optimizer.main()
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert report["parameters"]["weights"] == 3 * 8**2
    (row,) = report["results"]["steps"]
    assert set(row["step_ms"]) == set(optimizer.MODES)
    # 4 micro-batches of 3 layers of 0.5 ms forward and 1 ms backward on 2 devices
    assert all(found["median"] >= 9 for found in row["step_ms"].values())
    assert set(row["hidden"]) == {"exact", "stale"}
    assert row["ideal_ms"] >= row["step_ms"]["none"]["median"]
    rates = report["results"]["bandwidth"]["behind"]["gb_per_s"]
    assert set(rates) > {"copy", "triad", "plain", "loop"}
    assert all(rate["median"] > 0 for rate in rates.values())


@pytest.mark.filterwarnings("ignore:optimizer_overlap=.stale.")
def test_modes_differ_in_when_they_update(monkeypatch: pytest.MonkeyPatch) -> None:
    size = {**optimizer.SIZES["quick"], "width": 8}
    overlapping = []
    start = optimizer.Updates.start

    def noting(self: optimizer.Updates, *args: Any) -> None:
        overlapping.append(mode)
        start(self, *args)

    monkeypatch.setattr(optimizer.Updates, "start", noting)
    for mode in optimizer.MODES:
        measured = optimizer.train(size, 1.0, mode, 2)
        assert len(measured.steps_ms) == 2
        assert len(measured.updates_ms) == (3 if mode == "off" else 0)
    assert overlapping == [mode for mode in ("exact", "stale") for _ in range(optimizer.SKIPPED + 3)]


def test_an_update_is_seen_as_long_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: optimizer.time.sleep(0.05))
    measured = optimizer.train({**optimizer.SIZES["quick"], "width": 8}, 1.0, "off", 1)
    assert all(update >= 50 for update in measured.updates_ms)
    assert measured.step_ms >= 50
