"""How many intra-op threads an optimizer step gets that runs behind the pipeline."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from lightning_roundpipe.integration.pool import update_threads


class Pool:
    """As far as the number of threads asks for it."""

    def __init__(self, num_devices: int, is_virtual: bool) -> None:
        self._num_devices = num_devices
        self.is_virtual = is_virtual

    def __len__(self) -> int:
        return self._num_devices


@pytest.mark.parametrize(
    ("cores", "num_devices", "is_virtual", "expected"),
    [
        (1, 1, True, 1),
        (2, 2, True, 1),
        (16, 3, True, 4),
        (1, 1, False, 1),
        (2, 8, False, 1),
        (16, 1, False, 15),
        (16, 8, False, 8),
        (64, 8, False, 56),
    ],
)
def test_updates_leave_cores_to_the_devices(
    monkeypatch: pytest.MonkeyPatch, cores: int, num_devices: int, is_virtual: bool, expected: int
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
    assert update_threads(cast(Any, Pool(num_devices, is_virtual))) == expected
