"""Pages of the host's memory, how many are left, and what the kernel is told about them; nothing where it cannot be."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from pathlib import Path

import torch

PAGE = mmap.PAGESIZE
# Of x86-64, and of 64-bit ARM with pages of 4 KiB: one entry of the page table maps so much.
HUGE_PAGE = 2 * 2**20

# Arguments of ``mmap`` for memory that gets huge pages, as shared memory does not.
PRIVATE: dict[str, int] = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
_MADVISE: Callable[..., int] | None
try:
    _MADVISE = ctypes.CDLL(None, use_errno=True).madvise
except (OSError, AttributeError, TypeError):  # no such call here
    _MADVISE = None
_DONTFORK = getattr(mmap, "MADV_DONTFORK", None)
_DOFORK = getattr(mmap, "MADV_DOFORK", None)
_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", None)
_MAPS = Path("/proc/self/maps")
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
# Files that are memory: shared with other processes, or anonymous in spite of their name.
_IN_MEMORY = ("/dev/shm/", "/memfd:", "/dev/zero", "/SYSV", "/anon_hugepage", "/dev/hugepages")


class OwnPages:
    """Memory of our own, which begins with a page; with a huge one if it is as large.

    Attributes:
        memory: the buffer that it is a part of, from ``offset`` on.
        num_used, is_locked: notes of its owner.
    """

    def __init__(self, num_bytes: int) -> None:
        is_huge = num_bytes >= HUGE_PAGE
        self.memory = mmap.mmap(-1, num_bytes + (HUGE_PAGE if is_huge else 0), **PRIVATE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.offset = -start % HUGE_PAGE if is_huge else 0
        self.address = start + self.offset
        self.num_bytes = num_bytes
        self.num_used = 0
        self.is_locked = False
        if is_huge:
            _advise(self.address, num_bytes, _HUGEPAGE)


def set_inherited(address: int, num_bytes: int, is_inherited: bool) -> None:
    """Whether children of a fork get the pages that lie in this memory as a whole.

    Those at the ends may hold other things, such as the allocator's notes on this memory.
    """
    _advise(address, num_bytes, _DOFORK if is_inherited else _DONTFORK)


def _advise(address: int, num_bytes: int, advice: int | None) -> None:
    if _MADVISE is None or advice is None:
        return
    start = -(-address // PAGE) * PAGE
    length = (address + num_bytes) // PAGE * PAGE - start
    if length > 0:
        _MADVISE(ctypes.c_void_p(start), ctypes.c_size_t(length), ctypes.c_int(advice))


def is_of_file(storage: torch.UntypedStorage) -> bool:
    """Whether the memory of ``storage`` is a file that is mapped, of which it may be a part.

    Torch knows this only of the storages that it has mapped itself, not of slices of them: the kernel is asked first.
    """
    address = storage.data_ptr()
    try:
        with _MAPS.open() as lines:
            for line in lines:
                first, stop = (int(number, 16) for number in line.split(maxsplit=1)[0].split("-"))
                if first <= address < stop:
                    inode, path = [*line.split(maxsplit=5)[4:], ""][:2]
                    return inode != "0" and not path.startswith(_IN_MEMORY)
    except OSError:  # no Linux
        return getattr(storage, "filename", None) is not None
    return False


def available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """What this process may still allocate on the host: what the system has left, or its container. None if unknown."""
    return _least(system_bytes("MemAvailable", meminfo), container_bytes(cgroup)[1])


def total_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """All that the host has, or its container may use. None if unknown."""
    return _least(system_bytes("MemTotal", meminfo), container_bytes(cgroup)[0])


def _least(*numbers: int | None) -> int | None:
    return min((number for number in numbers if number is not None), default=None)


def system_bytes(name: str, meminfo: Path = _MEMINFO) -> int | None:
    """An entry that Linux has about its memory, such as ``"MemTotal"`` or ``"SwapTotal"``; None if unknown."""
    kib = _entry(meminfo, f"{name}:")
    return None if kib is None else kib * 1024


def container_bytes(cgroup: Path = _CGROUP) -> tuple[int | None, int | None]:
    """The memory of this process's container (cgroup 2): its limit, and what is left of it; None without a limit."""
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if limit is None or used is None:
        return None, None
    cache = _entry(cgroup / "memory.stat", "inactive_file") or 0  # of files: goes when memory is needed
    return limit, max(0, limit - used + cache)


def _entry(path: Path, name: str) -> int | None:
    """The number behind ``name`` in a file of one entry per line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), None)
    except (OSError, ValueError, IndexError):
        return None


def _number(path: Path) -> int | None:
    """The number that a file consists of; None if it is "max", or there is no such file."""
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
