"""Sizes, speeds and times: what is read, what is refused, what people see."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from lightning_roundpipe.planning.quantities import (
    format_bandwidth,
    format_bytes,
    format_ms,
    format_share,
    parse_bandwidth,
    parse_bytes,
    parse_duration,
)


@pytest.mark.parametrize(
    ("parse", "text", "expected"),
    [
        (parse_bytes, "24GiB", 24 * 2**30),
        (parse_bytes, "24 giB", 24 * 2**30),
        (parse_bytes, "1.5 TB", 1_500_000_000_000),
        (parse_bytes, ".5KiB", 512),
        (parse_bytes, "800MB", 800_000_000),
        (parse_bytes, "800mB", 800_000_000),
        (parse_bytes, "7B", 7),
        (parse_bytes, " 2kB ", 2000),
        (parse_bytes, "0.3B", 0),
        (parse_bytes, "1PiB", 2**50),
        (parse_bandwidth, "25GB/s", 25e6),  # bytes per ms
        (parse_bandwidth, "1 MiB/s", 1048.576),
        (parse_duration, "10us", 0.01),
        (parse_duration, "10µs", 0.01),
        (parse_duration, "1.5ms", 1.5),
        (parse_duration, "2s", 2000.0),
        (parse_duration, "3 min", 180_000.0),
        (parse_duration, "0s", 0.0),
    ],
)
def test_quantities_are_read_with_their_unit(parse: Callable[[str], float], text: str, expected: float) -> None:
    assert parse(text) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (parse_bytes, "24", "'24' lacks a unit: write a size like 24GiB"),
        (parse_bytes, "24Gib", "'24Gib' says bits"),
        (parse_bytes, "24 Gb", "says bits"),
        (parse_bytes, "24 apples", "'24 apples' is not a size"),
        (parse_bytes, "", "'' is not a size"),
        (parse_bytes, "-1GiB", "'-1GiB' is not a size"),
        (parse_bytes, "1e9B", "is not a size"),
        (parse_bytes, "GiB", "is not a size"),
        (parse_bytes, "24GiB/s", "is not a size"),
        (parse_bytes, f"{'9' * 400}GiB", "9GiB' is too large: write a size like 24GiB"),
        (parse_bandwidth, "25GB", "'25GB' is not a bandwidth: write one like 25GB/s"),
        (parse_bandwidth, "25/s", "'25/s' lacks a unit"),
        (parse_bandwidth, "25Gb/s", "'25Gb/s' says bits"),
        (parse_bandwidth, "0GB/s", "'0GB/s' is no bandwidth"),
        (parse_bandwidth, "25GB/ms", "is not a bandwidth"),
        (parse_bandwidth, f"{'9' * 400}GB/s", "9GB/s' is too large"),
        (parse_duration, "10", "lacks a unit"),
        (parse_duration, "10 parsecs", "is not a time"),
        (parse_duration, "ms", "is not a time"),
        (parse_duration, "-1ms", "is not a time"),
    ],
)
def test_texts_that_are_no_quantity_are_refused(parse: Callable[[str], float], text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text)


@pytest.mark.parametrize(
    ("write", "value", "text"),
    [
        (format_bytes, 0, "0 B"),
        (format_bytes, 999, "999 B"),
        (format_bytes, 1000, "0.98 KiB"),
        (format_bytes, 2**20, "1.00 MiB"),
        (format_bytes, int(23.44 * 2**30), "23.4 GiB"),
        (format_bytes, 1023 * 2**30, "1.00 TiB"),
        (format_bytes, 2**60, "1,048,576 TiB"),
        (format_ms, 0.0, "0.00 ms"),
        (format_ms, 9.996, "10.0 ms"),
        (format_ms, 999.4, "999 ms"),
        (format_ms, 4560, "4.56 s"),
        (format_bandwidth, 25e6, "25.0 GB/s"),
        (format_bandwidth, math.inf, "unlimited"),
        (format_share, 0.1434, "14.3%"),
        (format_share, -1e-15, "0.0%"),
    ],
)
def test_quantities_are_written_with_three_digits(write: Callable[[float], str], value: float, text: str) -> None:
    assert write(value) == text


@pytest.mark.parametrize("num_bytes", [2**30, 24 * 2**30, 80 * 2**30])
def test_what_is_printed_can_be_read(num_bytes: int) -> None:
    assert parse_bytes(format_bytes(num_bytes)) == num_bytes
