"""Draw schedule.svg: the round-robin schedule of a small example, and the same work bound to devices.

Both panels are planned and simulated by the package itself; nothing in them is drawn by hand or measured.

    python docs/assets/make_schedule_picture.py
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from lightning_roundpipe.planning import (  # noqa: E402  (the package of this checkout, installed or not)
    Action,
    CallCost,
    CostProfile,
    Schedule,
    StageKind,
    Timeline,
    partition,
    round_robin,
    simulate,
    stage_durations,
)

NUM_DEVICES = 4
NUM_MICROBATCHES = 8
PROFILE = CostProfile(tuple(CallCost(f"layer {i}", forward_ms=1.0, backward_ms=2.0) for i in range(12)))

FILLS = {StageKind.FORWARD: "#9ecae1", StageKind.FUSED: "#fdd49e", StageKind.BACKWARD: "#a1d99b"}
SHADES = {StageKind.FORWARD: "#6baed6", StageKind.FUSED: "#fdbb84", StageKind.BACKWARD: "#74c476"}
MS, ROW, LEFT, TOP, GAP = 7.5, 30, 76, 60, 74


def pipeline() -> tuple[str, Timeline, list[StageKind]]:
    """Return caption, timeline and kinds of the stages for the schedule of this package."""
    cut = partition(PROFILE, num_devices=NUM_DEVICES, num_microbatches=NUM_MICROBATCHES)
    durations = stage_durations(cut, PROFILE)
    schedule = round_robin(cut.num_stages, NUM_MICROBATCHES, NUM_DEVICES)
    timeline = simulate(schedule, lambda action: durations[action.stage_index])
    kinds = [stage.kind for stage in cut.stages]
    num_forward, num_backward = kinds.count(StageKind.FORWARD), kinds.count(StageKind.BACKWARD)
    title = f"round-robin: {num_forward} forward stages, 1 fused, {num_backward} backward, bound to no device"
    return title, timeline, kinds


def bound() -> tuple[str, Timeline, list[StageKind]]:
    """Return the same for stages bound to devices (GPipe with recomputation): device d has the d-th share of layers."""
    share = len(PROFILE.calls) // NUM_DEVICES
    layers = [PROFILE.calls[d * share : (d + 1) * share] for d in range(NUM_DEVICES)]
    durations = [sum(call.forward_ms for call in part) for part in layers]
    durations += [sum(call.recompute_backward_ms for call in part) for part in reversed(layers)]
    stages = [(d, 2 * NUM_DEVICES - 1 - d) for d in range(NUM_DEVICES)]
    devices = tuple(tuple(Action(s, m) for s in pair for m in range(NUM_MICROBATCHES)) for pair in stages)
    schedule = Schedule(2 * NUM_DEVICES, NUM_MICROBATCHES, devices)
    kinds = [StageKind.FORWARD] * NUM_DEVICES + [StageKind.BACKWARD] * NUM_DEVICES
    title = f"for comparison: {share} layers bound to each device, all forwards, then all backwards"
    return title, simulate(schedule, lambda action: durations[action.stage_index]), kinds


def panel(title: str, timeline: Timeline, kinds: list[StageKind], top: float) -> list[str]:
    """Return the SVG elements of one timeline."""
    caption = f"{title} (bubble {timeline.bubble_ratio:.0%})"
    parts = [f'<text x="{LEFT}" y="{top - 9:g}" class="title">{caption}</text>']
    for device in range(timeline.num_devices):
        y = top + device * ROW
        parts.append(f'<text x="{LEFT - 8}" y="{y + 18:g}" text-anchor="end">device {device}</text>')
        width = timeline.makespan_ms * MS
        parts.append(f'<rect x="{LEFT}" y="{y:g}" width="{width:g}" height="{ROW - 4}" fill="#eeeeee"/>')
    for span in timeline.spans:
        x, y, width = LEFT + span.start_ms * MS, top + span.device * ROW, (span.end_ms - span.start_ms) * MS
        kind = kinds[span.stage_index]
        fill = (FILLS if span.stage_index // timeline.num_devices % 2 else SHADES)[kind]
        name = f"stage {span.stage_index} ({kind.value}), micro-batch {span.microbatch_index}"
        parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{ROW - 4}" fill="{fill}" stroke="#ffffff">'
            f"<title>{name}</title></rect>"
            f'<text x="{x + width / 2:g}" y="{y + 18:g}" text-anchor="middle">{span.microbatch_index}</text>'
        )
    return parts


def picture() -> str:
    """Return the whole SVG document."""
    panels = [pipeline(), bound()]
    width = LEFT + max(timeline.makespan_ms for _, timeline, _ in panels) * MS + 16
    height = TOP + 2 * NUM_DEVICES * ROW + GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" font-family="sans-serif" font-size="13">',
        "<style>.title{font-weight:bold;font-size:14px}</style>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    x = LEFT
    for kind, text in (
        (StageKind.FORWARD, "forward"),
        (StageKind.FUSED, "fused: forward and backward"),
        (StageKind.BACKWARD, "recompute and backward"),
        (None, "idle"),
    ):
        fill = "#eeeeee" if kind is None else SHADES[kind]
        parts.append(
            f'<rect x="{x}" y="8" width="14" height="14" fill="{fill}"/><text x="{x + 20}" y="20">{text}</text>'
        )
        x += 56 + 7 * len(text)
    parts.append(f'<text x="{x}" y="20">number: micro-batch; change of shade: next stage</text>')
    for index, shown in enumerate(panels):
        parts += panel(*shown, TOP + index * (NUM_DEVICES * ROW + GAP - 24))
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    target = Path(__file__).with_name("schedule.svg")
    target.write_text(picture(), encoding="utf-8")
    print(target.relative_to(ROOT))
