"""What tests on GPUs share: exact products, small workspaces, and the pools to try."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator

import pytest
import torch

# Each thread that multiplies has a workspace of cuBLAS for itself, of 32 MiB on the newest GPUs, in the memory that
# tests limit and measure, and it keeps it. With these settings they take a few hundred KiB. cuBLAS reads them when it
# is used for the first time, and conftest files are imported before any test runs.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "1024")  # KiB, given back after each product

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


@pytest.fixture
def memory_in_use() -> Callable[[], int]:
    """Tells the bytes of tensors on GPU 0, after it has given back all that no tensor uses.

    Workspaces of cuBLAS count as tensors for the allocator, and blocks that it keeps for later count as reserved.
    """

    def measure() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()

    return measure
