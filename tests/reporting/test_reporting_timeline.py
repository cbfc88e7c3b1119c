"""Recording training steps: the option of the strategy, the callback, what they write, and what they log."""

from __future__ import annotations

import csv
import errno
import json
import os
import pickle
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_roundpipe import RoundPipeStrategy, RoundPipeTimeline
from lightning_roundpipe.engine.runner import StepResult
from lightning_roundpipe.planning import (
    Action,
    CallCost,
    CostProfile,
    Partition,
    Span,
    Stage,
    StageKind,
    Timeline,
    round_robin,
)
from lightning_roundpipe.reporting.tracing import TraceWriter, step_figures
from tests.support.parity import make_loader, make_trainer
from tests.support.small import Small

M = 3  # micro-batches of the trainers here
STEPS = 6
# Layers that all cost the same: plans that do not depend on how long they happen to take here.
CALLS = ("body.0.0", "body.1.0", "body.2.0", "body.3.0", "head")
EQUAL_COSTS = {"units": ["Linear"], "cost_profile": CostProfile(tuple(CallCost(name, 1, 2) for name in CALLS))}


@pytest.fixture
def loader() -> Any:
    """Six batches of eight rows."""
    return make_loader(rows=8 * STEPS)


def read(path: Path) -> tuple[Timeline, list[dict[str, Any]]]:
    """The timeline in a trace, and the marks of its steps."""
    document = json.loads(path.read_text(encoding="utf-8"))
    marks = [event for event in document["traceEvents"] if event.get("cat") == "roundpipe.mark"]
    return Timeline.from_chrome_trace(document), marks


def steps_in(path: Path) -> list[str]:
    return [mark["name"] for mark in read(path)[1]]


class Watch(L.Callback):
    """Notes for every batch whether a file is there, and whether the engine traces."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.exists: list[bool] = []
        self.traces: list[bool] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.exists.append(self.path.exists())


def watched(watch: Watch) -> Any:
    class Watched(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if len(watch.traces) == batch_idx:
                watch.traces.append(self.trainer.strategy.engine.trace)
            return super().training_step(batch, batch_idx)

    return Watched()


def test_what_a_trace_shows(loader: Any, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    callback = RoundPipeTimeline(path, first_step=1, num_steps=2)
    make_trainer(callbacks=[callback], options={"virtual_copies": True, **EQUAL_COSTS}).fit(Small(), loader)
    timeline, marks = read(path)
    assert timeline.num_devices == 2
    assert {"compute", "h2d", "d2h"} <= {span.kind for span in timeline.spans} <= {"compute", "h2d", "d2h", "wait"}
    assert all(span.label for span in timeline.spans)
    # Each micro-batch has passed each stage of its step once; the second step counts on.
    num_stages = [mark["args"]["num_stages"] for mark in marks]
    expected = {Action(stage, i + M * step) for step in (0, 1) for stage in range(num_stages[step]) for i in range(M)}
    actions = [action for device in range(2) for action in timeline.actions(device)]
    assert len(actions) == len(set(actions))
    assert set(actions) == expected
    assert set(timeline.stage_kinds) == expected
    # Everything that a step did lies within its mark, and the marks follow each other.
    bounds = [(mark["ts"] / 1e3, (mark["ts"] + mark["dur"]) / 1e3) for mark in marks]
    assert bounds[0][1] <= bounds[1][0]
    for span in timeline.spans:
        steps = [step for step, (start, end) in enumerate(bounds) if start <= span.start_ms and span.end_ms <= end]
        assert steps == ([span.microbatch_index // M] if span.microbatch_index >= 0 else steps[:1])
        assert steps
    for mark in marks:
        figures = mark["args"]
        assert figures["step_ms"] == pytest.approx(mark["dur"] / 1e3, abs=1e-5)
        assert figures["h2d_bytes"] > 0
        assert figures["num_microbatches"] == M
        assert figures["host_activation_bytes"] > 0
        assert figures["partition"].count("|") == figures["num_stages"] - 1 > 0


def test_steps_follow_each_other_with_their_waits(tmp_path: Path) -> None:
    """Two steps of the same spans, the second one 100 ms later."""
    path = tmp_path / "trace.json"
    spans = (Span(0, "wait", 0, 2, 0, 1, "its turn on the device"), Span(0, "compute", 0, 2, 0, 0, "F a"))
    writer = TraceWriter(path, first_step=0, num_steps=2)
    for started_at in (7.0, 7.1):
        result = StepResult([], {}, lambda: Timeline(spans, 1), num_microbatches=2, step_ms=3.0)
        writer.note(result, started_at)
    timeline, marks = read(path)
    assert [(mark["ts"], mark["dur"]) for mark in marks] == [(0, 3000), (100_000, 3000)]
    assert set(timeline.spans) == {
        *spans,
        Span(0, "wait", 100, 102, 0, 3, "its turn on the device"),
        Span(0, "compute", 100, 102, 0, 2, "F a"),
    }
    names = [event["name"] for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") == "wait"]
    assert names == ["wait: its turn on the device"] * 2


def test_option_and_callback_together(loader: Any, tmp_path: Path) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    callback = RoundPipeTimeline(other, first_step=4, num_steps=1)
    watch = Watch(one)
    make_trainer(options={"trace": one}, callbacks=[watch, callback]).fit(watched(watch), loader)
    assert steps_in(one) == ["training step 2", "training step 3", "training step 4"]
    assert steps_in(other) == ["training step 4"]
    assert watch.traces == [step in (2, 3, 4) for step in range(STEPS)]
    assert watch.exists == [step >= 4 for step in range(STEPS)], "written as soon as it is complete, not before"


def test_recording_changes_no_result(loader: Any, tmp_path: Path) -> None:
    states = []
    for callbacks in ([], [RoundPipeTimeline(tmp_path / "t.json", first_step=0, num_steps=STEPS)]):
        module = Small(dropout=0.5)
        torch.manual_seed(1)
        make_trainer(callbacks=callbacks).fit(module, loader)
        states.append(module.state_dict())
    torch.testing.assert_close(states[0], states[1])


def test_written_when_training_is_interrupted(loader: Any, tmp_path: Path) -> None:
    """Errors end a training in the same way, as test_run_profile.py shows of costs."""

    class Fails(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 4:
                raise KeyboardInterrupt
            return super().training_step(batch, batch_idx)

    path = tmp_path / "trace.json"
    trainer = make_trainer(callbacks=[RoundPipeTimeline(path)])
    with pytest.raises(SystemExit):
        trainer.fit(Fails(), loader)
    assert steps_in(path) == ["training step 2", "training step 3"]
    assert trainer.strategy._recordings.writers == []


def test_too_short_a_fit_says_so(loader: Any, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trainer = make_trainer(options={"trace": path}, limit_train_batches=2)
    with pytest.warns(UserWarning, match=r"fit has run 2, and recording begins with step 2"):
        trainer.fit(Small(), loader)
    assert not path.exists()


def test_each_fit_is_recorded_anew(loader: Any, tmp_path: Path) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    trainer = make_trainer(options={"trace": one}, callbacks=[RoundPipeTimeline(other)])
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(Small(), loader)
        for path in (one, other):
            assert steps_in(path) == ["training step 2", "training step 3", "training step 4"]
            path.unlink()


def test_evaluation_records_nothing(loader: Any, tmp_path: Path) -> None:
    class Validates(Small):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            assert not self.trainer.strategy.engine.trace
            self.loss(batch)

    paths = tmp_path / "one.json", tmp_path / "other.json"
    few = {"limit_val_batches": 1, "val_check_interval": 1}
    trainer = make_trainer(options={"trace": paths[0]}, callbacks=[RoundPipeTimeline(paths[1])], **few)
    trainer.validate(Validates(), loader, verbose=False)
    assert not any(path.exists() for path in paths)
    trainer.fit(Validates(), loader, loader)
    for path in paths:
        assert steps_in(path) == ["training step 2", "training step 3", "training step 4"]


def test_a_full_disk_leaves_no_half_written_file(loader: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Path.write_text

    def write(path: Path, text: str, **kwargs: Any) -> int:
        original(path, text[:10], **kwargs)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", write)
    folder = tmp_path / "files"
    folder.mkdir()
    trainer = make_trainer(
        options={"trace": folder / "trace.json", "save_profile": folder / "costs.json"}, limit_train_batches=3
    )
    with pytest.warns(UserWarning, match="could not be written") as caught:
        trainer.fit(Small(), loader)
    for name, words in {"trace.json": "recorded training steps", "costs.json": "cost profile"}.items():
        expected = rf"the {words} could not be written: .*No space left on device: '.*{name}'"
        assert any(re.match(expected, str(warning.message)) for warning in caught), name
    assert not list(folder.iterdir())
    assert trainer.global_step == 3


def test_written_where_it_was_asked_for(loader: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths count from the folder in which they were given, also if training goes on in another one."""
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    options = {"trace": "one.json", "save_profile": "costs.json"}
    trainer = make_trainer(options=options, callbacks=[RoundPipeTimeline("two.json")])
    monkeypatch.chdir(tmp_path / "other")
    trainer.fit(Small(), loader)
    assert {path.name for path in tmp_path.glob("*.json")} == {"one.json", "two.json", "costs.json"}


def test_picture(loader: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "steps.svg"
    callback = RoundPipeTimeline(picture=path, num_steps=2)
    make_trainer(callbacks=[callback]).fit(Small(), loader)
    text = path.read_text(encoding="utf-8")
    for words in ("training step 2: ", "training step 3: ", "device 1 ", "forward + backward (fused) "):
        assert f"<!-- {words}" in text
    assert "training step 4" not in text


def test_picture_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install lightning-roundpipe\[plot\]"):
        RoundPipeTimeline(picture=tmp_path / "steps.png")


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({}, ValueError, "nothing to do: pass path, picture, log_metrics=True or summary=True"),
    ({"path": "missing/trace.json"}, ValueError, r"path='missing/trace.json': there is no folder 'missing'"),
    ({"path": "."}, ValueError, r"path='\.' is a folder"),
    ({"path": 3}, TypeError, "path=3: pass the path"),
    ({"path": ""}, TypeError, "path='': pass the path"),
    ({"path": "t.svg", "picture": "./t.svg"}, ValueError, r"path and picture are both '.*t\.svg'"),
    ({"picture": "steps.gif"}, ValueError, r"'steps.gif' has no suffix of a picture: use \.png, \.svg, \.pdf"),
    ({"path": "t.json", "first_step": -1}, ValueError, "first_step=-1: use an integer >= 0"),
    ({"path": "t.json", "num_steps": 0}, ValueError, "num_steps=0: use a positive integer"),
]


@pytest.mark.parametrize(("arguments", "kind", "message"), WRONG)
def test_wrong_arguments(arguments: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        RoundPipeTimeline(**arguments)


def test_other_strategies_are_rejected(loader: Any, tmp_path: Path) -> None:
    trainer = make_trainer("plain", callbacks=[RoundPipeTimeline(tmp_path / "t.json")])
    with pytest.raises(MisconfigurationException, match=r"strategy='roundpipe', .* SingleDeviceStrategy"):
        trainer.fit(Small(), loader)


def test_strategy_with_a_writer_is_pickled(tmp_path: Path) -> None:
    strategy = RoundPipeStrategy(2, trace=tmp_path / "t.json")
    assert pickle.loads(pickle.dumps(strategy)).options == strategy.options


# --- logging ---------------------------------------------------------------------------------------------------------


def table(trainer: L.Trainer) -> list[dict[str, str]]:
    (path,) = Path(trainer.logger.log_dir).glob("metrics.csv")
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def logging_module() -> Any:
    class Logs(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss)
            return loss

    return Logs


def test_logged_figures(logging_module: Any, loader: Any, tmp_path: Path) -> None:
    settings = {"logger": CSVLogger(tmp_path), "log_every_n_steps": 2, "options": {"virtual_copies": True}}
    trainer = make_trainer(callbacks=[RoundPipeTimeline(log_metrics=True)], **settings)
    trainer.fit(logging_module(), loader)
    rows = table(trainer)
    assert set(trainer.callback_metrics) == {"loss"}, "the metrics of the user are left alone"
    assert [row["step"] for row in rows if row["loss"]] == ["1", "3", "5"]
    ours = [row for row in rows if row["roundpipe/step_ms"]]
    assert [row["step"] for row in ours] == ["1", "3", "5"]
    for row in ours:
        figures = {name.removeprefix("roundpipe/"): float(row[name]) for name in row if name.startswith("roundpipe/")}
        names = {"bubble", "busy", "step_ms", "h2d_bytes", "d2h_bytes", "num_stages", "num_microbatches"}
        names.add("host_activation_bytes")
        assert set(figures) - {"peak_memory_bytes"} == names
        assert figures["bubble"] + figures["busy"] == pytest.approx(1)
        assert 0 < figures["busy"] < 1
        assert figures["step_ms"] > 0
        assert figures["num_microbatches"] == M
        # All weights go up, at least once, and all gradients come down.
        weights = sum(p.numel() * p.element_size() for p in trainer.model.parameters())
        assert figures["h2d_bytes"] >= weights
        assert figures["d2h_bytes"] >= weights
    assert float(ours[-1]["roundpipe/num_stages"]) == trainer.strategy.last_step.partition.num_stages


def test_figures_of_a_step() -> None:
    plan = Partition(
        2, (Stage(0, StageKind.FORWARD, 0, 1), Stage(1, StageKind.FUSED, 1, 2), Stage(2, StageKind.BACKWARD, 0, 1))
    )
    result = StepResult(
        [],
        {},
        lambda: Timeline((Span(0, "compute", 5, 6), Span(1, "compute", 5, 15)), 2),
        schedule=round_robin(3, 4, 2),
        partition=plan,
        num_microbatches=4,
        step_ms=12.5,
        bytes_up=(3, 40),
        bytes_down=(500, 0),
        saved_bytes=11,
        peak_memory_bytes=(None, 7, 9),
    )
    known = {"step_ms": 12.5, "h2d_bytes": 43, "d2h_bytes": 500, "num_microbatches": 4, "num_stages": 3}
    known["host_activation_bytes"] = 11
    shares = {"bubble": pytest.approx(0.45), "busy": pytest.approx(0.55)}
    assert step_figures(result) == {**known, **shares, "peak_memory_bytes": 9}
    # One that has only recorded, on devices that do not know their memory.
    assert step_figures(replace(result, schedule=None, peak_memory_bytes=(None, None))) == known


def test_logged_once_per_optimizer_step(logging_module: Any, loader: Any, tmp_path: Path) -> None:
    settings = {"logger": CSVLogger(tmp_path), "log_every_n_steps": 1, "accumulate_grad_batches": 3}
    trainer = make_trainer(callbacks=[RoundPipeTimeline(log_metrics=True)], **settings)
    trainer.fit(logging_module(), loader)
    assert [row["step"] for row in table(trainer) if row["roundpipe/bubble"]] == ["0", "1"]


def test_logging_needs_a_logger(loader: Any) -> None:
    class Predicts(Small):
        def predict_step(self, batch: Any) -> Any:
            return self(batch[0])

    trainer = make_trainer(callbacks=[RoundPipeTimeline(log_metrics=True)])
    with pytest.raises(MisconfigurationException, match="needs a logger"):
        trainer.fit(Small(), loader)
    assert len(trainer.predict(Predicts(), loader)) == STEPS, "only training logs"
