"""What tests on GPUs share: exact products, and the pools to try."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

# One worker, two on one GPU, and as many as there are GPUs.
_POOLS = {"one": [0], "two on one": [0, 0], "all": None}


@pytest.fixture(params=_POOLS)
def devices(request: pytest.FixtureRequest) -> list[int]:
    """GPU of each worker."""
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
