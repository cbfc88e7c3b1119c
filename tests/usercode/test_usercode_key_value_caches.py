"""Key-value caches go to the device of the keys that are appended; on real devices: tests/accelerator."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from lightning_roundpipe.usercode.key_value_caches import caches_followed


def keys(length: int, device: str = "cpu") -> Tensor:
    return torch.arange(2.0 * length, device=device).view(1, 1, length, 2)


def filled() -> DynamicCache:
    cache = DynamicCache()
    for layer in range(2):
        cache.update(keys(3), keys(3) + 1, layer)
    return cache


def test_layer_that_is_appended_to_follows_and_the_others_stay() -> None:
    """To the device of torch that has shapes alone."""
    cache = filled()
    with pytest.raises(RuntimeError, match="device"):
        cache.update(keys(1, "meta"), keys(1, "meta"), 1)
    with caches_followed():
        found, values = cache.update(keys(1, "meta"), keys(1, "meta"), 1)
    assert found.device == values.device == cache.layers[1].keys.device == torch.device("meta")
    assert found.shape == values.shape == (1, 1, 4, 2)
    assert cache.layers[1].device == torch.device("meta")
    assert torch.equal(cache.layers[0].keys, keys(3))


def test_method_is_put_back_and_needs_no_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Cache.update
    with caches_followed():
        assert Cache.update is not before
    assert Cache.update is before
    monkeypatch.delitem(sys.modules, "transformers.cache_utils")
    with caches_followed():
        assert Cache.update is before
