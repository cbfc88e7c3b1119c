"""Weights and buffers of rank 0, which all ranks begin with, and its buffers, which they go on with."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from ..common.fingerprints import version_of
from .failures import RankError
from .group import ALONE, RankGroup


def share_state(group: RankGroup, module: nn.Module) -> None:
    """Fills weights and buffers with those of rank 0.

    Raises:
        RankError: if the module of another rank has others, naming the first.
    """
    if group is ALONE:
        return
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    mine = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors.items()]
    for rank, theirs in enumerate(group.gather(mine, "the names and shapes of all weights")):
        if theirs != mine:
            pairs = zip([*mine, "nothing more"], [*theirs, "nothing more"], strict=False)
            one, other = next((one, other) for one, other in pairs if one != other)
            raise RankError(f"ranks have different models: rank {group.rank} has {one}, rank {rank} has {other} there")
    group.copy_from(tensors.values(), "the weights of rank 0")


class SharedBuffers:
    """Which buffers have changed since all ranks had those of rank 0. Used by the Trainer's thread."""

    def __init__(self) -> None:
        self._versions: list[tuple[int, int]] = []

    def start(self, module: nn.Module) -> None:
        """All ranks have the same now."""
        self._versions = _versions_of(module.buffers())

    def share(self, group: RankGroup, module: nn.Module) -> None:
        """Fills those that have changed on any rank with those of rank 0; a collective, if there are any buffers."""
        buffers = list(module.buffers())
        if not buffers:
            return
        versions = _versions_of(buffers)
        known = self._versions if len(self._versions) == len(versions) else [(0, -1)] * len(versions)
        changed = [float(one != other) for one, other in zip(versions, known, strict=True)]
        flags = group.exchange(changed, "the changes of buffers")
        some = [buffer for buffer, *flag in zip(buffers, *flags, strict=True) if any(flag)]
        group.copy_from(some, "the buffers of rank 0")
        self.start(module)


def _versions_of(buffers: Iterable[Tensor]) -> list[tuple[int, int]]:
    return [(id(buffer), version_of(buffer)) for buffer in buffers]
