"""User options, checked when they are given: a wrong value must not cost the user a started run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

LOSS_WEIGHTS = ("samples", "label_tokens", "causal_label_tokens", "sum")


@dataclass(frozen=True)
class RoundPipeOptions:
    """Options of :class:`RoundPipeStrategy`; see there for their meaning.

    Raises:
        ValueError, TypeError: from the constructor, naming the option, its value and what is allowed.
    """

    num_microbatches: int | str = "auto"
    round_size: int | None = None
    units: Sequence[Any] | None = None
    loss_weight: str | Callable[[Any], float] = "samples"
    split_batch: Callable[[Any, int], Sequence[Any]] | None = None
    threads_per_device: int | None = None
    virtual_copies: bool = False

    def __post_init__(self) -> None:
        if self.num_microbatches != "auto":
            _check_count("num_microbatches", self.num_microbatches, "or 'auto' (two per device)")
        if self.round_size is not None:
            _check_count("round_size", self.round_size, "or None (two per device)")
        if self.threads_per_device is not None:
            _check_count("threads_per_device", self.threads_per_device, "or None (the host's threads shared evenly)")
        if not callable(self.loss_weight) and self.loss_weight not in LOSS_WEIGHTS:
            raise ValueError(
                f"loss_weight={self.loss_weight!r}: use one of {', '.join(map(repr, LOSS_WEIGHTS))}, "
                "or a function that takes a micro-batch and returns its weight"
            )
        if self.split_batch is not None and not callable(self.split_batch):
            raise TypeError(
                f"split_batch={self.split_batch!r} is not callable: pass a function "
                "(batch, num_microbatches) -> list of micro-batches"
            )
        if isinstance(self.units, (str, type)) or (self.units is not None and not self.units):
            raise TypeError(
                f"units={self.units!r}: pass a non-empty list of module classes or class names, "
                "for instance units=['LlamaDecoderLayer']"
            )
        for unit in self.units or ():
            if not isinstance(unit, (str, type)):
                raise TypeError(f"units contains {unit!r}: every entry must be a module class or the name of one")

    def microbatches_for(self, num_devices: int) -> int:
        """The wanted number of micro-batches on a pool of ``num_devices``."""
        return 2 * num_devices if isinstance(self.num_microbatches, str) else self.num_microbatches

    def round_size_for(self, num_devices: int) -> int:
        """Micro-batches per round on a pool of ``num_devices``."""
        return 2 * num_devices if self.round_size is None else self.round_size


def _check_count(name: str, value: object, otherwise: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r}: use a positive integer {otherwise}")
