"""A complete project, by plain Lightning and here: the same sources, only arguments of the trainer differ.

It knows nothing of RoundPipe. Dropout is switched off for the comparison by an option of the project, because random
numbers that a step draws are not those of plain Lightning (docs/explanation/limits.md).
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml

from lightning_roundpipe import RoundPipeStrategy
from tests.projects.summarisation import main as summarisation
from tests.support.parity import KINDS, assert_alike
from tests.support.rows import compat

FOLDER = Path(__file__).parent / "summarisation"


@dataclass
class Outcome:
    """What a run left behind: the rows of the log, checkpoints and other files by name, the settings, the trainer."""

    log: list[dict[str, Any]]
    checkpoints: dict[str, Any]
    files: dict[str, str]
    settings: dict[str, Any]
    trainer: L.Trainer


def run(*trainer: str) -> L.Trainer:
    """By the command line, with the configuration file of the project and little data."""
    smaller = ["--data.limit=60", "--data.vocab_size=384", "--data.max_text_tokens=24", "--data.max_summary_tokens=6"]
    return summarisation.main(
        ["fit", "--config", str(FOLDER / "config.yaml"), "--model.dropout=0", *smaller, *trainer]
    ).trainer


def outcome_of(folder: Path, trainer: L.Trainer) -> Outcome:
    found = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    checkpoints = {name: torch.load(found.pop(name), weights_only=False) for name in [*found] if name.endswith("ckpt")}
    texts = {name: path.read_text() for name, path in found.items()}
    (log,) = (texts.pop(name) for name in [*texts] if name.endswith("metrics.csv"))
    (settings,) = (texts.pop(name) for name in [*texts] if name.endswith("config.yaml"))
    rows = [{k: float(v) if v else None for k, v in row.items()} for row in csv.DictReader(io.StringIO(log))]
    return Outcome(rows, checkpoints, texts, yaml.safe_load(settings), trainer)


# The loss is a mean over the tokens of all labels: see docs/explanation/exactness.md.
OPTIONS = {"": "lightning_roundpipe.RoundPipeStrategy", ".num_microbatches": "3", ".loss_weight": "label_tokens"}
RUNS: dict[str, Callable[[], L.Trainer]] = {
    "plain": run,
    "roundpipe": lambda: run("--trainer.devices=2", *(f"--trainer.strategy{k}={v}" for k, v in OPTIONS.items())),
}


@compat("Library", "transformers encoder-decoder models (generate in validation_step, warm-up schedule)")
@compat("LightningCLI", "link_arguments, after_fit")
def test_same_as_plain_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(L.pytorch.callbacks, "EMAWeightAveraging"):
        pytest.skip("the project needs Lightning 2.6: EMAWeightAveraging")
    monkeypatch.setattr("sys.argv", ["main.py"])
    torch.set_num_threads(1)
    outcomes = []
    for kind in KINDS:
        (tmp_path / kind).mkdir()
        monkeypatch.chdir(tmp_path / kind)
        outcomes.append(outcome_of(tmp_path / kind, RUNS[kind]()))
    plain, ours = outcomes
    for part in ("log", "checkpoints", "files"):
        assert_alike(getattr(ours, part), getattr(plain, part), of_largest=1e-5)
    strategy = ours.trainer.strategy
    assert isinstance(strategy, RoundPipeStrategy)
    assert len(strategy.pool) == 2
    assert strategy.last_step is not None
    assert strategy.last_step.num_microbatches > 1

    changed = {name for name, value in ours.settings["trainer"].items() if plain.settings["trainer"][name] != value}
    assert changed == {"devices", "strategy"}
    assert {**ours.settings, "trainer": None} == {**plain.settings, "trainer": None}

    # The project does what it is to show, or equal runs would prove less than they seem to.
    assert plain.trainer.current_epoch < plain.trainer.max_epochs, "nothing was stopped early"
    assert len({row["val_rouge_l"] for row in plain.log}) > 2
    assert len(plain.checkpoints) == 3  # the best two and the last one
    (report,) = (json.loads(text) for name, text in plain.files.items() if name.endswith("summaries.json"))
    assert len({entry["written"] for entry in report}) > 1


def test_the_sources_know_nothing_of_this_strategy() -> None:
    files = [path for path in FOLDER.iterdir() if path.suffix in (".py", ".yaml")]
    assert len(files) >= 5
    assert [path.name for path in files if "roundpipe" in path.read_text(encoding="utf-8").lower()] == []
