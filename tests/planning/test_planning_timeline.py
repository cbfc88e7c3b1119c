"""Timeline: figures and pictures from spans."""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_roundpipe.planning import Action, Span, StageKind, Timeline
from lightning_roundpipe.planning.spans import Mark

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


def test_a_timeline_adds_up_its_compute_spans() -> None:
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


TIMES = st.floats(-1e6, 1e6)
SPANS = st.builds(
    lambda device, kind, times, stage, microbatch, label: Span(
        device, kind, min(times), max(times), stage, microbatch, label
    ),
    st.integers(0, 3),
    st.sampled_from(["compute", "h2d", "d2h", "wait", "other"]),
    st.tuples(TIMES, TIMES),
    st.integers(-1, 4),
    st.integers(-1, 4),
    st.sampled_from(["", "F 0-3", "B block.1", "fused 7", "0:0", "its turn", 'quoted "ü"']),
)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(SPANS, max_size=12), st.integers(4, 6))
def test_bubble_parts_add_up_to_the_bubble(spans: list[Span], num_devices: int) -> None:
    timeline = Timeline(tuple(spans), num_devices)
    parts = timeline.bubble_parts
    assert list(parts) == ["fill", "drain", "inside"]
    assert all(share >= 0 for share in parts.values())
    assert math.fsum(parts.values()) == pytest.approx(timeline.bubble_ratio, abs=1e-9)


def test_fill_and_drain_are_idle_before_and_after_computing() -> None:
    spans = (Span(0, "compute", 0, 3), Span(0, "compute", 5, 6), Span(1, "compute", 2, 9), Span(1, "d2h", 9, 10))
    timeline = Timeline(spans, 3)
    assert [timeline.fill_ms(device) for device in range(3)] == [0, 2, 0]
    assert [timeline.drain_ms(device) for device in range(3)] == [4, 1, 0]
    # Of 30 ms, device 2 does nothing for 10, and device 0 waits for 2.
    assert timeline.bubble_parts == pytest.approx({"fill": 2 / 30, "drain": 5 / 30, "inside": 12 / 30})


def test_intervals_of_a_kind_are_merged() -> None:
    spans = (Span(0, "wait", 1, 4), Span(0, "wait", 3, 5), Span(0, "wait", 7, 8), Span(0, "compute", 0, 9))
    assert Timeline(spans, 1).intervals(0, "wait") == [(1, 5), (7, 8)]
    assert Timeline(spans, 1).intervals(0) == [(0, 9)]


def test_stage_kinds_come_from_the_labels() -> None:
    spans = (
        Span(0, "compute", 0, 1, 0, 0, "F block.0"),
        Span(0, "compute", 1, 2, 1, 0, "F block.1"),
        Span(0, "compute", 2, 3, 1, 0, "B loss"),
        Span(0, "compute", 3, 4, 2, 0, "B block.0"),
        Span(0, "compute", 4, 5, 3, 0, "fused 8-9"),
        Span(0, "compute", 5, 6, 4, 0, "anything"),
        Span(0, "wait", 5, 6, 5, 0, "F is not computing"),
        Span(0, "compute", 6, 7, label="F off the plan"),
    )
    assert Timeline(spans, 1).stage_kinds == {
        Action(0, 0): StageKind.FORWARD,
        Action(1, 0): StageKind.FUSED,
        Action(2, 0): StageKind.BACKWARD,
        Action(3, 0): StageKind.FUSED,
    }


def _slices(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def _threads(trace: dict[str, Any]) -> dict[tuple[int, int], str]:
    named = [event for event in trace["traceEvents"] if event["name"] == "thread_name"]
    return {(event["pid"], event["tid"]): event["args"]["name"] for event in named}


def test_chrome_trace_has_one_thread_for_each_kind_of_span() -> None:
    trace = TIMELINE.to_chrome_trace()
    assert json.loads(json.dumps(trace)) == trace
    events = [event for event in _slices(trace) if not event["cat"].startswith("roundpipe.")]
    assert len(events) == len(TIMELINE.spans)
    block = next(event for event in events if event["name"] == "block.1")
    assert (block["pid"], block["ts"], block["dur"], block["cat"]) == (2, 4000.0, 6000.0, "compute")
    assert block["args"] == {"stage": 1, "microbatch": 0, "label": "block.1"}
    assert {event["name"] for event in events} == {"block.1", "0:0", "0:1", "h2d", "wait"}
    processes = [event for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert [(event["pid"], event["args"]["name"]) for event in processes] == [(1, "device 0"), (2, "device 1")]
    for event in events:
        assert _threads(trace)[event["pid"], event["tid"]] == event["cat"]


def test_chrome_trace_has_one_slice_for_each_action() -> None:
    spans = (
        Span(0, "compute", 0, 1, 0, 0, "F a"),
        Span(0, "compute", 1, 2, 0, 0, "F b"),
        Span(0, "compute", 2, 4, 0, 1, "F a"),
        Span(0, "compute", 4, 5, label="F off the plan"),
        Span(0, "compute", 6, 7, 1, 0),
    )
    trace = Timeline(spans, 1).to_chrome_trace()
    actions = [event for event in _slices(trace) if _threads(trace)[event["pid"], event["tid"]] == "actions"]
    assert [(event["name"], event["ts"], event["dur"]) for event in actions] == [
        ("F 0, micro-batch 0", 0, 2000),
        ("F 0, micro-batch 1", 2000, 2000),
        ("stage 1, micro-batch 0", 6000, 1000),
    ]
    units = [event for event in _slices(trace) if event["cat"] == "compute"]
    assert [event["args"].get("stage_kind") for event in units] == ["F", "F", "F", None, None]


def test_chrome_trace_says_what_a_wait_is_for() -> None:
    trace = Timeline((Span(0, "wait", 0, 1, 0, 0, "its turn"),), 1).to_chrome_trace()
    assert [(event["name"], event["cat"]) for event in _slices(trace)] == [("wait: its turn", "wait")]


def test_chrome_trace_marks_are_no_spans() -> None:
    trace = TIMELINE.to_chrome_trace([Mark("step 7", 9.5, 20.0, {"bubble": 0.25})])
    (mark,) = [event for event in _slices(trace) if event["name"] == "step 7"]
    assert (mark["pid"], mark["ts"], mark["dur"], mark["args"]) == (3, 0.0, 10500.0, {"bubble": 0.25})
    assert _in_nanoseconds(Timeline.from_chrome_trace(trace)) == _in_nanoseconds(TIMELINE)
    assert min(event["ts"] for event in _slices(trace)) == 0, "viewers refuse negative times"


def _in_nanoseconds(timeline: Timeline) -> Counter[tuple[object, ...]]:
    return Counter(
        (
            *(span.device, span.kind, span.stage_index, span.microbatch_index, span.label),
            round((span.start_ms - timeline.start_ms) * 1e6),
            round((span.end_ms - timeline.start_ms) * 1e6),
        )
        for span in timeline.spans
    )


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.lists(SPANS, max_size=14), st.integers(4, 6))
def test_a_timeline_survives_a_chrome_trace_whose_slices_do_not_overlap(spans: list[Span], num_devices: int) -> None:
    """Viewers leave out slices of a thread that overlap; they count in whole nanoseconds."""
    timeline = Timeline(tuple(spans), num_devices)
    trace = json.loads(json.dumps(timeline.to_chrome_trace()))
    threads: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in _slices(trace):
        start, length = round(event["ts"] * 1000), round(event["dur"] * 1000)
        assert (event["ts"], event["dur"]) == (start / 1000, length / 1000)
        threads.setdefault((event["pid"], event["tid"]), []).append((start, start + length))
    for slices in threads.values():
        assert all(end <= start for (_, end), (start, _) in pairwise(sorted(slices)))
    assert set(threads) == set(_threads(trace))
    assert all(process > 0 and thread > 0 for process, thread in threads)
    read = Timeline.from_chrome_trace(trace)
    assert read.num_devices == num_devices
    assert _in_nanoseconds(read) == _in_nanoseconds(timeline)
    assert read.start_ms == 0
    again = Timeline.from_chrome_trace(read.to_chrome_trace())
    assert Counter(again.spans) == Counter(read.spans)


def _broken(**changes: Any) -> dict[str, Any]:
    """A trace whose last event is not as it should be."""
    trace = Timeline((Span(0, "compute", 0, 1, 0, 0, "F a"),), 1).to_chrome_trace()
    trace["traceEvents"][-1] = {**trace["traceEvents"][-1], **changes}
    return trace


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], r'list "traceEvents", got \[\]'),
        ({"calls": []}, r"got \{'calls': \[\]\}"),
        ({"traceEvents": "none"}, "traceEvents"),
        ({"traceEvents": []}, "does not say that it shows a RoundPipe timeline"),
        ({"traceEvents": [], "otherData": {"roundpipe": {"version": 9, "num_devices": 1}}}, "version 9"),
        ({"traceEvents": [], "otherData": {"roundpipe": {"version": 1, "num_devices": 0}}}, "num_devices must be >= 1"),
        (_broken(ts="soon"), r"traceEvents\[5\] has 'ts': 'soon'"),
        (_broken(ts=math.inf), r"traceEvents\[5\] has 'ts': inf"),
        (_broken(ts=math.nan), r"traceEvents\[5\] has 'ts': nan"),
        (_broken(dur=10**400), r"traceEvents\[5\] has 'dur': 10+\.\.\."),
        (_broken(dur=True), r"traceEvents\[5\] has 'dur': True"),
        (_broken(args={"stage": 0}), r"traceEvents\[5\] has 'microbatch': None"),
        (_broken(pid=7), "outside the timeline's 1 devices"),
    ],
)
def test_documents_that_are_no_trace_are_refused(document: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Timeline.from_chrome_trace(document)


def test_table_shows_the_stage_of_each_slice() -> None:
    assert TIMELINE.format_table(width=21) == (
        "10 ms, bubble 30.0%, one character is 1 ms\ndevice 0 |00000000..|\ndevice 1 |....111111|\n"
    )


def test_table_has_symbols_for_62_stages() -> None:
    stages = [9, 10, 35, 36, 61, 62, -1]
    spans = tuple(Span(0, "compute", i, i + 1, stage, 0) for i, stage in enumerate(stages))
    assert "|9azAZ##|" in Timeline(spans, 1).format_table(width=18)


def test_table_keeps_the_width() -> None:
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
def test_impossible_spans_are_refused(arguments: tuple[int, str, float, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Span(*arguments)


def test_spans_outside_a_timeline_are_refused() -> None:
    with pytest.raises(ValueError, match="num_devices must be >= 1, got 0"):
        Timeline((), 0)
    with pytest.raises(ValueError, match=r"device=2.* outside the timeline's 2 devices"):
        Timeline((Span(2, "compute", 0, 1),), 2)
