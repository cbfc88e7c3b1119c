"""Timeline: figures and pictures from spans."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_roundpipe.planning import Action, Span, Timeline

TIMELINE = Timeline(
    (
        Span(1, "compute", 14.0, 20.0, 1, 0, "block.1"),
        Span(0, "compute", 10.0, 14.0, 0, 0),
        Span(0, "compute", 14.0, 18.0, 0, 1),
        Span(0, "h2d", 10.0, 11.0, 2),
        Span(0, "wait", 18.0, 20.0),
    ),
    2,
)


def test_figures() -> None:
    assert TIMELINE.start_ms == 10
    assert TIMELINE.makespan_ms == 10
    assert TIMELINE.busy_ms(0) == 8
    assert TIMELINE.busy_ms(1) == 6
    assert TIMELINE.busy_fraction == pytest.approx(0.7)
    assert TIMELINE.bubble_ratio == pytest.approx(0.3)


def test_empty_and_instant_timelines_have_no_bubble() -> None:
    for timeline in (Timeline((), 3), Timeline((Span(0, "compute", 5, 5, 0, 0),), 1)):
        assert timeline.makespan_ms == 0
        assert timeline.busy_fraction == 1
        assert timeline.bubble_ratio == 0
        assert timeline.format_table()


def test_actions_once_in_start_order() -> None:
    spans = (
        Span(0, "compute", 4, 5, 2, 0, "second unit"),
        Span(0, "compute", 3, 4, 2, 0, "first unit"),
        Span(0, "compute", 0, 1, 1, 1),
        Span(0, "compute", 6, 7, label="off the plan"),
        Span(0, "d2h", 0, 9, 9, 9),
    )
    assert Timeline(spans, 1).actions(0) == [Action(1, 1), Action(2, 0)]
    assert spans[3].action is None


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=12))
def test_overlaps_are_not_counted_twice(pieces: list[tuple[int, int]]) -> None:
    timeline = Timeline(tuple(Span(0, "compute", start, start + length) for start, length in pieces), 1)
    seconds = {tick for start, length in pieces for tick in range(start, start + length)}
    assert timeline.busy_ms(0) == len(seconds)
    assert 0 <= timeline.bubble_ratio <= 1


def test_chrome_trace() -> None:
    trace = TIMELINE.to_chrome_trace()
    assert json.loads(json.dumps(trace)) == trace
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(events) == len(TIMELINE.spans)
    block = next(event for event in events if event["name"] == "block.1")
    assert (block["pid"], block["ts"], block["dur"], block["cat"]) == (1, 4000.0, 6000.0, "compute")
    assert block["args"] == {"stage": 1, "microbatch": 0}
    assert {event["name"] for event in events} == {"block.1", "0:0", "0:1", "h2d", "wait"}
    names = {
        (event["name"], event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["ph"] == "M"
    }
    assert names["process_name", 1, 0] == "device 1"
    for event in events:
        assert names["thread_name", event["pid"], event["tid"]] == event["cat"]


def test_format_table() -> None:
    assert TIMELINE.format_table(width=21) == (
        "10 ms, bubble 30.0%, one character is 1 ms\ndevice 0 |00000000..|\ndevice 1 |....111111|\n"
    )


def test_format_table_symbols() -> None:
    stages = [9, 10, 35, 36, 61, 62, -1]
    spans = tuple(Span(0, "compute", i, i + 1, stage, 0) for i, stage in enumerate(stages))
    assert "|9azAZ##|" in Timeline(spans, 1).format_table(width=18)


def test_format_table_keeps_the_width() -> None:
    table = TIMELINE.format_table()
    assert {len(line) for line in table.splitlines()[1:]} == {100}
    with pytest.raises(ValueError, match="width must be at least 12 characters, got 11"):
        TIMELINE.format_table(width=11)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, "compute", 0, 1), "device must be >= 0, got -1"),
        ((0, "", 0, 1), "kind must not be empty"),
        ((0, "compute", 2, 1), "got 2 to 1"),
        ((0, "compute", 0, math.inf), "both finite, got 0 to inf"),
        ((0, "compute", math.nan, 1), "both finite"),
    ],
)
def test_span_rejects(arguments: tuple[int, str, float, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Span(*arguments)


def test_timeline_rejects() -> None:
    with pytest.raises(ValueError, match="num_devices must be >= 1, got 0"):
        Timeline((), 0)
    with pytest.raises(ValueError, match=r"device=2.* outside the timeline's 2 devices"):
        Timeline((Span(2, "compute", 0, 1),), 2)
