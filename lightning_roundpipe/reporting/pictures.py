"""Gantt charts of timelines, simulated or recorded: a row per device, colour for what its stages do.

Needs matplotlib (``pip install lightning-roundpipe[plot]``), which is imported when something is drawn, and used
without its global state: no window, no current figure.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

from ..planning.files import written_whole
from ..planning.partition import StageKind
from ..planning.schedule import Action
from ..planning.spans import Span
from ..planning.timeline import Timeline

FORMATS = (".png", ".svg", ".pdf")

# Lightest and darkest shade of each kind of stage. Blue, orange and green keep apart for the colour-blind.
_SHADES = {
    StageKind.FORWARD: ("#a9cdf0", "#2b6cb0"),
    StageKind.FUSED: ("#f6ad3c", "#f6ad3c"),
    StageKind.BACKWARD: ("#a6dcc0", "#1f7a53"),
    None: ("#cbd0d8", "#707886"),
}
_NAMES = {
    StageKind.FORWARD: "forward (F)",
    StageKind.FUSED: "forward + backward (fused)",
    StageKind.BACKWARD: "recompute + backward (B)",
    None: "compute",
}
_TRANSFERS = {"h2d": ("#7b4fb5", "upload (h2d)"), "d2h": ("#b8476b", "download (d2h)")}
_WAIT, _IDLE_NAME, _NUMBER = "waiting", "idle", "micro-batch"
_IDLE, _HATCH, _INK, _GRID = "#f3f4f6", "#b9bec8", "#22262e", "#d9dce2"

_WIDTH = 12.0  # of the picture, in inches, as are the following
_ROW, _PANEL, _BOTTOM, _LEGEND = 0.46, 0.42, 0.55, 0.32
_LEFT, _RIGHT = 0.85, 0.2
_DPI = 150
_LEAST_GAP = 0.7  # points


def draw_timelines(panels: Sequence[tuple[str, Timeline]], path: str | os.PathLike[str]) -> None:
    """Draw timelines into a file, one above the other over the same time axis.

    Args:
        panels: Title of each, "" for none, and the timeline; the labels of its spans say what the stages do.
        path: The file; its suffix picks the format: ``.png``, ``.svg`` or ``.pdf``.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed; the message says how to install it.
        ValueError: If the suffix is none of those above, or there is nothing to draw.
        OSError: If the file cannot be written.
    """
    check_picture(path)
    if not panels:
        raise ValueError("panels is empty: pass at least one (title, timeline).")
    import matplotlib
    from matplotlib.figure import Figure

    rows = [timeline.num_devices for _, timeline in panels]
    height = _LEGEND + sum(_PANEL + _ROW * count for count in rows) + _BOTTOM
    # Fixed ids make the same picture the same file.
    with matplotlib.rc_context({"svg.hashsalt": "roundpipe", "font.family": "sans-serif", "hatch.linewidth": 0.6}):
        figure = Figure(figsize=(_WIDTH, height), dpi=_DPI, facecolor="white")
        longest = max(timeline.makespan_ms for _, timeline in panels) or 1.0
        names: dict[str, Any] = {}
        top = height - _LEGEND
        for number, (title, timeline) in enumerate(panels):
            panel_height = _ROW * timeline.num_devices
            bottom = top - _PANEL - panel_height
            place = (_LEFT / _WIDTH, bottom / height, 1 - (_LEFT + _RIGHT) / _WIDTH, panel_height / height)
            axes = figure.add_axes(place)
            _Panel(axes, timeline, longest).draw(title, names, is_last=number == len(panels) - 1)
            top = bottom
        _legend(figure, names, height)
        suffix = Path(path).suffix.lower()
        with written_whole(path) as beside:
            figure.savefig(beside, format=suffix[1:], metadata={"Date": None} if suffix == ".svg" else None)


def check_picture(path: str | os.PathLike[str]) -> None:
    """Check that a picture can be drawn into `path`, before there is one.

    Raises:
        ModuleNotFoundError, ValueError: As `draw_timelines`.
    """
    if Path(path).suffix.lower() not in FORMATS:
        raise ValueError(f"{os.fspath(path)!r} has no suffix of a picture: use {', '.join(FORMATS)}.")
    if find_spec("matplotlib") is None:
        raise ModuleNotFoundError(
            f"Drawing {os.fspath(path)!r} needs matplotlib: pip install lightning-roundpipe[plot]", name="matplotlib"
        )


@dataclass(frozen=True)
class _Block:
    """A stretch of compute spans of one action."""

    spans: tuple[Span, ...]
    kind: StageKind | None
    colour: tuple[float, float, float]


class _Panel:
    """One timeline on its axes: rows of height 1, device 0 on top, times from 0.

    Args:
        axes: Where to draw.
        timeline: What to draw.
        longest_ms: Length of the time axis.
    """

    def __init__(self, axes: Any, timeline: Timeline, longest_ms: float) -> None:
        self._axes, self._timeline, self._longest_ms = axes, timeline, longest_ms
        self._origin = timeline.start_ms
        self._points_per_ms = (_WIDTH - _LEFT - _RIGHT) * 72 / longest_ms
        has_transfers = any(span.kind in _TRANSFERS for span in timeline.spans)
        self._compute_height = 0.60 if has_transfers else 0.80
        self._blocks = _blocks(timeline)
        # The same for all numbers, so that a row does not show only those below 10.
        longest = max((span.microbatch_index for span in timeline.spans), default=0)
        self._number_width = 4.4 * len(str(longest)) + 3  # points

    def draw(self, title: str, names: dict[str, Any], *, is_last: bool) -> None:
        """Draw everything; what the legend has to explain goes into `names`."""
        for device in range(self._timeline.num_devices):
            self._bars([(self._origin, self._timeline.end_ms)], device, 0.1, 0.8, facecolor=_IDLE, zorder=1)
            names.setdefault(_IDLE_NAME, _patch(facecolor=_IDLE))
            self._draw_waits(device, names)
            self._draw_transfers(device, names)
            self._draw_compute(device, names)
        self._finish(title, is_last=is_last)

    def _bars(self, times: Sequence[tuple[float, float]], device: int, low: float, height: float, **style: Any) -> None:
        bars = [(start - self._origin, end - start) for start, end in times]
        self._axes.broken_barh(bars, (device + low, height), **style)

    def _draw_waits(self, device: int, names: dict[str, Any]) -> None:
        """Below the compute spans: what shows is waiting while nothing else ran."""
        if times := self._timeline.intervals(device, "wait"):
            style = {"facecolor": "white", "edgecolor": _HATCH, "hatch": "/////", "linewidth": 0}
            self._bars(times, device, 0.1, self._compute_height, zorder=2, **style)
            names.setdefault(_WAIT, _patch(**style))

    def _draw_transfers(self, device: int, names: dict[str, Any]) -> None:
        for low, (kind, (colour, name)) in zip((0.73, 0.83), _TRANSFERS.items(), strict=True):
            if times := self._timeline.intervals(device, kind):
                self._bars(times, device, low, 0.07, facecolor=colour, zorder=3)
                names.setdefault(name, _patch(facecolor=colour))

    def _draw_compute(self, device: int, names: dict[str, Any]) -> None:
        times, colours, edges = [], [], []
        for block in self._blocks[device]:
            parts = self._merged([(span.start_ms, span.end_ms) for span in block.spans])
            start, end = max(parts, key=lambda part: part[1] - part[0])
            width = (end - start) * self._points_per_ms
            times += parts
            colours += [block.colour] * len(parts)
            edges += [min(0.6, width / 8)] * len(parts)  # one as wide as the bar would leave nothing of it
            names.setdefault(_NAMES[block.kind], _patch(facecolor=_colour(block.kind, 0.5)))
            if block.spans[0].action is not None and width > self._number_width:
                self._draw_number(block, (start + end) / 2, device)
                names.setdefault(_NUMBER, _number_handle())
        if times:
            style: dict[str, Any] = {"facecolors": colours, "edgecolors": "white", "linewidths": edges}
            self._bars(times, device, 0.1, self._compute_height, zorder=3, **style)

    def _draw_number(self, block: _Block, middle: float, device: int) -> None:
        ink = "white" if _luminance(block.colour) < 0.35 else _INK
        place = (middle - self._origin, device + 0.1 + self._compute_height / 2)
        text = str(block.spans[0].microbatch_index)
        self._axes.text(*place, text, ha="center", va="center_baseline", fontsize=7, color=ink, zorder=4)

    def _merged(self, times: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        """Without the gaps that would be too narrow to see."""
        merged = [times[0]]
        for start, end in times[1:]:
            before, last = merged[-1]
            if (start - last) * self._points_per_ms < _LEAST_GAP:
                merged[-1] = (before, max(last, end))
            else:
                merged.append((start, end))
        return merged

    def _finish(self, title: str, *, is_last: bool) -> None:
        axes, count = self._axes, self._timeline.num_devices
        axes.set_xlim(0, self._longest_ms)
        axes.set_ylim(count, 0)
        axes.set_yticks([d + 0.5 for d in range(count)], [f"device {d}" for d in range(count)], fontsize=9, color=_INK)
        axes.tick_params(length=0, labelcolor=_INK, labelsize=9, labelbottom=is_last)
        axes.grid(axis="x", color=_GRID, linewidth=0.6, zorder=0)
        axes.set_axisbelow(True)
        for spine in axes.spines.values():
            spine.set_visible(False)
        if is_last:
            axes.set_xlabel("ms", fontsize=9, color=_INK)
        axes.set_title(_title(title, self._timeline), loc="left", fontsize=10.5, color=_INK, pad=5)


def _title(title: str, timeline: Timeline) -> str:
    parts = ", ".join(f"{name} {share:.1%}" for name, share in timeline.bubble_parts.items())
    ms = timeline.makespan_ms
    figures = f"{ms:.0f} ms" if ms >= 1000 else f"{ms:.4g} ms"
    figures += f", bubble {timeline.bubble_ratio:.1%} ({parts})"
    return f"{title}: {figures}" if title else figures


def _blocks(timeline: Timeline) -> list[list[_Block]]:
    """What each device computed, in the order of time."""
    kinds = timeline.stage_kinds
    computing = sorted(
        (span for span in timeline.spans if span.kind == "compute"), key=lambda span: (span.device, span.start_ms)
    )
    stages: dict[StageKind | None, set[int]] = {}
    for span in computing:
        stages.setdefault(_kind_of(span, kinds), set()).add(span.stage_index)
    ranks = {kind: {stage: rank for rank, stage in enumerate(sorted(found))} for kind, found in stages.items()}
    rows: list[list[_Block]] = [[] for _ in range(timeline.num_devices)]
    for (device, _), stretch in groupby(computing, key=lambda span: (span.device, span.action)):
        spans = tuple(stretch)
        kind = _kind_of(spans[0], kinds)
        depth = ranks[kind][spans[0].stage_index] / max(1, len(ranks[kind]) - 1)
        rows[device].append(_Block(spans, kind, _colour(kind, depth)))
    return rows


def _kind_of(span: Span, kinds: Mapping[Action, StageKind]) -> StageKind | None:
    return None if span.action is None else kinds.get(span.action)


def _colour(kind: StageKind | None, depth: float) -> tuple[float, float, float]:
    """The shade of a kind of stage, from its lightest (0) to its darkest (1), as red, green, blue from 0 to 1."""
    light, dark = (tuple(int(code[i : i + 2], 16) / 255 for i in (1, 3, 5)) for code in _SHADES[kind])
    red, green, blue = (a + (b - a) * depth for a, b in zip(light, dark, strict=True))
    return red, green, blue


def _luminance(colour: tuple[float, float, float]) -> float:
    weighted = zip((0.2126, 0.7152, 0.0722), colour, strict=True)
    return sum(weight * math.pow(part, 2.2) for weight, part in weighted)


def _patch(**style: Any) -> Any:
    from matplotlib.patches import Patch

    return Patch(**style)


def _number_handle() -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], linestyle="none", marker="$0$", markersize=5, markeredgewidth=0, color=_INK)


def _legend(figure: Any, names: dict[str, Any], height: float) -> None:
    order = [*_NAMES.values(), *(name for _, name in _TRANSFERS.values()), _WAIT, _IDLE_NAME, _NUMBER]
    handles = {name: names[name] for name in order if name in names}
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="upper left",
        bbox_to_anchor=((_LEFT - 0.1) / _WIDTH, 1 - 0.06 / height),
        ncols=len(handles),
        frameon=False,
        fontsize=8.5,
        labelcolor=_INK,
        handlelength=1.3,
        columnspacing=1.4,
    )
