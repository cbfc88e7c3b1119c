"""What is noted about a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..planning.partition import Partition
from ..planning.schedule import Schedule
from ..planning.spans import Span
from .context import Plan
from .tracing import Clock, Trace
from .walk import Walk


@dataclass
class Report:
    """What is known when a step has ended, but for its results.

    Attributes:
        spans: what was computed by plan, and more if the step is traced.
        schedule, partition: of the run with most calls.
        planning_s: what re-planning took, in seconds.
    """

    spans: list[Span] = field(default_factory=list)
    schedule: Schedule | None = None
    partition: Partition | None = None
    num_off_plan: int = 0
    saved_bytes: int = 0
    replanned: bool = False
    planning_s: float = 0.0
    _num_calls: int = -1

    def note_segment(
        self, plan: Plan, schedule: Schedule | None, planned: Sequence[Walk], clock: Clock, trace: Trace | None
    ) -> None:
        """A segment has ended, in which the micro-batches ``planned`` ran by the plan."""
        self.spans += [span for walk in planned for span in clock.spans_of(walk.runs, walk.index)]
        if trace is not None and planned:
            self.spans.extend(trace.spans(clock))
        self.num_off_plan += sum(walk.num_off_plan for walk in planned)
        if len(plan.sequence) > self._num_calls:
            self._num_calls, self.schedule, self.partition = len(plan.sequence), schedule, plan.partition
