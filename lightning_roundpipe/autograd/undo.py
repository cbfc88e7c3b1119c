"""Buffers that a run of a unit changes on its replica: what was there before, and how it is put back.

    before = buffers_of(replica)     forward     written_buffers(replica, before)     put_back(before)     forward again

Used by the thread that holds the compute lane of the replica's device.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ..common.fingerprints import version_of
from ..weights.parameters import Replica

# (module of the replica, name, buffer, its version, its value)
Buffers = list[tuple[nn.Module, str, Tensor, int, Tensor]]


def buffers_of(replica: Replica, *, copies: bool = True) -> Buffers:
    """All of them as they are now.

    Args:
        copies: whether their values are needed.
    """
    found = []
    for _, copy, name in replica.buffers:
        buffer = copy._buffers.get(name)
        if buffer is not None:
            found.append((copy, name, buffer, version_of(buffer), buffer.detach().clone() if copies else buffer))
    return found


def written_buffers(replica: Replica, before: Buffers, *, by_value: bool = False) -> Iterator[tuple[nn.Module, str]]:
    """Those that were written since: (master module, name).

    Args:
        by_value: looks at the device as well: batch norm updates its running statistics without raising their version.
    """
    for copy, name, buffer, version, value in before:
        now = copy._buffers.get(name)
        has_value = by_value and buffer.layout is torch.strided  # of others, such as sparse ones, the version tells
        if now is not buffer or version_of(now) != version or (has_value and not torch.equal(now, value)):
            master = replica.master_of(copy)
            assert master is not None
            yield master, name


def put_back(before: Buffers) -> None:
    """They are what they were."""
    with torch.no_grad():
        for copy, name, buffer, _, value in before:
            copy._buffers[name] = buffer
            buffer.copy_(value)
