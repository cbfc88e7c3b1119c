"""Equality to the last bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor


def assert_identical(actual: Any, expected: Any, where: str = "") -> None:
    """Compares tensors, arrays, and containers of them, also in types, dtypes and the order of keys; NaN equals NaN."""
    assert type(actual) is type(expected), where
    if isinstance(expected, Tensor):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{where}: {m}")
    elif isinstance(expected, Mapping):
        assert list(actual) == list(expected), where
        for key, value in expected.items():
            assert_identical(actual[key], value, f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), where
        for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_identical(one, other, f"{where}[{index}]")
    elif is_dataclass(expected):
        assert_identical(vars(actual), vars(expected), where)
    elif type(expected).__module__ == "numpy":
        assert actual.dtype == expected.dtype, where
        assert (actual == expected).all(), where
    else:
        assert actual == expected, where
