"""The rows of all micro-batches, for losses that compare the rows of a batch with each other.

[Note: whole batches]
In a step every micro-batch brings its rows to an exchange ([Note: exchanges] in :mod:`engine.barrier`), and gets those
of all, in the order of the micro-batches; with several ranks, in the order of the ranks. All compute the loss of the
whole batch then, so that its mean over micro-batches is that loss, and each has a part of the gradient of the rows,
according to its weight. The sum of these parts is the gradient, of which each micro-batch goes on with its own rows::

    encoder(views 0) --> z0 --+-- whole_batch --> z --> loss(z), weight w0 --> w0 dL/dz --+-- sum --> dL/dz0 --> encoder
    encoder(views 1) --> z1 --+-- whole_batch --> z --> loss(z), weight w1 --> w1 dL/dz --+   '-----> dL/dz1 --> encoder

Ranks tell each other their rows and gradients on the thread of the Trainer, once per exchange. In a trial of the proof
each has its own rows alone, since other ranks may not try any.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...common import trees
from ...engine.barrier import Barrier, Collective, meet
from ...ranks.group import ALONE, RankGroup
from ...usercode.lock import UserCodeState, current

T = TypeVar("T")
# The ranks of the step that runs, and whether this one has rows of its own; micro-batches take the context over.
_ranks: ContextVar[tuple[RankGroup, bool]] = ContextVar("roundpipe_ranks", default=(ALONE, True))
# What micro-batches bring: a tensor, and whether it has a gradient.
_Brought = list[tuple[Tensor, bool]]


def whole_batch(x: T) -> T:
    """The rows of all micro-batches, and of all ranks, with gradients that flow back to each: for a loss over the whole
    batch, which then trains as if the batch were not split.

        image, text = lightning_roundpipe.whole_batch((self.image(batch), self.text(batch)))
        return clip_loss(image, text)

    Every micro-batch gets the same rows, and should return the loss of all of them, or of its own rows against all.
    Rows are in the order of the batch. All micro-batches must call it equally often, outside of units: not in the
    ``forward`` of a layer. What is called on the result runs on the whole batch, in every micro-batch.

    ``x`` itself where there is nothing to gather: outside of a step, with one micro-batch, with other strategies (use
    ``self.all_gather(x, sync_grads=True)`` for the ranks of DDP).

    Args:
        x: a tensor with a row per sample, or nested containers of such tensors.

    Raises:
        TypeError, ValueError: for anything else, and for rows that differ in shape or dtype between micro-batches.
        RuntimeError: inside a unit, or an activation checkpoint.
        BarrierError: if micro-batches do not make the same calls.
    """
    state, (group, has_rows) = current(), _ranks.get()
    if state is None or state.meet is None or (state.is_alone and group is ALONE):
        return x
    _check_place(state)
    tensors: list[Any] = []
    structure = trees.flatten(x, tensors)
    for tensor in tensors:
        _check_rows(tensor)
    exchange = _Exchange(group, has_rows)
    _, gathered = meet(
        Collective(
            "whole_batch",
            ("whole_batch", len(tensors)),
            exchange.forward,
            takes_gradients=False,
            tensors=[tensor.cpu() for tensor in tensors],
            backward=exchange.backward,
        )
    )
    there = [rows.to(tensor.device) for rows, tensor in zip(gathered, tensors, strict=True)]
    return trees.unflatten(structure, there)  # type: ignore[no-any-return]


@contextlib.contextmanager
def gathered_over(group: RankGroup, *, has_rows: bool) -> Iterator[None]:
    """While open, steps that the calling thread runs gather the rows of all ranks of ``group``, too.

    Args:
        has_rows: whether those of this rank count.
    """
    token = _ranks.set((group, has_rows))
    try:
        yield
    finally:
        _ranks.reset(token)


def _check_place(state: UserCodeState) -> None:
    if state.unit_writes is not None or state.call_unit is None:
        raise RuntimeError(
            "whole_batch is called inside a unit, which runs by itself for each micro-batch, and once more for the "
            "backward. Return what it needs (router logits, for instance) from the module, and call whole_batch in "
            "training_step; or RoundPipeStrategy(num_microbatches=1)"
        )
    if torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            "whole_batch is called in a backward, by an activation checkpoint around it that runs its function again: "
            "call it outside of the checkpoint"
        )


def _check_rows(tensor: Any) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"whole_batch got a {type(tensor).__name__} ({tensor!r:.80}): it gathers tensors with a row per sample, "
            "and nested containers of them"
        )
    if tensor.layout is not torch.strided or tensor.dim() == 0:
        what = "no dimension" if tensor.dim() == 0 else f"the layout {tensor.layout}"
        raise ValueError(f"whole_batch got a tensor of {what}: it gathers dense tensors with a row per sample")


class _Exchange:
    """One call of :func:`whole_batch`, as the first micro-batch makes it; for the thread of the Trainer.

    Args:
        has_rows: whether this rank has any.
    """

    def __init__(self, group: RankGroup, has_rows: bool) -> None:
        self._group = group
        self._has_rows = has_rows
        self._sizes: list[list[int]] = []  # of each tensor, for each micro-batch
        self._starts: list[int] = []  # of each tensor, where the rows of this rank begin

    def forward(self, barrier: Barrier) -> list[_Brought]:
        """For each micro-batch all rows of each tensor, and whether they have gradients."""
        parts: Sequence[_Brought] = barrier.values
        self._check_alike([[tensor for tensor, _ in part] for part in parts], "micro-batch")
        mine = [
            (torch.cat([tensor for tensor, _ in column]), any(has_gradient for _, has_gradient in column))
            for column in zip(*parts, strict=True)
        ]
        self._sizes = [[len(tensor) for tensor, _ in column] for column in zip(*parts, strict=True)]
        if self._group is ALONE:
            self._starts = [0] * len(mine)
            return [mine] * len(parts)
        sent = mine if self._has_rows else [(tensor[:0], has_gradient) for tensor, has_gradient in mine]
        ranks: list[_Brought] = self._group.gather(sent, "rows of whole_batch")
        self._check_alike([[tensor for tensor, _ in part] for part in ranks], "rank")
        before = ranks[: self._group.rank]
        self._starts = [sum(len(part[i][0]) for part in before) for i in range(len(mine))]
        whole = [
            (torch.cat([tensor for tensor, _ in column]), any(has_gradient for _, has_gradient in column))
            for column in zip(*ranks, strict=True)
        ]
        return [whole] * len(parts)

    def backward(self, barrier: Barrier) -> list[list[Tensor | None]]:
        """For each micro-batch the gradients of its own rows of each tensor."""
        sums = [_total([found.get(i) for found in barrier.values]) for i in range(len(self._sizes))]
        if self._group is not ALONE:
            ranks = self._group.gather(sums, "gradients of whole_batch")
            sums = [_total(column) for column in zip(*ranks, strict=True)]
        found: list[list[Tensor | None]] = [[] for _ in barrier.values]
        for total, sizes, start in zip(sums, self._sizes, self._starts, strict=True):
            own = None
            if total is not None and self._has_rows:
                own = torch.split(total[start : start + sum(sizes)], sizes)
            for index, gradients in enumerate(found):
                gradients.append(None if own is None else own[index].clone())
        return found

    @staticmethod
    def _check_alike(parts: Sequence[Sequence[Tensor]], what: str) -> None:
        """Raises:
        ValueError: for rows that cannot be joined.
        """
        for index, part in enumerate(parts):
            for first, other in zip(parts[0], part, strict=True):
                if first.shape[1:] != other.shape[1:] or first.dtype != other.dtype:
                    raise ValueError(
                        f"whole_batch joins rows of one shape and dtype: those of {what} 0 are "
                        f"{_described(first)}, and those of {what} {index} {_described(other)}. Pad them to the same "
                        "shape first"
                    )


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def _total(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """The sum of those that there are, made in float32 at least; None if there are none."""
    there = [gradient for gradient in gradients if gradient is not None]
    if not there:
        return None
    total = there[0].to(torch.promote_types(there[0].dtype, torch.float32))
    for other in there[1:]:
        total = total + other
    return total.to(there[0].dtype)
