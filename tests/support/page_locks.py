"""What page-locks memory where no device is needed: it keeps the books, and locks nothing."""

from __future__ import annotations

from torch import Tensor

from lightning_roundpipe.devices.gpu.pinned import PageLockedMemory


class PageLocks:
    """In the place of a driver.

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
        assert not any(address < other + size and other < address + num_bytes for other, size in self.locked.items()), (
            "page-locked twice"
        )
        self.locked[address] = num_bytes
        return 0

    def page_unlock(self, address: int) -> None:
        del self.locked[address]

    def is_page_locked(self, tensor: Tensor) -> bool:
        at = tensor.data_ptr()
        return any(address <= at < address + size for address, size in self.locked.items())
