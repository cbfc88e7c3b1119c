"""What the machine can do: the figures that everything else is compared with."""

from __future__ import annotations

import functools
import mmap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks._report import median, rounded
from lightning_roundpipe.common.pages import PRIVATE

from .results import IncompleteError, NotRunError, Options, Progress, Step

METHOD = """
Medians of rounds of at least 20 ms each (tiny: 1 ms), by the wall clock of the host, with a synchronisation at the end
of a round. register: cudaHostRegister (portable) and cudaHostUnregister on anonymous memory that was written before,
with madvise for huge pages and against them; huge_bytes is how many of them the system gave, None where it does not
tell. copies: copy_ of one tensor, from and to page-locked memory (pin_memory) and ordinary memory. both_directions: one
copy up and one down at once, each on a stream of its own. products: square matrices in bf16. host: bytes read and
written by operators on the host, with one thread and with all.
"""
_MIB = 2**20
_PORTABLE = 1  # cudaHostRegisterPortable
_NO_HUGE_PAGES = 15  # MADV_NOHUGEPAGE, which the module mmap has no name for in older Pythons
_ROUNDS = 5


def steps(options: Options) -> list[Step]:
    """What is measured, in this order."""
    device = torch.device("cpu") if options.is_tiny else torch.device("cuda", 0)
    facts = Facts(device, is_tiny=options.is_tiny)
    named = {
        "register": facts.register,
        "copies": facts.copies,
        "both_directions": facts.both_directions,
        "products": facts.products,
        "host": facts.host,
    }
    return [Step(name, run) for name, run in named.items()]


class Facts:
    """Measures one device; on the CPU, whose streams and events do nothing, only that the code runs."""

    def __init__(self, device: torch.device, *, is_tiny: bool) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._is_tiny = is_tiny
        self._round_s = 0.001 if is_tiny else 0.02

    def register(self, progress: Progress) -> dict[str, Any]:
        """Speed of page-locking, by size.

        Raises:
            NotRunError: on devices other than CUDA's.
        """
        if not hasattr(self._module, "cudart"):
            raise NotRunError("needs CUDA")
        runtime = self._module.cudart()
        sizes = [1] if self._is_tiny else [64, 256, 1024, 4096]
        torch.zeros(1, device=self._device)  # to begin with costs a second
        found: dict[str, Any] = {}
        for mib in sizes:
            for is_huge in (False, True):
                tensor, huge_bytes = _memory(mib * _MIB, is_huge=is_huge)
                address, num_bytes = tensor.data_ptr(), tensor.numel()
                started = time.perf_counter()
                error = int(runtime.cudaHostRegister(address, num_bytes, _PORTABLE))
                locked = time.perf_counter()
                if error:
                    raise IncompleteError(f"cudaHostRegister of {mib} MiB gave error {error}")
                runtime.cudaHostUnregister(address)
                ended = time.perf_counter()
                del tensor  # before the next one is made
                found[f"{mib} MiB, {'huge' if is_huge else 'small'} pages"] = {
                    "gb_per_s": rounded(num_bytes / (locked - started) / 1e9),
                    "unregister_gb_per_s": rounded(num_bytes / (ended - locked) / 1e9),
                    "huge_bytes": huge_bytes,
                }
                progress.save(found)
        return found

    def copies(self, progress: Progress) -> dict[str, Any]:
        """GB/s by size, direction and kind of memory."""
        found: dict[str, Any] = {}
        for num_bytes in [_MIB // 16] if self._is_tiny else [_MIB // 16, _MIB, 16 * _MIB, 256 * _MIB, 1024 * _MIB]:
            there = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
            for kind in ("page-locked", "ordinary"):
                here = self._on_host(num_bytes, is_locked=kind == "page-locked")
                seconds = {
                    "h2d": self._seconds(functools.partial(there.copy_, here, non_blocking=True)),
                    "d2h": self._seconds(functools.partial(here.copy_, there, non_blocking=True)),
                }
                rates = {direction: rounded(num_bytes / s / 1e9) for direction, s in seconds.items()}
                found[f"{num_bytes / _MIB:g} MiB, {kind}"] = {f"{name}_gb_per_s": rate for name, rate in rates.items()}
                progress.save(found)
        return found

    def both_directions(self, progress: Progress) -> dict[str, Any]:
        """GB/s of each direction while both are busy."""
        num_bytes = _MIB // 16 if self._is_tiny else 256 * _MIB
        up, down = self._module.Stream(), self._module.Stream()
        here, back = self._on_host(num_bytes, is_locked=True), self._on_host(num_bytes, is_locked=True)
        there, source = (torch.zeros(num_bytes, dtype=torch.uint8, device=self._device) for _ in range(2))
        self._module.synchronize()  # nothing else orders the streams behind what has written these

        def both() -> None:
            with self._module.stream(up):
                there.copy_(here, non_blocking=True)
            with self._module.stream(down):
                back.copy_(source, non_blocking=True)

        return {"gb_per_s_each": rounded(num_bytes / self._seconds(both) / 1e9)}

    def products(self, progress: Progress) -> dict[str, Any]:
        """TFLOP/s of matrix products."""
        found: dict[str, Any] = {}
        for size in [64] if self._is_tiny else [2048, 4096, 8192]:
            one, other = (torch.randn(size, size, device=self._device).bfloat16() for _ in range(2))
            seconds = self._seconds(functools.partial(torch.mm, one, other))
            found[f"bf16, {size}"] = {"tflops": rounded(2 * size**3 / seconds / 1e12)}
            progress.save(found)
        return found

    def host(self, progress: Progress) -> dict[str, Any]:
        """GB/s of what the host does with weights and gradients."""
        num = 2**14 if self._is_tiny else 2**28
        full, half = torch.zeros(num), torch.zeros(num, dtype=torch.bfloat16)
        other = torch.zeros(num)
        works: dict[str, tuple[int, Callable[[], Any]]] = {
            "copy": (8, lambda: other.copy_(full)),
            "cast_to_bf16": (6, lambda: half.copy_(full)),
            "add_bf16_to_float32": (10, lambda: full.add_(half)),
        }
        before, found = torch.get_num_threads(), {}
        try:
            for num_threads in sorted({1, before}):
                torch.set_num_threads(num_threads)
                for name, (num_bytes, work) in works.items():
                    rate = num * num_bytes / self._seconds(work) / 1e9
                    found[f"{name}, {num_threads} threads"] = {"gb_per_s": rounded(rate)}
                    progress.save(found)
        finally:
            torch.set_num_threads(before)
        return found

    def _on_host(self, num_bytes: int, *, is_locked: bool) -> Tensor:
        locks = is_locked and self._device.type != "cpu"
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=locks)

    def _seconds(self, work: Callable[[], Any]) -> float:
        """Of one ``work``, on the device."""
        work()
        self._module.synchronize()
        taken, num = [], 1
        while len(taken) < _ROUNDS:
            started = time.perf_counter()
            for _ in range(num):
                work()
            self._module.synchronize()
            seconds = time.perf_counter() - started
            if seconds < self._round_s:  # too short to be told from the synchronisation
                num *= 2
                taken.clear()
            else:
                taken.append(seconds / num)
        return median(taken)


def _memory(num_bytes: int, *, is_huge: bool) -> tuple[Tensor, int | None]:
    """Written memory of its own, and how much of it lies on huge pages."""
    before = _huge_bytes()
    mapped = mmap.mmap(-1, num_bytes, **PRIVATE)  # ends with the last tensor on it
    if hasattr(mapped, "madvise"):
        mapped.madvise(mmap.MADV_HUGEPAGE if is_huge else _NO_HUGE_PAGES)
    tensor = torch.frombuffer(mapped, dtype=torch.uint8)
    tensor.fill_(1)
    after = _huge_bytes()
    return tensor, None if before is None or after is None else after - before


def _huge_bytes() -> int | None:
    """Of this process; None where the system does not tell."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("AnonHugePages:")), None)
