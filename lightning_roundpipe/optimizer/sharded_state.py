"""The state of a sharded optimizer in one piece, for checkpoints; see [Note: sharded optimizer] in :mod:`sharding`.

::

    all ranks     tell what they have: names, small values, and the shapes of large tensors
    tensor        by tensor: its owner sends it; rank 0 keeps it

So no rank but the first ever holds more than its own part and one tensor. A file says nothing about ranks: each
takes what it owns when it loads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .sharding import Shards

# Smaller tensors travel with the names.
_LARGE_BYTES = 4096


@dataclass(frozen=True)
class _Large:
    """A tensor that follows."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def gathered_state(optimizer: Optimizer, shards: Shards, what: str) -> dict[str, Any]:
    """What ``optimizer.state_dict()`` would be without shards, on rank 0; elsewhere what this rank has. All ranks call
    this.

    Raises:
        RankError: if another rank does not, or has failed.
    """
    group, own = shards.group, own_part(optimizer.state_dict(), optimizer, shards)
    told = {index: {key: _described(value) for key, value in entry.items()} for index, entry in own["state"].items()}
    state: dict[int, dict[str, Any]] = {}
    for rank, entries in enumerate(group.gather(told, f"what there is of {what}")):
        for index, entry in entries.items():
            state[index] = dict(entry)
            for key, value in entry.items():
                if isinstance(value, _Large):
                    is_mine = rank == group.rank
                    tensor = own["state"][index][key] if is_mine else torch.empty(value.shape, dtype=value.dtype)
                    group.copy_from([tensor], f"{key!r} of weight {index} of {what}", rank)
                    state[index][key] = tensor if group.rank == 0 else None
    return {**own, "state": dict(sorted(state.items()))} if group.rank == 0 else own


def own_part(state: Mapping[str, Any], optimizer: Optimizer, shards: Shards) -> dict[str, Any]:
    """What this rank needs of the state of a whole optimizer, by the positions of its weights."""
    weights: list[nn.Parameter] = [weight for group in optimizer.param_groups for weight in group["params"]]
    mine = {index for index, weight in enumerate(weights) if shards.is_mine(weight)}
    return {**state, "state": {index: entry for index, entry in state["state"].items() if index in mine}}


def _described(value: Any) -> Any:
    is_large = isinstance(value, Tensor) and value.nbytes >= _LARGE_BYTES
    return _Large(tuple(value.shape), value.dtype) if is_large else value
