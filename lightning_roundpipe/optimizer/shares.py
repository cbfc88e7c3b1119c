"""Which weights are updated together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from ..common.sizes import extent_of, num_bytes_of

# Shares of less are not worth their own call of the optimizer.
SHARE_BYTES = 16 * 2**20


def tied(weights: Iterable[nn.Parameter]) -> dict[nn.Parameter, list[nn.Parameter]]:
    """Weights whose memory overlaps, by weight, where there are several."""
    extents = []
    for weight in weights:
        if weight.numel() and weight.layout is torch.strided:
            first, stop = extent_of(weight)
            start = weight.data_ptr()
            extents.append((start, start + (stop - first) * weight.element_size(), weight))
    groups: list[list[nn.Parameter]] = []
    end = 0
    for start, stop, weight in sorted(extents, key=lambda extent: extent[0]):
        if start >= end:
            groups.append([])
        groups[-1].append(weight)
        end = max(end, stop)
    return {weight: group for group in groups if len(group) > 1 for weight in group}


def shares_of(
    weights: Iterable[nn.Parameter],
    order: Sequence[Iterable[nn.Parameter]],
    ties: Mapping[nn.Parameter, Sequence[nn.Parameter]],
) -> list[list[nn.Parameter]]:
    """The weights that are to be updated, in the order in which they are needed, a few MiB at a time; those in the same
    memory together."""
    left = dict.fromkeys(weights)
    shares: list[list[nn.Parameter]] = []
    num_bytes = SHARE_BYTES
    for group in [*order, list(left)]:
        fresh = [p for first in group if first in left for p in ties.get(first, (first,)) if p in left]
        for parameter in (fresh := list(dict.fromkeys(fresh))):
            del left[parameter]
        if not fresh:
            continue
        if num_bytes >= SHARE_BYTES:
            shares.append([])
            num_bytes = 0
        shares[-1].extend(fresh)
        num_bytes += num_bytes_of(fresh)
    return shares
