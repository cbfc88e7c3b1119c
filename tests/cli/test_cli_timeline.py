"""``roundpipe timeline``: figures of a trace against those of the timeline it was written from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_roundpipe.cli import main
from lightning_roundpipe.planning import Span, Timeline
from lightning_roundpipe.planning.spans import Mark
from tests.cli.conftest import RunFailing, RunJson

TIMELINE = Timeline(
    (
        Span(0, "compute", 10, 30, 0, 0, "F embed"),
        Span(0, "compute", 40, 60, 0, 1, "F embed"),
        Span(1, "compute", 30, 70, 1, 0, "fused head"),
        Span(1, "compute", 110, 150, 1, 1, "fused head"),
        Span(0, "h2d", 10, 14, 0, -1, "weights embed"),
        Span(1, "d2h", 70, 71, 1, -1, "gradients head"),
        Span(1, "wait", 12, 30, 1, 0, "its turn on the device"),
        Span(1, "wait", 60, 110, 1, 1, "its turn on the device"),
        Span(0, "wait", 30, 40, -1, 1, "the user-code lock"),
        Span(0, "wait", 30, 31, 0, 1),
    ),
    num_devices=3,
)
FIGURES = {
    "bubble": 0.25,
    "h2d_bytes": 3 * 2**30,
    "d2h_bytes": 5 * 2**20,
    "num_stages": 2,
    "replanned": True,
    "partition": "F 0 | fused 1 | B 0",
}
MARKS = (Mark("training step 2", 8, 75, FIGURES), Mark("training step 3", 100, 155, {"replanned": False}))


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return write(TIMELINE.to_chrome_trace(MARKS), tmp_path)


def write(document: Any, folder: Path) -> str:
    path = folder / "trace.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return str(path)


def test_figures_are_those_of_the_timeline(trace: str, run_json: RunJson) -> None:
    document = run_json("timeline", trace)
    assert document["makespan_ms"] == pytest.approx(140)
    assert document["bubble_ratio"] == pytest.approx(TIMELINE.bubble_ratio)
    assert document["bubble_parts"] == pytest.approx(TIMELINE.bubble_parts)
    assert [device["busy_ms"] for device in document["devices"]] == pytest.approx([40, 80, 0])
    assert [device["busy_fraction"] for device in document["devices"]] == pytest.approx([40 / 140, 80 / 140, 0])
    assert [device["fill_ms"] for device in document["devices"]] == pytest.approx([0, 20, 0])
    assert [device["drain_ms"] for device in document["devices"]] == pytest.approx([90, 0, 0])
    assert [device["h2d_ms"] for device in document["devices"]] == pytest.approx([4, 0, 0])
    assert [device["d2h_ms"] for device in document["devices"]] == pytest.approx([0, 1, 0])


def test_waits_are_added_up_by_reason(trace: str, run_json: RunJson) -> None:
    document = run_json("timeline", trace)
    turn = "its turn on the device"
    assert list(document["waits_by_reason"]) == [turn, "the user-code lock", "unknown"]
    assert document["waits_by_reason"][turn] == {
        "count": 2,
        "total_ms": pytest.approx(68),
        "longest_ms": pytest.approx(50),
    }
    assert document["waits_by_reason"]["unknown"] == {
        "count": 1,
        "total_ms": pytest.approx(1),
        "longest_ms": pytest.approx(1),
    }


def test_steps_are_listed_with_their_figures(trace: str, run_json: RunJson, capsys: pytest.CaptureFixture[str]) -> None:
    document = run_json("timeline", trace)
    assert [step["name"] for step in document["steps"]] == ["training step 2", "training step 3"]
    assert [step["step_ms"] for step in document["steps"]] == pytest.approx([67, 55])
    assert [step["bubble_ratio"] for step in document["steps"]] == [0.25, None]
    assert main(["timeline", trace]) == 0
    text = capsys.readouterr().out
    assert "140 ms on 3 devices, bubble 71.4%" in text
    assert "training step 2  67.0 ms   25.0%" in text
    assert "training step 3  55.0 ms       -" in text


def test_a_trace_without_waits_and_steps_has_no_tables_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    computing = Timeline(tuple(span for span in TIMELINE.spans if span.kind == "compute"), 3)
    assert main(["timeline", write(computing.to_chrome_trace(), tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "Devices" in text
    assert "waits" not in text.lower()
    assert "Steps" not in text


def test_a_picture_is_drawn(trace: str, tmp_path: Path) -> None:
    assert main(["timeline", trace, "--png", str(tmp_path / "p.png")]) == 0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"{", "is not JSON"),
        (b'{"traceEvents": []}', "does not say that it shows a RoundPipe timeline"),
        (b"\x1f\x8b\xff", "is not text: is it compressed, or another file?"),
        (None, "cannot read the trace "),
        (None, " (No such file or directory): check the path."),
    ],
)
def test_traces_that_are_refused(content: bytes | None, expected: str, tmp_path: Path, run_failing: RunFailing) -> None:
    path = tmp_path / "trace.json"
    if content is not None:
        path.write_bytes(content)
    message = run_failing("timeline", str(path))
    assert expected in message
    assert str(path) in message
    assert message.count("\n") == 1


@pytest.mark.parametrize(
    "change",
    [
        {"dur": None},
        {"args": None},
        {"args": {"bubble": "large"}},
    ],
    ids=str,
)
def test_steps_that_are_refused(change: dict[str, Any], tmp_path: Path, run_failing: RunFailing) -> None:
    document = TIMELINE.to_chrome_trace(MARKS)
    next(event for event in document["traceEvents"] if event.get("cat") == "roundpipe.mark").update(change)
    message = run_failing("timeline", write(document, tmp_path))
    assert "is not as RoundPipeStrategy(trace=...) writes it" in message
