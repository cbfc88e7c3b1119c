"""From a batch to weighted micro-batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...lightning_packages import PossibleUserWarning, pl
from ...options import RoundPipeOptions
from ..steps.modules import ModuleScan
from ..steps.notices import Notices
from .changes import Changes
from .loaders import Readings
from .loss_weight import LossWeights, name_of
from .microbatches import MicrobatchSplit, Sizes, batch_rows, split_batch, split_two
from .nodes import is_array
from .packed import Packed, find_packed, split_packed
from .reading import UNKNOWN, BatchSource, Role

Split = Callable[[Any, int], Any]


@dataclass
class Batches:
    """Micro-batches of one batch.

    Attributes:
        weights: share of each in means over the batch; they sum to 1.
        loss_weights: factor of each micro-batch's loss: its share, or 1 where losses are sums.
        batch_size: rows of the whole batch, None if it was not split.
        changes: what the step does to them, for the whole batch.
    """

    microbatches: tuple[Any, ...]
    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    loss_weights: tuple[float, ...]
    batch_size: int | None

    def __post_init__(self) -> None:
        self.changes = Changes(self.microbatches, self.sizes, self.weights)

    def merged(self, outputs: Sequence[Any]) -> Any:
        """What the step would have returned for the whole batch, of what it has returned for each micro-batch."""
        return self.changes.merged(outputs, self.sizes, self.weights)


class BatchSplitter:
    """Splits the batches of one run as its module and its options want it.

    Args:
        has_others: see :class:`LossWeights`.

    Attributes:
        readings: how they are read.
        weights: what weighs their micro-batches.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        options: RoundPipeOptions,
        scan: ModuleScan,
        notices: Notices,
        *,
        has_others: bool = False,
    ) -> None:
        self._scan = scan
        self._notices = notices
        self.readings = Readings(module)
        self.weights = LossWeights(module, options.loss_weight, notices, has_others=has_others)
        self._cuts_packed = options.split_batch == "packed"
        given = options.split_batch if callable(options.split_batch) else None
        self._split: Split | None = given or getattr(module, "roundpipe_split_batch", None)
        self._loss_weight = options.loss_weight

    def of(self, kind: str, batch: Any, rest: Sequence[Any]) -> Callable[[Any, int], Batches]:
        """What splits the batch of the step that is under way; arguments as of :meth:`Readings.of`."""
        return functools.partial(self._split_batch, *self.readings.of(kind, batch, rest))

    def _split_batch(self, source: BatchSource, held: dict[str, Role], batch: Any, num_microbatches: int) -> Batches:
        """At most ``num_microbatches`` micro-batches, unless a function of the user gives more.

        Raises:
            BatchSplitError: if no reading of the batch is certain, naming the leaf.
            ValueError, TypeError: if the user's function gives something else than micro-batches, or a weight is
                negative or not a number.
        """
        if self._split is not None:
            return self.weighed(self._split_by_user(self._split, batch, num_microbatches, source))
        packed = find_packed(batch) if num_microbatches > 1 else None
        if packed is not None and self._cuts_packed:
            return self.weighed(self._split_packed(batch, packed, num_microbatches))
        if packed is not None:
            self._notices.warn(
                "packed",
                f"the batch is one row of {packed.num_sequences} packed sequences, and runs whole, as one micro-batch: "
                "that is exact, but devices work one after the other. With RoundPipeStrategy(split_batch='packed') it "
                "is cut between sequences",
                category=PossibleUserWarning,
            )
            return self.weighed(MicrobatchSplit((batch,), (1,), 1))
        split = split_batch(batch, num_microbatches, min_rows=self._min_rows, source=source, held=held)
        return self.weighed(split)

    @property
    def _min_rows(self) -> int:
        return 2 if self._scan.couples_rows else 1  # batch norm refuses a single row

    def _split_packed(self, batch: Any, packed: Packed, num_microbatches: int) -> MicrobatchSplit:
        # A mean over a row is over its tokens; where labels tell, they weigh.
        in_tokens, predicts_next = self._loss_weight == "auto", self.weights.predicts_next
        return split_packed(batch, packed, num_microbatches, predicts_next=predicts_next, in_tokens=in_tokens)

    def weighed(self, split: MicrobatchSplit) -> Batches:
        """Micro-batches with what they weigh."""
        weights, loss_weights = self.weights.of(split.microbatches, split.sizes)
        return Batches(split.microbatches, split.sizes, weights, loss_weights, split.batch_size)

    def two_of(
        self, kind: str, batch: Any, rest: Sequence[Any], num_microbatches: int
    ) -> tuple[Any, MicrobatchSplit] | None:
        """The rows of two micro-batches of a batch, together and one by one; None if there are no two.

        Raises:
            Exception: what splitting the batch raises.
        """
        source, held = self.readings.of(kind, batch, rest)
        packed = find_packed(batch) if self._split is None else None
        if self._split is None and packed is None:
            return split_two(batch, num_microbatches, min_rows=self._min_rows, source=source, held=held)
        split: Split
        if self._split is not None:
            split = self._split
        elif self._cuts_packed:
            split = self._cut_packed
        else:
            return None
        together = split(batch, max(1, num_microbatches // 2))[0]
        parts = tuple(split(together, 2))
        sizes, _ = _sizes_of(parts, UNKNOWN, self._loss_weight)
        return None if len(parts) != 2 else (together, MicrobatchSplit(parts, sizes, None))

    def _cut_packed(self, batch: Any, num_microbatches: int) -> Sequence[Any]:
        packed = find_packed(batch)
        return (batch,) if packed is None else self._split_packed(batch, packed, num_microbatches).microbatches

    def _split_by_user(self, split: Split, batch: Any, num_microbatches: int, source: BatchSource) -> MicrobatchSplit:
        microbatches = _checked(split, split(batch, num_microbatches), batch)
        sizes, is_certain = _sizes_of(microbatches, source, self._loss_weight)
        if not is_certain and self._loss_weight in ("auto", "samples") and len(microbatches) > 1:
            self._notices.warn(
                "rows",
                f"how many samples the {len(microbatches)} micro-batches of {name_of(split)} have cannot be told, and "
                f"they weigh as if it were {', '.join(map(str, sizes))}. If that is wrong, give the number: "
                "RoundPipeStrategy(loss_weight=function from a micro-batch to its number of samples)",
                category=PossibleUserWarning,
            )
        return MicrobatchSplit(microbatches, sizes, sum(sizes) if is_certain else None)


def _checked(split: Split, parts: Any, batch: Any) -> tuple[Any, ...]:
    """What a user's function returned, if it is a list of micro-batches."""
    what = f"{name_of(split)} returned %s for a batch of type {type(batch).__name__}: return a list of micro-batches"
    if isinstance(parts, (Tensor, Mapping, str, bytes)) or not isinstance(parts, Iterable):
        given = f"a tensor of shape {tuple(parts.shape)}" if isinstance(parts, Tensor) else repr(parts)[:80]
        raise TypeError(what % (given if parts is None else f"{given} ({type(parts).__name__})"))
    microbatches = tuple(parts)
    if not microbatches:
        raise ValueError(what % "no micro-batch")
    return microbatches


def _sizes_of(microbatches: tuple[Any, ...], source: BatchSource, loss_weight: Any) -> tuple[Sizes, bool]:
    """Rows of the micro-batches that a user's function made, and whether that is certain."""
    counters = (_rows_in, _length_of, _graphs_in)
    readings = [[n for part in microbatches if (n := count(part)) is not None] for count in counters]
    readings = [found if len(found) == len(microbatches) else [] for found in readings]
    complete = [found for found in readings if found]
    if any(sum(found) in source.sizes for found in complete):
        return Sizes(next(found for found in complete if sum(found) in source.sizes), complete), True
    if callable(loss_weight):  # what it counts outputs may have a row of
        given = [float(loss_weight(microbatch)) for microbatch in microbatches]
        complete += [[int(n) for n in given]] if all(n.is_integer() for n in given) else []
    # A list may hold columns; an object that has a length has it for a reason.
    own = [] if any(isinstance(microbatch, list) for microbatch in microbatches) or source.sizes else readings[1:]
    rows = next((found for found in (readings[0], *own) if found), None)
    if rows is not None:
        return Sizes(rows, complete), not source.sizes or sum(rows) <= source.sizes[0]
    return Sizes((1,) * len(microbatches), complete), False


def _rows_in(microbatch: Any) -> int | None:
    rows = batch_rows(microbatch)
    if rows is None and not isinstance(microbatch, Mapping):  # an object may have rows in its attributes
        arrays = {name: value for name, value in getattr(microbatch, "__dict__", {}).items() if is_array(value)}
        rows = batch_rows(arrays)
    return rows


def _length_of(microbatch: Any) -> int | None:
    is_record = isinstance(microbatch, (Mapping, tuple, str, Tensor))
    return len(microbatch) if isinstance(microbatch, Sized) and not is_record else None


def _graphs_in(microbatch: Any) -> int | None:
    found = getattr(microbatch, "num_graphs", None)
    return found if isinstance(found, int) else None
