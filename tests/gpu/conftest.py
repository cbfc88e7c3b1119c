"""What tests on GPUs share: exact products, small workspaces, the pools to try, and work that is made late."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_roundpipe.devices.gpu.driver import driver_of

# Each thread that multiplies has a workspace of cuBLAS for itself, of 32 MiB on the newest GPUs, in the memory that
# tests limit and measure, and it keeps it. With these settings they take a few hundred KiB. cuBLAS reads them when it
# is used for the first time, and conftest files are imported before any test runs.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "128")  # KiB; newer versions of torch have one for both

# About 0.3 ms on any GPU: longer than what it delays takes in these tests.
_LATE_CYCLES = 500_000

# One device, two on one GPU, and as many as there are GPUs.
_POOLS = {"one": [0], "two on one": [0, 0], "all": None}


@pytest.fixture(params=_POOLS)
def devices(request: pytest.FixtureRequest) -> list[int]:
    """GPU of each device."""
    listed = _POOLS[request.param]
    if listed is not None:
        return listed
    if torch.cuda.device_count() < 2:
        pytest.skip("needs several GPUs")
    return list(range(torch.cuda.device_count()))


@pytest.fixture(autouse=True)
def exact_matmul() -> Iterator[None]:
    """Plain float32 products: TF32 would be compared with the CPU's full precision."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def make_late(patch: pytest.MonkeyPatch, driver: Any, late: str, wait: Callable[[Any], None]) -> None:
    """Puts a kernel that only waits in front of what the environment names, wherever a device issues it.

    Results stay the same. What reads without waiting for it reads too early, every time, and not once in a while.

    Args:
        late: "compute": before each event of a stream on which threads compute, and so before what comes after it;
            "h2d" or "d2h": before each copy to a GPU, or from one.
        wait: makes a stream late; the current one if it is given None.
    """
    record, copy = driver.record, driver.copy

    def late_record(stream: Any, **kwargs: Any) -> Any:
        if stream == driver.default_stream(stream.device):
            wait(stream)
        return record(stream, **kwargs)

    def late_copy(destination: Tensor, source: Tensor) -> None:
        if (source.device.type == "cpu") == (late == "h2d"):
            wait(None)
        copy(destination, source)

    if late == "compute":
        patch.setattr(driver, "record", late_record)
    elif late in ("h2d", "d2h"):
        patch.setattr(driver, "copy", late_copy)
    else:
        raise pytest.UsageError(f"ROUNDPIPE_LATE={late!r}: use compute, h2d or d2h")


@pytest.fixture(autouse=True)
def late_work() -> Iterator[None]:
    """The variable ROUNDPIPE_LATE makes work of GPUs late, see :func:`make_late`."""

    def wait(stream: Any) -> None:
        with torch.cuda.stream(stream):  # None: the current one
            torch.cuda._sleep(_LATE_CYCLES)

    with pytest.MonkeyPatch.context() as patch:
        if late := os.environ.get("ROUNDPIPE_LATE"):
            make_late(patch, driver_of("cuda"), late, wait)
        yield


@pytest.fixture
def memory_in_use() -> Callable[[], int]:
    """Tells the bytes of tensors on GPU 0, after it has given back all that no tensor uses.

    Workspaces of cuBLAS count as tensors for the allocator, and blocks that it keeps for later count as reserved. The
    GPU is named: what ran before may have left the thread on another one.
    """

    def measure() -> int:
        gc.collect()
        torch.cuda.synchronize(0)
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(0)

    return measure
