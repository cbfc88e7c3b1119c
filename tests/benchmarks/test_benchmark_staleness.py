"""The benchmark of stale weights runs, in its smallest form, and draws what it found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import staleness

pytest.importorskip("matplotlib")


def test_losses_and_their_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "staleness.svg"
    monkeypatch.setattr("sys.argv", ["staleness", "--quick", "--picture", str(picture)])
    staleness.main()
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    (ways,) = found["results"]["by_learning_rate"].values()
    assert set(ways) == {"exact", "stale", "stale after warm-up"}
    curves = [way["training_loss"] for way in ways.values()]
    assert [len(curve) for curve in curves] == [4, 4, 4]
    assert curves[0] != curves[1] != curves[2]  # three different trainings
    assert picture.read_text(encoding="utf-8").lstrip().startswith("<?xml")
