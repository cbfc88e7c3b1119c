"""Stages: which calls run together, forward and backward cut differently.

```
calls      0   1   2   3   4   5   6   7   8   9
forward   [---- F0 ----][---- F1 ----][ fused 2 ]      slots in execution order:
backward  [ B5  ][ B4  ][     B3     ][  same   ]      F0 F1 fused2 B3 B4 B5
```

The backward of a call costs about three times its forward (it recomputes the forward first), so backward stages hold
fewer calls. The last calls run forward and backward at once in the *fused* stage and save the recompute.

`partition` finds the stages by the method of the RoundPipe paper, arXiv 2604.27085, section on partitioning; the search
itself is in ``_search``.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ._search import StageSearch
from .costs import CostProfile


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
    """Calls ``[start, stop)``, run together as slot `index` of the execution order.

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
    _forward_stages: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _backward_stages: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", tuple(self.stages))
        self._validate()
        forward = [0] * self.num_calls
        backward = [0] * self.num_calls
        for stage in self.stages:
            for position in range(stage.start, stage.stop):
                if stage.kind is not StageKind.BACKWARD:
                    forward[position] = stage.index
                if stage.kind is not StageKind.FORWARD:
                    backward[position] = stage.index
        object.__setattr__(self, "_forward_stages", tuple(forward))
        object.__setattr__(self, "_backward_stages", tuple(backward) if self.is_training else ())

    def _validate(self) -> None:
        if self.num_calls < 0 or not self.stages:
            raise ValueError(
                f"A partition needs num_calls >= 0 and at least one stage, got num_calls={self.num_calls} and "
                f"{len(self.stages)} stages: build it with partition() or partition_forward()."
            )
        for index, stage in enumerate(self.stages):
            if stage.index != index:
                raise self._error(stage, f"is at position {index}: number the stages in execution order")
            if stage.start == stage.stop and not (self.num_calls == 0 and len(self.stages) == 1):
                raise self._error(stage, "has no calls: drop it")
        num_fused = sum(stage.kind is StageKind.FUSED for stage in self.stages)
        if num_fused > 1:
            fused = [stage for stage in self.stages if stage.kind is StageKind.FUSED]
            raise self._error(fused[1], "is a second fused stage: a partition has at most one")
        first_backward = next((s for s in self.stages if s.kind is StageKind.BACKWARD), None)
        if num_fused == 0 and first_backward is not None:
            raise self._error(first_backward, "is a backward stage without a fused stage before it: add one")
        self._validate_order()

    def _validate_order(self) -> None:
        """Walk through the stages and check that each one begins where the one before it ended."""
        position = 0
        descending = False
        for stage in self.stages:
            if (stage.kind is StageKind.BACKWARD) != descending:
                raise self._error(stage, "is out of order: F stages come first, then the fused stage, then B stages")
            begin = stage.stop if descending else stage.start
            if begin != position:
                edge = "stop" if descending else "start"
                raise self._error(
                    stage, f"must {edge} at call {position}: stages cover the calls without gap or overlap"
                )
            if stage.kind is StageKind.FUSED:
                if stage.stop != self.num_calls:
                    raise self._error(
                        stage, f"must stop at call {self.num_calls}: the fused stage holds the last calls"
                    )
                descending = True
            position = stage.start if descending else stage.stop
        target = 0 if descending else self.num_calls
        if position != target:
            raise self._error(
                self.stages[-1], f"is the last one and leaves calls uncovered: it must reach call {target}"
            )

    def _error(self, stage: Stage, problem: str) -> ValueError:
        return ValueError(f"Stage {stage.index} ({stage.format()}) {problem}. Partition: {self.format()}")

    @property
    def num_stages(self) -> int:
        """Number of stages (slots), the fused one counted once."""
        return len(self.stages)

    @property
    def is_training(self) -> bool:
        """Whether there is a backward, that is, a fused stage."""
        return any(stage.kind is StageKind.FUSED for stage in self.stages)

    def forward_stage(self, position: int) -> int:
        """Return the index of the stage that runs the forward of the call: an F stage or the fused one.

        Raises:
            IndexError: If there is no call at this position.
        """
        self._check_position(position)
        return self._forward_stages[position]

    def backward_stage(self, position: int) -> int:
        """Return the index of the stage that runs the backward of the call: the fused one or a B stage.

        Raises:
            IndexError: If there is no call at this position.
            ValueError: If the partition is forward-only.
        """
        self._check_position(position)
        if not self._backward_stages:
            raise ValueError(
                f"Call {position} has no backward stage, the partition is forward-only ({self.format()}): "
                "use partition() for training."
            )
        return self._backward_stages[position]

    def _check_position(self, position: int) -> None:
        if not 0 <= position < self.num_calls:
            raise IndexError(f"There is no call {position}: the partition has calls 0 to {self.num_calls - 1}.")

    def format(self) -> str:
        """Return short text such as ``"F 0-3 | F 4-7 | fused 8-9 | B 4-7 | B 0-3"``."""
        return " | ".join(stage.format() for stage in self.stages)


def partition(
    profile: CostProfile, *, num_devices: int, num_microbatches: int, memory_limit: int | None = None
) -> Partition:
    """Cut the calls into stages for training.

    Minimises ``(M S + N (N - 1)) t_max`` over all partitions, with M micro-batches, N devices, S stages and t_max the
    time of the longest stage (RoundPipe paper, arXiv 2604.27085, section on partitioning). That is N times the makespan
    of the round-robin schedule if every stage takes t_max and the slots, ``S`` times the number of rounds, are a
    multiple of N. The formula counts on every device having a stage: where S < N, only S devices work in a round, and
    ``N (M + S - 1) t_max`` takes its place, which agrees with it at S = N.

    The result is an exact minimum of this objective, with the fewest stages among equals, and deterministic. What the
    objective leaves out only `simulate` can tell: stages shorter than t_max, and devices that idle in the last lap of
    the ring. The latter is large for one long round and S just above N; rounds of N to 2 N micro-batches avoid it.

    Args:
        profile: The costs of the calls, in call order. Sizes of a unit that is called twice in a stage count twice.
        num_devices: N, at least 1.
        num_microbatches: M, the micro-batches of a step, at least 1.
        memory_limit: Bytes that the weights of a stage (with their gradients in the fused and B stages) may take on a
            device; None for no limit.

    Raises:
        ValueError: If a number is out of range, or a single call is over the memory limit.
    """
    _check_counts(num_devices, num_microbatches, memory_limit)
    if not profile.calls:
        return Partition(0, (Stage(0, StageKind.FUSED, 0, 0),))
    search = _training_search(profile, memory_limit)
    cuts = search.best(num_devices, num_microbatches)
    return assemble(len(profile.calls), training_pieces(len(profile.calls), *cuts))


def _training_search(profile: CostProfile, memory_limit: int | None) -> StageSearch:
    calls = profile.calls
    sizes = [call.weight_bytes + call.gradient_bytes for call in calls]
    _check_memory(profile, sizes, memory_limit)
    return StageSearch(
        forward_ms=[call.forward_ms for call in calls],
        backward_ms=[call.backward_ms for call in calls],
        forward_bytes=[call.weight_bytes for call in calls],
        backward_bytes=sizes,
        memory_limit=memory_limit,
    )


Piece = tuple[StageKind, int, int]


def training_pieces(num_calls: int, forward: Sequence[int], backward: Sequence[int]) -> list[Piece]:
    """The stages (kind, start, stop) in execution order, from the cuts of the F and the B stages.

    Cuts are call positions ``[0, ..., a]``; the fused stage begins at a.
    """
    pieces = [(StageKind.FORWARD, start, stop) for start, stop in pairwise(forward)]
    pieces.append((StageKind.FUSED, forward[-1], num_calls))
    pieces.extend((StageKind.BACKWARD, start, stop) for start, stop in reversed(list(pairwise(backward))))
    return pieces


def forward_pieces(cuts: Sequence[int]) -> list[Piece]:
    """The stages of an evaluation, from their cuts, 0 and the number of calls included."""
    return [(StageKind.FORWARD, start, stop) for start, stop in pairwise(cuts)]


def assemble(num_calls: int, pieces: Iterable[Piece]) -> Partition:
    """The partition of these stages."""
    return Partition(num_calls, tuple(Stage(index, *piece) for index, piece in enumerate(pieces)))


def partition_forward(
    profile: CostProfile, *, num_devices: int, num_microbatches: int, memory_limit: int | None = None
) -> Partition:
    """Cut the calls into forward stages for evaluation, with the objective and arguments of `partition`.

    Backward times and gradients play no part.

    Raises:
        ValueError: If a number is out of range, or the weights of a single call are over the memory limit.
    """
    _check_counts(num_devices, num_microbatches, memory_limit)
    calls = profile.calls
    if not calls:
        return Partition(0, (Stage(0, StageKind.FORWARD, 0, 0),))
    sizes = [call.weight_bytes for call in calls]
    _check_memory(profile, sizes, memory_limit)
    search = StageSearch(
        forward_ms=[call.forward_ms for call in calls],
        backward_ms=None,
        forward_bytes=sizes,
        backward_bytes=sizes,
        memory_limit=memory_limit,
    )
    forward, _ = search.best(num_devices, num_microbatches)
    return assemble(len(calls), forward_pieces(forward))


def keep_together(partition: Partition, spans: Sequence[tuple[int, int]]) -> Partition:
    """The partition with every span of calls in one forward stage: cuts inside a span are taken out.

    Args:
        partition: any partition.
        spans: call positions [start, stop) that one forward stage must run.

    Raises:
        ValueError: if a span does not lie within the calls.
    """
    for start, stop in spans:
        if not 0 <= start < stop <= partition.num_calls:
            raise ValueError(f"span [{start}, {stop}) does not lie within the {partition.num_calls} calls")
    forward = [stage for stage in partition.stages if stage.kind is not StageKind.BACKWARD]
    cuts = [s.start for s in forward[1:] if not any(start < s.start < stop for start, stop in spans)]
    bounds = [0, *cuts, partition.num_calls]
    kinds = [StageKind.FORWARD] * (len(bounds) - 1)
    if partition.is_training:
        kinds[-1] = StageKind.FUSED
    pieces = [(kind, start, stop) for kind, (start, stop) in zip(kinds, pairwise(bounds), strict=True)]
    fused_start = bounds[-2]
    for stage in partition.stages:
        if stage.kind is StageKind.BACKWARD and stage.start < fused_start:
            pieces.append((StageKind.BACKWARD, stage.start, min(stage.stop, fused_start)))
    return assemble(partition.num_calls, pieces)


def _check_counts(num_devices: int, num_microbatches: int, memory_limit: int | None) -> None:
    for name, value in (("num_devices", num_devices), ("num_microbatches", num_microbatches)):
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}: pass how many there are.")
    if memory_limit is not None and memory_limit < 0:
        raise ValueError(f"memory_limit must be >= 0 bytes, got {memory_limit}: pass None for no limit.")


def _check_memory(profile: CostProfile, sizes: list[int], memory_limit: int | None) -> None:
    if memory_limit is None:
        return
    for position, (call, size) in enumerate(zip(profile.calls, sizes, strict=True)):
        if size > memory_limit:
            raise ValueError(
                f"Call {position} ({call.name!r}) needs {size} bytes on a device, {size - memory_limit} bytes over the "
                f"limit of {memory_limit} bytes per stage: cut it into smaller units, or raise the memory limit."
            )
