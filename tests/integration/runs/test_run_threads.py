"""How many intra-op threads the threads of a run get."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from lightning_roundpipe.integration.pool import host_threads, microbatch_threads


class Pool:
    """As far as the number of threads asks for it."""

    def __init__(self, num_devices: int, is_virtual: bool) -> None:
        self._num_devices = num_devices
        self.is_virtual = is_virtual

    def __len__(self) -> int:
        return self._num_devices


@pytest.mark.parametrize(
    ("cores", "num_devices", "is_virtual", "microbatch", "beside"),
    [
        (1, 1, True, 1, 1),
        (2, 2, True, 1, 1),
        (16, 3, True, 5, 4),
        (1, 1, False, 1, 1),
        (2, 8, False, 1, 1),
        (16, 1, False, 1, 15),
        (16, 8, False, 1, 8),
        (64, 8, False, 1, 56),
    ],
)
def test_what_runs_beside_the_devices_leaves_cores_to_them(
    monkeypatch: pytest.MonkeyPatch, cores: int, num_devices: int, is_virtual: bool, microbatch: int, beside: int
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
    pool = cast(Any, Pool(num_devices, is_virtual))
    assert (microbatch_threads(pool, None), host_threads(pool)) == (microbatch, beside)
    assert microbatch_threads(pool, 3) == 3
