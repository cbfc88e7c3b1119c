"""What two trials of the same rows show: what differs, and what it means for the training."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...common.errors import UnpreparedError
from ...common.trees import mapped
from ...devices.device import DeviceLostError
from ...devices.memory import DeviceOutOfMemoryError
from ...planning.plan import StageMemoryError
from ..batches.merging import merge_outputs
from ..batches.splitting import Batches
from ..steps.modules import ModuleScan
from .causes import cause_of_log, cause_of_loss
from .comparison import Difference, are_close, differences, told_apart
from .draws import Draws
from .trial import Outcome, Trials

_log = logging.getLogger("lightning_roundpipe")
_MOST_NAMED = 3
# Errors of a trial that the step would not have.
NOT_OF_THE_USER = (DeviceLostError, DeviceOutOfMemoryError, StageMemoryError, UnpreparedError, torch.OutOfMemoryError)


class TrialError(Exception):
    """The user's step has failed in a trial; its cause is the error.

    Attributes:
        is_of_parts: whether it has not failed with the same rows as one micro-batch.
    """

    def __init__(self, *, is_of_parts: bool) -> None:
        super().__init__()
        self.is_of_parts = is_of_parts


@dataclass
class Finding:
    """What the proof has found.

    Attributes:
        decisive: what makes the training another one, in sentences.
        others: what only looks different.
        way: out of the former, besides numbers of micro-batches.
        is_certain: whether it is the splitting; otherwise the step may fail with the whole batch as well.
        can_be_split: whether it is no error to split all the same.
    """

    decisive: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    way: str = ""
    is_certain: bool = True
    can_be_split: bool = True


@dataclass
class Pair:
    """Rows of two micro-batches.

    Attributes:
        call: the user's step on a micro-batch.
        together: the rows as one micro-batch.
        seed: of what they draw.
    """

    kind: str
    call: Callable[[Any], Any]
    together: Any
    whole: Batches
    parts: Batches
    seed: int

    @property
    def rows(self) -> int:
        """How many there are."""
        return sum(self.parts.sizes)

    def tried(self, trials: Trials, times: int = 1) -> tuple[Outcome, Outcome]:
        """The outcomes of both.

        Raises:
            TrialError: if the user's step fails.
        """
        draws = Draws(self.seed, self.parts.sizes)
        one = self._tried(trials, (self.together,), self.whole, draws, times)
        other = self._tried(trials, self.parts.microbatches, self.parts, draws, times)
        other.are_draws_lost = draws.are_lost
        return one, other

    def _tried(self, trials: Trials, given: tuple[Any, ...], batches: Batches, draws: Draws, times: int) -> Outcome:
        """A trial with containers of its own: a step may take entries out of its batch."""
        batch = mapped(self.together, anew=object)
        own = (batch,) if len(given) == 1 else tuple(mapped(part, anew=object) for part in given)
        made = Batches(own, batches.sizes, batches.weights, batches.loss_weights, batches.batch_size)
        try:
            return trials.run(self.kind, self.call, made, batch, draws, times=times)
        except NOT_OF_THE_USER:
            raise
        except Exception as error:
            raise TrialError(is_of_parts=len(given) > 1) from error


def fits(one: Outcome, other: Outcome, loss_weights: Sequence[float], rounding: float) -> bool:
    """Whether the loss of the rows as one micro-batch is that of the parts with these weights, as far as is known."""
    whole, merged, values = _losses(one, other, loss_weights)
    return whole is None or merged is None or are_close(whole, merged, rounding, beside=values)


def _losses(
    one: Outcome, other: Outcome, loss_weights: Sequence[float]
) -> tuple[float | None, float | None, list[float]]:
    """The loss of the rows as one micro-batch, that of the parts together, and those of the parts that count."""
    whole, *parts = map(_number, (*one.losses, *other.losses)) if one.losses else [None]
    used = [(value, weight) for value, weight in zip(parts, loss_weights, strict=False) if value is not None and weight]
    return whole, math.fsum(value * weight for value, weight in used) if used else None, [value for value, _ in used]


class Comparison:
    """Of the outcomes of two trials."""

    def __init__(
        self, scan: ModuleScan, trials: Trials, pair: Pair, one: Outcome, other: Outcome, rounding: float
    ) -> None:
        self._scan = scan
        self._trials = trials
        self._pair = pair
        self._one = one
        self._other = other
        self._rounding = rounding
        self._rows = f"{pair.rows} rows"

    def finding(self) -> Finding:
        """What differs, and what it means."""
        finding, kind = Finding(), self._pair.kind
        self._look_at_writes(finding)
        if finding.decisive:  # what else differs may differ because of it
            finding.can_be_split = False
            return finding
        if self._other.are_draws_lost:
            _log.debug("values of %s are not compared: it draws random numbers that rows cannot be given", kind)
            return finding
        self._look_at_loss(finding, self._one, self._other)
        finding.others += [*self._of_logs(), *self._of_outputs()]
        if not finding.decisive:
            self._look_at_what_is_left(finding)
        return finding

    def _look_at_writes(self, finding: Finding) -> None:
        kind, written = self._pair.kind, self._one.written
        names = [name for name, _ in self._scan.parameters() if name in written]
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            finding.decisive.append(
                f"{kind}, or code that it calls, changes the weight {names[0]!r}{more} in place, which would happen in "
                "every micro-batch"
            )
            finding.way = "make the change in on_train_batch_end or another hook that runs once per batch"
        if any(self._one.num_scheduler_steps):
            finding.decisive.append(f"{kind} steps a learning rate scheduler, which would happen in every micro-batch")
            finding.way = 'let Lightning step it ("interval": "step" in configure_optimizers)'
        if any(name.startswith("batch") for name in written):
            found = next(differences(self._one.batch, self._other.batch, self._rounding, "batch"), None)
            if found is not None:
                finding.decisive.append(f"{kind} changes {found.path} in place, which is {self._told(found)}")

    def _look_at_loss(self, finding: Finding, one: Outcome, other: Outcome, whose: str = "") -> None:
        whole, merged, values = _losses(one, other, self._pair.parts.loss_weights)
        if whole is None or merged is None:
            if whole is not merged:
                finding.decisive.append(f"{self._pair.kind} has a loss for {self._rows} or for parts of them, not both")
            return
        if are_close(whole, merged, self._rounding, beside=values):
            return
        told = self._told(Difference("", *told_apart(whole, merged)))
        text = f"splitting the batch changes the loss{whose}, which is {told}"
        if not whose and len(values) == 2:
            cause, finding.way = cause_of_loss(self._scan, self._pair.parts, whole, values, one.square, self._rounding)
            text += f", probably because {cause}"
        finding.decisive.append(text)

    def _of_logs(self) -> list[str]:
        logged, merged = self._one.logs.values(self._pair.whole), self._other.logs.values(self._pair.parts)
        return [
            f"the value that is logged as {name!r} is {self._told(found)}: "
            + cause_of_log(logged[name], self._other.logs.parts_of(name), self._rounding)
            for name in logged
            if name in merged
            for found in differences(logged[name], merged[name], self._rounding)
        ][:_MOST_NAMED]

    def _of_outputs(self) -> list[str]:
        kind, outputs = self._pair.kind, [*self._one.outputs, *self._other.outputs]
        if kind == "training_step":
            if self._one.ends_early or not isinstance(outputs[0], Mapping):
                return []
            outputs = [{key: value for key, value in output.items() if key != "loss"} for output in outputs]
        merged = merge_outputs(outputs[1:], self._pair.parts.sizes, self._pair.parts.weights)
        found = differences(outputs[0], merged, self._rounding, "output")
        return [f"what {kind} returns differs: {one.path} is {self._told(one)}" for one in found][:_MOST_NAMED]

    def _look_at_what_is_left(self, finding: Finding) -> None:
        """See [Note: the proof]."""
        changed = list(self._changed())
        if not changed:
            return
        try:
            second = self._pair.tried(self._trials, times=2)
        except (TrialError, *NOT_OF_THE_USER) as error:
            _log.debug("a second step after the first is not tried: %r", error.__cause__ or error)
        else:
            self._look_at_loss(finding, *second, whose=" of a second step")
            if finding.decisive:
                finding.decisive[-1] += f", probably because the step before leaves a state in {changed[0]!r}"
                return
        for name in list(filter(self._is_told, changed))[:_MOST_NAMED]:
            one, other = self._one.left.get(name), self._other.left.get(name)
            told = next((d for d in differences(one, other, self._rounding) if not d.is_of_rows), None)
            what = "" if told is None else f": {name}{told.path} is {self._told(told)}"
            finding.others.append(f"what {self._pair.kind} leaves in {name!r} differs{what}")

    def _changed(self) -> Iterator[str]:
        """What differs of what is left."""
        one, other = self._one.left, self._other.left
        for name in dict.fromkeys([*one, *other]):
            is_in_both = name in one and name in other
            if not is_in_both or next(differences(one[name], other[name], self._rounding), None) is not None:
                yield name

    def _is_told(self, name: str) -> bool:
        """Whether a difference matters by itself."""
        values = [left[name] for left in (self._one.left, self._other.left) if name in left]
        if len(values) == 2 and all(found.is_of_rows for found in differences(values[0], values[1], self._rounding)):
            return False  # the rows of the last micro-batch: no code reads them, or the second step would differ
        if name in self._one.activations:
            return False  # of this step, for the same reason
        if name in self._one.buffers | self._other.buffers or any(isinstance(one, (list, dict)) for one in values):
            return True
        prefix, _, _ = name.rpartition(".")
        if prefix not in [path for path, _ in self._scan.lightning_modules]:
            return False
        return all(isinstance(one, (int, float)) or (isinstance(one, Tensor) and one.ndim == 0) for one in values)

    def _told(self, difference: Difference) -> str:
        return f"{difference.whole} for {self._rows} as one micro-batch and {difference.split} as two"


def _number(loss: Tensor | None) -> float | None:
    """None as well for a loss that is no scalar, which the step refuses."""
    return float(loss.detach()) if loss is not None and loss.numel() == 1 else None
