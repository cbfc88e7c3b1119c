"""What the engine is asked to run, and what comes out: of a step, and of one micro-batch in it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ..devices.device import Run
from ..planning.partition import Partition
from ..planning.schedule import Schedule
from ..planning.timeline import Timeline
from ..ranks.reduction import StepReduction
from ..usercode.collected_lists import Merge
from ..weights.units import Unit


@dataclass(frozen=True)
class StepRequest:
    """What to run.

    Attributes:
        function: the user's step; called once per micro-batch, on a thread of its own.
        microbatches: its argument, one per micro-batch.
        weights: of the micro-batches in the loss; they need not sum to 1 (the engine does not normalise).
        key: calls with the same key are expected to call the same units in the same order.
        seed: identifies the step: same seed, same random numbers.
        loss_of: picks the loss from the function's result, None where there is none; None for evaluation.
        merge: merges what micro-batches appended to a list, see :data:`collected_lists.Merge`.
        autocast_device: device type of autocast, ``"cpu"`` or that of the GPUs.
        meets: whether the function runs its backward itself, by :func:`barrier.meet`; then ``loss_of`` is None and
            ``weights`` are not used.
        reduction: adds the gradients up over ranks while the backward goes on; None where that is not to be done.
        is_trained: whether a tensor that is no parameter is trained like one.
        is_trial: whether the step is only tried: its micro-batches draw the same numbers, and units run as they are.
    """

    function: Callable[[Any], Any]
    microbatches: Sequence[Any]
    weights: Sequence[float]
    key: Hashable
    seed: int
    loss_of: Callable[[Any], Tensor | None] | None = None
    merge: Merge | None = None
    autocast_device: str = "cpu"
    meets: bool = False
    reduction: StepReduction | None = None
    is_trained: Callable[[Tensor], bool] = lambda tensor: False
    is_trial: bool = False

    @property
    def training(self) -> bool:
        """Whether there is a backward."""
        return self.meets or self.loss_of is not None


@dataclass
class StepResult:
    """What came out.

    A step with barriers has several runs over schedules: the schedule and the partition are those of the run with most
    calls.

    Attributes:
        outputs: the function's results, in micro-batch order.
        gradients: master weight -> weighted sum of its gradients (host, the weight's shape and dtype).
        timeline_of: makes ``timeline``, when it is asked for: most steps never are.
        schedule: what was run; None if the step only recorded. It numbers the micro-batches that ran by the plan: in
            the first step with a key its micro-batch 0 is number 1 everywhere else, because number 0 was recorded.
        partition: the stages it was run in, or, if the step only recorded, those of the next step.
        num_microbatches: how many there were.
        has_met: whether they have met, see [Note: barriers] in :mod:`barrier`.
        num_off_plan: unit calls that the plan did not foresee.
        step_ms: wall-clock time of the step, without the planning of the next one.
        bytes_up, bytes_down: per device, bytes that were copied to it and from it: weights, buffers, gradients, and
            inputs of calls. Gradients on their way through user code are not counted.
        saved_bytes: bytes of activations that were kept on the host at most, if all micro-batches had theirs there.
        peak_memory_bytes: per device, the most bytes of tensors on it at a time, since the process began; None if it
            is not known.
        replanned: whether the next step has another plan.
    """

    outputs: list[Any]
    gradients: dict[nn.Parameter, Tensor]
    timeline_of: Callable[[], Timeline]
    schedule: Schedule | None = None
    partition: Partition | None = None
    num_microbatches: int = 0
    has_met: bool = False
    num_off_plan: int = 0
    step_ms: float = 0.0
    bytes_up: tuple[int, ...] = ()
    bytes_down: tuple[int, ...] = ()
    saved_bytes: int = 0
    peak_memory_bytes: tuple[int | None, ...] = ()
    replanned: bool = False

    @functools.cached_property
    def timeline(self) -> Timeline:
        """Compute spans of the scheduled part; waits and transfers as well if the step was traced. On GPUs without what
        a device has not reached when this is asked for first, and empty where runs were not timed: see
        :attr:`Engine.times_steps`."""
        return self.timeline_of()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "timeline_of": None, "timeline": self.timeline}


@dataclass
class SegmentRecord:
    """What one micro-batch did in one run over a schedule; written by its thread alone while that runs.

    Attributes:
        index: of the micro-batch.
        called: units in the order of their calls.
        revived: calls of earlier segments whose backward came in this one: index in the micro-batch -> unit.
        runs: of units, and of user code in the backward.
        num_off_plan: calls that the plan did not foresee.
        has_backward: whether its backward has begun.
        peak_bytes: the most it took of its device when it ran alone; 0 if that is not known.
    """

    index: int
    called: list[Unit] = field(default_factory=list)
    revived: dict[int, Unit] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    num_off_plan: int = 0
    has_backward: bool = False
    peak_bytes: int = 0

    @property
    def carried(self) -> tuple[int, ...]:
        """Indices of the calls of earlier segments whose backward came in this one."""
        return tuple(sorted(self.revived))

    @property
    def sequence(self) -> tuple[Unit, ...]:
        """The units of those calls, and of the calls of this segment."""
        return (*(self.revived[index] for index in self.carried), *self.called)
