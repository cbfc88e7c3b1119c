"""What page-locks memory where no device is needed: it keeps the books, and locks nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_roundpipe.devices.gpu.cuda import PageLocker
from lightning_roundpipe.devices.gpu.pinned import PageLockedMemory


class PageLocks(PageLocker):
    """In the place of a driver's.

    Attributes:
        host: the memory for which it locks.
        locked: address -> bytes.
        refuses: error code of the next page-locks; 0 for none.
    """

    def __init__(self) -> None:
        self.host = PageLockedMemory(self)
        self.locked: dict[int, int] = {}
        self.refuses = 0

    def page_lock(self, address: int, num_bytes: int) -> int:
        if self.refuses:
            return self.refuses
        locked = list(self.locked.items())  # threads lock at the same time
        assert not any(address < other + size and other < address + num_bytes for other, size in locked), (
            "page-locked twice"
        )
        self.locked[address] = num_bytes
        return 0

    def page_unlock(self, address: int) -> None:
        del self.locked[address]

    def is_page_locked(self, tensor: Tensor) -> bool:
        at = tensor.data_ptr()
        return any(address <= at < address + size for address, size in list(self.locked.items()))


def travel(memory: PageLockedMemory, *sources: Tensor) -> list[Tensor]:
    """What the copies read that bring ``sources`` to a device in a step; what they bring is compared."""
    memory.begin_step()
    pairs = [(torch.empty_like(source), source) for source in sources]
    reads = memory.staged(pairs)
    for copy, source in reads:
        copy.copy_(source)
    assert all(torch.equal(copy, source) for copy, source in pairs)
    return [source for _, source in reads]


def lock_in_place(memory: PageLockedMemory, *sources: Tensor) -> None:
    """They travel in as many steps as it takes until they are locked where they are; no buffer is left."""
    for _ in range(3):
        travel(memory, *sources)
    memory.buffers.give_up_spare()
