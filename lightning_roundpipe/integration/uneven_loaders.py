"""Training loaders of ranks that have different numbers of batches.

[Note: uneven inputs]
What one rank does in a step with others, all must do: a rank whose batches are over would let the others wait. So it
goes on with a copy of its last batch, without weight in the step, until the batches of all ranks are over::

    rank 0     a | b | c | d | e        weights  1/2  1/2  1/2   1    1
    rank 1     f | g | h | h | h                 1/2  1/2  1/2   0    0

Everything that the step does on all ranks, also in code of the user, so happens on all. Where all loaders know their
length, all go on to the largest; otherwise ranks tell each other before each batch whether they have one. Loaders that
have the same length everywhere, as those with a ``DistributedSampler``, stay as they are; so do those of evaluation.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from typing import Any

from ..lightning_packages import MisconfigurationException, has_iterable_dataset, sized_len
from ..ranks.group import RankGroup

_OWN = frozenset({"unwrapped", "_group", "_name", "_length", "has_data"})


class UnevenLoaders:
    """The training loaders of a run, until it gets others. Used by the Trainer's thread.

    Attributes:
        has_data: whether the batch that arrived last is one of the rank's own.
    """

    def __init__(self) -> None:
        self.has_data = True
        self._loaders: list[UnevenLoader] = []
        self._num_loaders = 0

    def wrapped(self, loader: Any, group: RankGroup) -> Any:
        """A loader that gives as many batches on all ranks; the same object if it does so by itself.

        Raises:
            RankError: if ranks have different numbers of loaders.
        """
        self._num_loaders += 1
        name = f"training loader {self._num_loaders}"
        length = None if has_iterable_dataset(loader) else sized_len(loader)
        lengths = [int(row[0]) for row in group.exchange([-1 if length is None else length], f"the length of {name}")]
        if min(lengths) >= 0 and len(set(lengths)) == 1:
            return loader
        self._loaders.append(UnevenLoader(loader, group, name, None if min(lengths) < 0 else max(lengths)))
        return self._loaders[-1]

    def check(self, batch: object) -> None:
        """Before a training step.

        Raises:
            MisconfigurationException: for a step that takes its batches itself: it would train with the copies.
        """
        if self._loaders and isinstance(batch, Iterator):
            raise MisconfigurationException(
                "training_step(self, dataloader_iter) takes batches itself, and ranks have different numbers of "
                "batches: which ones have no weight would not be known. Take the batch as the argument, or give all "
                "ranks as many batches (drop_last=True of the sampler, or limit_train_batches)"
            )

    def arrives(self) -> None:
        """A batch that was taken from all loaders is about to be trained with."""
        flags = [loader.has_data.popleft() for loader in self._loaders if loader.has_data]
        self.has_data = not flags or any(flags) or len(self._loaders) < self._num_loaders


class UnevenLoader:
    """A loader that goes on until those of all ranks have ended; otherwise it is the loader that it is made from.

    Args:
        loader: that it is made from; ``unwrapped``.
        length: the largest of all ranks; None if ranks must ask each other.

    Attributes:
        has_data: for each batch that was taken since the start, and has not arrived, whether it is the rank's own.
    """

    def __init__(self, loader: Any, group: RankGroup, name: str, length: int | None) -> None:
        self.unwrapped = loader
        self._group = group
        self._name = name
        self._length = length
        self.has_data: deque[bool] = deque()

    def __iter__(self) -> Iterator[Any]:
        self.has_data.clear()
        batches, last, index = iter(self.unwrapped), None, 0
        has_data, is_copy = True, False
        while self._length is None or index < self._length:
            batch = next(batches, self) if has_data else self
            has_data = batch is not self
            if self._length is None:
                flags = self._group.exchange([float(has_data)], f"batch {index} of {self._name}")
                if not any(flag for (flag,) in flags):
                    return
            if not has_data and not index:
                raise ValueError(
                    f"{self._name} has no batch at all on rank {self._group.rank}, but others have: every rank needs "
                    "one batch at least"
                )
            if has_data:
                last = batch
            elif not is_copy:  # steps may have changed it
                last, is_copy = copy.deepcopy(last), True
            self.has_data.append(has_data)
            index += 1
            yield last

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"{self._name} has no length that all ranks know")
        return self._length

    def __getattr__(self, name: str) -> Any:
        if name in _OWN or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.unwrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            super().__setattr__(name, value)
        else:
            setattr(self.unwrapped, name, value)
