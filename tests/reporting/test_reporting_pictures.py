"""Pictures of timelines: what they contain, in every format, and what cannot be drawn."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_roundpipe.planning import Span, Timeline
from lightning_roundpipe.reporting.pictures import draw_timelines

pytest.importorskip("matplotlib")

FORWARD, FUSED, BACKWARD, UPLOAD, DOWNLOAD = "#a9cdf0", "#f6ad3c", "#a6dcc0", "#7b4fb5", "#b8476b"


def timeline(labels: tuple[str, ...] = ("F a", "fused b", "B a", "B a")) -> Timeline:
    """Two devices, two micro-batches, 40 ms."""
    spans = [
        Span(stage % 2, "compute", 10.0 * stage + 5 * i, 10.0 * stage + 5 * i + 5, stage, i, labels[stage])
        for stage in range(4)
        for i in range(2)
    ]
    return Timeline(tuple(spans), 2)


def draw_timeline(timeline: Timeline, path: str | Path, title: str = "") -> None:
    draw_timelines([(title, timeline)], path)


MOVES = (Span(0, "h2d", 0, 3, 0, -1, "weights"), Span(1, "d2h", 30, 31), Span(1, "wait", 0, 10, 1, 0, "its turn"))


def words(path: Path) -> list[str]:
    """All text in an SVG file, in order."""
    return re.findall(r"<!-- (.*?) -->", path.read_text(encoding="utf-8"))


def fills(path: Path) -> set[str]:
    return set(re.findall(r"fill: (#[0-9a-f]{6})", path.read_text(encoding="utf-8")))


@pytest.mark.parametrize(("suffix", "begin"), [(".pdf", b"%PDF"), (".PNG", b"\x89PNG")])
def test_formats(tmp_path: Path, suffix: str, begin: bytes) -> None:
    """The other tests draw SVG; no state of matplotlib is touched."""
    import matplotlib

    before = dict(matplotlib.rcParams)
    path = tmp_path / f"picture{suffix}"
    draw_timeline(timeline(), path)
    assert path.read_bytes().startswith(begin)
    assert dict(matplotlib.rcParams) == before


def test_kinds_of_stages_have_colours(tmp_path: Path) -> None:
    path = tmp_path / "picture.svg"
    draw_timeline(timeline(), path, title="Small")
    assert {FORWARD, FUSED, BACKWARD} <= fills(path)
    assert not {UPLOAD, DOWNLOAD} & fills(path)
    text = words(path)
    assert text[-5:] == ["forward (F)", "forward + backward (fused)", "recompute + backward (B)", "idle", "micro-batch"]
    assert "Small: 40 ms, bubble 50.0% (fill 12.5%, drain 12.5%, inside 25.0%)" in text
    assert {"device 0", "device 1", "ms"} <= set(text)
    assert [word for word in text if word in ("0", "1")].count("1") == 4, (
        "each action has the number of its micro-batch"
    )


def test_unknown_stages_are_grey(tmp_path: Path) -> None:
    path = tmp_path / "picture.svg"
    draw_timeline(timeline(("", "", "", "")), path)
    assert not {FORWARD, FUSED, BACKWARD} & fills(path)
    assert "compute" in words(path)


def test_bars_are_as_wide_as_their_spans_are_long(tmp_path: Path) -> None:
    from matplotlib.image import imread

    path = tmp_path / "picture.png"
    units = tuple(
        Span(0, "compute", start, start + 10, 1, 0, "fused") for start in (0, 10, 20)
    )  # of one action: one bar
    draw_timeline(Timeline((*units, Span(0, "h2d", 50, 70)), 1), path)
    pixels = (imread(path)[:, :, :3] * 255).round().astype(int).tolist()

    def width_of(colour: str) -> int:
        wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
        return max(sum(pixel == wanted for pixel in row) for row in pixels)

    assert width_of(UPLOAD) / width_of(FUSED) == pytest.approx(20 / 30, rel=0.02)


def test_narrow_bars_have_no_number(tmp_path: Path) -> None:
    spans = tuple(Span(0, "compute", i, i + 1, 0, i) for i in range(400))
    path = tmp_path / "picture.svg"
    draw_timeline(Timeline(spans, 1), path)
    assert "micro-batch" not in words(path)
    assert "399" not in words(path)


def test_several_timelines_share_the_axis(tmp_path: Path) -> None:
    path = tmp_path / "picture.svg"
    longer = Timeline((Span(0, "compute", 100, 400, 0, 0, "F a"),), 1)
    draw_timelines([("one", timeline()), ("other", longer)], path)
    text = words(path)
    titles = [word for word in text if ": " in word]
    assert [title.split(" ms")[0] for title in titles] == ["one: 40", "other: 300"]
    assert text.count("ms") == 1
    assert text.count("300") == 1, "the numbers of the axis, for the longest one, stand below the last"


def test_waits_and_transfers_and_times_from_the_begin(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("one.svg", "other.svg")]
    spans = timeline().spans + MOVES
    later = tuple(replace(span, start_ms=span.start_ms + 512, end_ms=span.end_ms + 512) for span in spans)
    for path, shown in zip(paths, (spans, later), strict=True):
        draw_timeline(Timeline(shown, 2), path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert {UPLOAD, DOWNLOAD} <= fills(paths[0])
    assert {"upload (h2d)", "download (d2h)", "waiting"} <= set(words(paths[0]))


def test_long_times_have_no_exponent(tmp_path: Path) -> None:
    path = tmp_path / "picture.svg"
    draw_timeline(Timeline((Span(0, "compute", 0, 41987.6, 0, 0, "F a"),), 1), path, title="Long")
    assert "Long: 41988 ms, bubble 0.0% (fill 0.0%, drain 0.0%, inside 0.0%)" in words(path)


def test_empty_timeline(tmp_path: Path) -> None:
    path = tmp_path / "picture.svg"
    draw_timeline(Timeline((), 3), path)
    assert {"device 0", "device 2", "0 ms, bubble 0.0% (fill 0.0%, drain 0.0%, inside 0.0%)"} <= set(words(path))


def test_what_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'picture.gif' has no suffix of a picture: use \.png, \.svg, \.pdf"):
        draw_timeline(timeline(), "picture.gif")
    with pytest.raises(ValueError, match="panels is empty"):
        draw_timelines([], tmp_path / "picture.svg")
    with pytest.raises(FileNotFoundError, match="missing"):
        draw_timeline(timeline(), tmp_path / "missing" / "picture.svg")
