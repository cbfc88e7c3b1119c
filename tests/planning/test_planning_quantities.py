"""Sizes, speeds and times: what is read, what is refused, what people see."""

from __future__ import annotations

import math

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
    ("text", "num_bytes"),
    [
        ("24GiB", 24 * 2**30),
        ("24 giB", 24 * 2**30),
        ("1.5 TB", 1_500_000_000_000),
        (".5KiB", 512),
        ("800MB", 800_000_000),
        ("800mB", 800_000_000),
        ("7B", 7),
        (" 2kB ", 2000),
        ("0.3B", 0),
        ("1PiB", 2**50),
    ],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("24", "'24' lacks a unit: write a size like 24GiB"),
        ("24Gib", "'24Gib' says bits"),
        ("24 Gb", "says bits"),
        ("24 apples", "'24 apples' is not a size"),
        ("", "'' is not a size"),
        ("-1GiB", "'-1GiB' is not a size"),
        ("1e9B", "is not a size"),
        ("GiB", "is not a size"),
        ("24GiB/s", "is not a size"),
        (f"{'9' * 400}GiB", "9GiB' is too large: write a size like 24GiB"),
    ],
)
def test_sizes_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_bytes(text)


def test_bandwidths_are_bytes_per_ms() -> None:
    assert parse_bandwidth("25GB/s") == 25e6
    assert parse_bandwidth("1 MiB/s") == pytest.approx(1048.576)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("25GB", "'25GB' is not a bandwidth: write one like 25GB/s"),
        ("25/s", "'25/s' lacks a unit"),
        ("25Gb/s", "'25Gb/s' says bits"),
        ("0GB/s", "'0GB/s' is no bandwidth"),
        ("25GB/ms", "is not a bandwidth"),
        (f"{'9' * 400}GB/s", "9GB/s' is too large"),
    ],
)
def test_bandwidths_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_bandwidth(text)


@pytest.mark.parametrize(
    ("text", "ms"), [("10us", 0.01), ("10µs", 0.01), ("1.5ms", 1.5), ("2s", 2000.0), ("3 min", 180_000.0), ("0s", 0.0)]
)
def test_times(text: str, ms: float) -> None:
    assert parse_duration(text) == pytest.approx(ms)


@pytest.mark.parametrize("text", ["10", "10 parsecs", "ms", "-1ms"])
def test_times_that_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"lacks a unit|is not a time"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.98 KiB"),
        (2**20, "1.00 MiB"),
        (int(23.44 * 2**30), "23.4 GiB"),
        (1023 * 2**30, "1.00 TiB"),
        (2**60, "1,048,576 TiB"),
    ],
)
def test_sizes_for_people(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(("ms", "text"), [(0.0, "0.00 ms"), (9.996, "10.0 ms"), (999.4, "999 ms"), (4560, "4.56 s")])
def test_times_for_people(ms: float, text: str) -> None:
    assert format_ms(ms) == text


def test_other_figures_for_people() -> None:
    assert format_bandwidth(25e6) == "25.0 GB/s"
    assert format_bandwidth(math.inf) == "unlimited"
    assert format_share(0.1434) == "14.3%"
    assert format_share(-1e-15) == "0.0%"


@pytest.mark.parametrize("num_bytes", [2**30, 24 * 2**30, 80 * 2**30])
def test_what_is_printed_can_be_read(num_bytes: int) -> None:
    assert parse_bytes(format_bytes(num_bytes)) == num_bytes
