"""What is noted about each run of a unit: for timelines, and for the costs that the planner knows."""

from __future__ import annotations

from typing import Any, NamedTuple

from .devices import Device


class Run(NamedTuple):
    """What was noted about one run of a unit, or of user code in the backward.

    Attributes:
        device: where it ran.
        kind: "F" or "B".
        name: of the unit; or what kind of user code.
        start, end: stamps of the device.
        stage: the stage it ran in; -1 for none.
        position: the call in the plan; None for calls off the plan and for user code.
        kept: whether the graph is kept between forward and backward; if not, a "B" run holds the forward as well.
        learned: whether the call was the first one of its kind.
        input_bytes, output_bytes: of the call's tensor arguments and results.
        graph_bytes: of the call's graph besides; 0 where it was not looked at.
    """

    device: Device
    kind: str
    name: str
    start: Any
    end: Any
    stage: int
    position: int | None = None
    kept: bool = False
    learned: bool = False
    input_bytes: int = 0
    output_bytes: int = 0
    graph_bytes: int = 0
