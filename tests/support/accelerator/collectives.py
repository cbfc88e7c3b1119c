"""A backend of ``torch.distributed`` for tensors of the simulated accelerator, as NCCL is one for those of CUDA.

A collective comes after what is queued on the current stream, goes on while the host does something else, and fills its
results on the stream that waits for it. It travels over gloo.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NAME = "simccl"
# Names of what has been called, in this process.
called: list[str] = []


class _Work(dist._Work):
    """A collective that a thread makes on copies of the host."""

    def __init__(self, results: Sequence[Tensor], make: Callable[[], list[Tensor]]) -> None:
        super().__init__()
        self._results = results
        self._made: list[Tensor] = []
        self._error: BaseException | None = None
        self._make = make
        self._ended = threading.Event()
        threading.Thread(target=self._run, name=NAME, daemon=True).start()

    def _run(self) -> None:
        try:
            self._made = self._make()
        except BaseException as error:  # must reach the thread that waits
            self._error = error
        finally:
            self._ended.set()

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._ended.wait()
        if self._error is not None:
            raise RuntimeError(str(self._error))
        for result, made in zip(self._results, self._made, strict=True):
            result.copy_(made)
        return True


class SimulatedCollectives(dist.ProcessGroup):
    """The collectives that the strategy needs on devices."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._name = ""
        self._last: _Work | None = None  # torch itself does not keep the part of it that is written in Python

    # Groups that are written in Python have no name by themselves.

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def getBackendName(self) -> str:
        return NAME

    def allreduce(self, tensors: Sequence[Tensor], options: Any) -> Any:
        if tensors[0].device.type == "cpu":
            return self._gloo.allreduce(list(tensors), options)

        def make() -> list[Tensor]:
            self._gloo.allreduce(copies, options).wait()
            return copies

        copies = _on_host(tensors)
        return self._begin("allreduce", tensors, make)

    def _begin(self, name: str, results: Sequence[Tensor], make: Callable[[], list[Tensor]]) -> _Work:
        called.append(name)
        self._last = _Work(results, make)
        return self._last

    def alltoall_base(
        self, output: Tensor, given: Tensor, sizes_out: list[int], sizes_in: list[int], options: Any
    ) -> _Work:
        def make() -> list[Tensor]:
            filled = torch.empty(output.shape, dtype=output.dtype)
            self._gloo.alltoall_base(filled, copy, sizes_out, sizes_in, options).wait()
            return [filled]

        (copy,) = _on_host([given])
        return self._begin("alltoall", [output], make)

    def _allgather_base(self, output: Tensor, given: Tensor, options: Any) -> _Work:
        def make() -> list[Tensor]:
            filled = torch.empty(output.shape, dtype=output.dtype)
            self._gloo._allgather_base(filled, copy, options).wait()
            return [filled]

        (copy,) = _on_host([given])
        return self._begin("allgather", [output], make)

    # What newer versions of torch call.
    all_to_all_single = alltoall_base
    all_gather_single = _allgather_base


def _on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies, when what is queued on the current stream has been done.

    Raises:
        TypeError: for tensors of the host.
    """
    if any(tensor.device.type != "sim" for tensor in tensors):
        raise TypeError(f"this collective of {NAME} is for tensors of the simulated accelerator")
    return [tensor.cpu() for tensor in tensors]


def register() -> None:
    """Makes ``simccl`` known to ``torch.distributed``."""
    dist.Backend.register_backend(NAME, SimulatedCollectives, devices="sim")
