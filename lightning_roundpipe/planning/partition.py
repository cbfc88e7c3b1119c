"""Stages: which calls run together, forward and backward cut differently.

```
calls      0   1   2   3   4   5   6   7   8   9
forward   [---- F0 ----][---- F1 ----][ fused 2 ]      stages in execution order:
backward  [ B5  ][ B4  ][     B3     ][  same   ]      F0 F1 fused2 B3 B4 B5
```

The backward of a call costs about three times its forward (it recomputes the forward first), so backward stages hold
fewer calls. The last calls run forward and backward at once in the *fused* stage and save the recompute.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


class StageKind(enum.Enum):
    """What a stage does with its calls."""

    FORWARD = "F"
    """Forward without autograd; the inputs of the calls are kept."""
    FUSED = "fused"
    """Forward with autograd and backward at once."""
    BACKWARD = "B"
    """Recompute from the kept inputs, then backward."""


@dataclass(frozen=True)
class Stage:
    """Calls ``[start, stop)``, run together: number `index` of the execution order.

    Raises:
        ValueError: If the index is negative or the range is reversed or negative.
    """

    index: int
    kind: StageKind
    start: int
    stop: int

    def __post_init__(self) -> None:
        if self.index < 0:
            raise ValueError(f"Stage.index must be >= 0, got {self.index}: number the stages in execution order.")
        if not 0 <= self.start <= self.stop:
            raise ValueError(
                f"Stage {self.index} covers calls [{self.start}, {self.stop}): start must be >= 0 and <= stop."
            )

    def format(self) -> str:
        """Return short text such as ``"F 0-3"``; the range includes its last call."""
        if self.start == self.stop:
            return f"{self.kind.value} (no calls)"
        last = self.stop - 1
        return f"{self.kind.value} {self.start}" if last == self.start else f"{self.kind.value} {self.start}-{last}"


@dataclass(frozen=True)
class Partition:
    """The stages of one step, in execution order.

    For training: F stages over ``[0, a)`` in ascending order, one fused stage over ``[a, num_calls)``, then B stages
    over ``[0, a)`` in descending order, cut independently of the F stages. For evaluation: F stages only. No stage is
    empty, unless there are no calls at all: then it is one empty fused (evaluation: forward) stage.

    Args:
        num_calls: Number of calls in the step.
        stages: The stages in execution order.

    Raises:
        ValueError: If the stages do not have this form; the message names the stage.
    """

    num_calls: int
    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", tuple(self.stages))
        if self.num_calls < 0 or not self.stages:
            raise ValueError(
                f"A partition needs num_calls >= 0 and at least one stage, got num_calls={self.num_calls} and "
                f"{len(self.stages)} stages: plan_training and plan_evaluation make one."
            )
        kinds, order = [stage.kind for stage in self.stages], list(StageKind)
        num_fused, has_backward = kinds.count(StageKind.FUSED), StageKind.BACKWARD in kinds
        if kinds != sorted(kinds, key=order.index) or num_fused > 1 or (has_backward and not num_fused):
            raise ValueError(
                f"A partition has F stages first, then one fused stage, then B stages, or F stages alone, got "
                f"{self.format()}: reorder them."
            )
        self._validate_calls()

    def _validate_calls(self) -> None:
        """Check that each stage begins where the one before it ended, and that all calls are covered."""
        position, last = 0, self.stages[-1]
        for index, stage in enumerate(self.stages):
            begin, end = stage.start, stage.stop
            if stage.kind is StageKind.BACKWARD:
                begin, end = end, begin
            if stage.index != index or begin != position:
                raise self._error(
                    stage, f"must be number {index} and begin at call {position}, as the one before ended"
                )
            if begin == end and (self.num_calls or len(self.stages) > 1):
                raise self._error(stage, "has no calls: drop it")
            if stage.kind is StageKind.FUSED and end != self.num_calls:
                raise self._error(stage, f"must hold the last calls, up to {self.num_calls}")
            position = stage.start if stage.kind is StageKind.FUSED else end
        if position != (0 if self.is_training else self.num_calls):
            raise self._error(last, "is the last one and leaves calls uncovered: add the stages that are missing")

    def _error(self, stage: Stage, problem: str) -> ValueError:
        return ValueError(f"Stage {stage.index} ({stage.format()}) {problem}. Partition: {self.format()}")

    @property
    def num_stages(self) -> int:
        """Number of stages, the fused one counted once."""
        return len(self.stages)

    @property
    def is_training(self) -> bool:
        """Whether there is a backward, that is, a fused stage."""
        return any(stage.kind is StageKind.FUSED for stage in self.stages)

    @functools.cached_property
    def forward_stages(self) -> tuple[int, ...]:
        """For each call the index of the stage that runs its forward: an F stage or the fused one."""
        return self._stages_without(StageKind.BACKWARD)

    @functools.cached_property
    def backward_stages(self) -> tuple[int, ...]:
        """For each call the index of the stage that runs its backward: the fused one or a B stage. Or empty."""
        return self._stages_without(StageKind.FORWARD) if self.is_training else ()

    def _stages_without(self, kind: StageKind) -> tuple[int, ...]:
        stages = sorted((stage for stage in self.stages if stage.kind is not kind), key=lambda stage: stage.start)
        return tuple(stage.index for stage in stages for _ in range(stage.start, stage.stop))

    def format(self) -> str:
        """Return short text such as ``"F 0-3 | F 4-7 | fused 8-9 | B 4-7 | B 0-3"``."""
        return " | ".join(stage.format() for stage in self.stages)


def no_calls(*, is_training: bool) -> Partition:
    """Return the partition of a step without calls."""
    return Partition(0, (Stage(0, StageKind.FUSED if is_training else StageKind.FORWARD, 0, 0),))


def pieces(num_calls: int, forward: Sequence[int], backward: Sequence[int]) -> list[tuple[StageKind, int, int]]:
    """Return the stages (kind, start, stop) in execution order, from the cuts of the F and of the B stages.

    Cuts are call positions ``[0, ..., a]``. The fused stage begins at a; without one, a is the number of calls.
    """
    found = [(StageKind.FORWARD, start, stop) for start, stop in pairwise(forward)]
    if forward[-1] < num_calls:
        found.append((StageKind.FUSED, forward[-1], num_calls))
    found.extend((StageKind.BACKWARD, start, stop) for start, stop in reversed(list(pairwise(backward))))
    return found


def assemble(num_calls: int, forward: Sequence[int], backward: Sequence[int]) -> Partition:
    """Return the partition with these cuts; see `pieces`."""
    stages = (Stage(index, *piece) for index, piece in enumerate(pieces(num_calls, forward, backward)))
    return Partition(num_calls, tuple(stages))


def keep_together(partition: Partition, spans: Sequence[tuple[int, int]]) -> Partition:
    """Return the partition with every span of calls in one forward stage: cuts inside a span are taken out.

    Args:
        partition: Any partition.
        spans: Call positions ``[start, stop)`` that one forward stage must run.

    Raises:
        ValueError: If a span does not lie within the calls.
    """
    num_calls = partition.num_calls
    for start, stop in spans:
        if not 0 <= start < stop <= num_calls:
            raise ValueError(f"span [{start}, {stop}) does not lie within the {num_calls} calls")
    if not num_calls:
        return partition
    begins = [stage.start for stage in partition.stages if stage.kind is not StageKind.BACKWARD]
    forward = [0, *(cut for cut in begins[1:] if not any(start < cut < stop for start, stop in spans))]
    if not partition.is_training:
        return assemble(num_calls, [*forward, num_calls], [])
    backward = sorted(stage.start for stage in partition.stages if stage.kind is StageKind.BACKWARD)
    return assemble(num_calls, forward, [*(cut for cut in backward if cut < forward[-1]), forward[-1]])
