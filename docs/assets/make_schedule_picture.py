"""Draw schedule.svg: the round-robin schedule of a small example, and the same work bound to devices.

Both panels are planned, simulated and drawn by the package itself; nothing in them is measured.

    python docs/assets/make_schedule_picture.py [FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from lightning_roundpipe.planning import (  # noqa: E402
    CallCost,
    CostProfile,
    Machine,
    StageKind,
    Timeline,
    bound_stage_costs,
    gpipe,
    plan_training,
    simulate,
    stage_costs,
)
from lightning_roundpipe.reporting.pictures import draw_timelines  # noqa: E402  (the package of this checkout, installed or not)

NUM_DEVICES = 4
NUM_MICROBATCHES = 8
PROFILE = CostProfile(tuple(CallCost(f"layer {i}", forward_ms=1.0, backward_ms=2.0) for i in range(12)))


def pipeline() -> tuple[str, Timeline]:
    """Return title and timeline of the schedule of this package."""
    machine = Machine(NUM_DEVICES)
    plan = plan_training(PROFILE, machine, num_microbatches=NUM_MICROBATCHES, may_split=False)
    schedule = plan.schedule(PROFILE, machine, NUM_MICROBATCHES)
    kinds = [stage.kind for stage in plan.partition.stages]
    num_forward, num_backward = kinds.count(StageKind.FORWARD), kinds.count(StageKind.BACKWARD)
    title = f"RoundPipe, {num_forward} forward stages, 1 fused, {num_backward} backward, bound to no device"
    return title, simulate(schedule, stage_costs(plan.partition, PROFILE)).timeline


def bound() -> tuple[str, Timeline]:
    """Return the same for GPipe with recomputation: device d has the d-th share of the layers."""
    share = len(PROFILE.calls) // NUM_DEVICES
    costs = bound_stage_costs([share] * NUM_DEVICES, PROFILE)
    timeline = simulate(gpipe(NUM_DEVICES, NUM_MICROBATCHES), costs).timeline
    return f"GPipe, {share} layers bound to each device", timeline


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    draw_timelines([pipeline(), bound()], folder / "schedule.svg")
