"""Sizes, speeds and times as people write them: "24GiB", "25GB/s", "10us".

A quantity always carries its unit: a bare "24" would be read as bytes by one and as GiB by the other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(\S*)\s*")
_BYTES: dict[str, float] = {"B": 1}
_BYTES |= {f"{prefix}B": 1000**power for power, prefix in enumerate("kMGTP", start=1)}
_BYTES |= {f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGTP", start=1)}
_MOST_CHARACTERS = 60
_MS = {"ns": 1e-6, "us": 1e-3, "µs": 1e-3, "ms": 1.0, "s": 1e3, "min": 6e4, "h": 3.6e6}


def parse_bytes(text: str) -> int:
    """Read a size such as ``"24GiB"``, ``"1.5 TB"`` or ``"800MB"``: bytes, fractions rounded down.

    GiB counts in powers of 1024, GB in powers of 1000. Upper and lower case are the same, except that a small b, a bit
    elsewhere, is refused.

    Raises:
        ValueError: If the text is not a number with a unit of size.
    """
    return int(_parse(text, _BYTES, "a size", "24GiB or 800MB"))


def parse_bandwidth(text: str) -> float:
    """Read a speed such as ``"25GB/s"``: bytes per ms.

    Raises:
        ValueError: If the text is not a number with a unit of size per second, or is 0.
    """
    size, slash, per = text.strip().rpartition("/")
    if not slash or per.strip() != "s":
        raise ValueError(f"{text!r} is not a bandwidth: write one like 25GB/s.")
    bytes_per_ms = _parse(size, _BYTES, "a bandwidth", "25GB/s", whole=text) / 1000.0
    if bytes_per_ms == 0:
        raise ValueError(f"{text!r} is no bandwidth to move anything with: leave the option out for no limit.")
    return bytes_per_ms


def parse_duration(text: str) -> float:
    """Read a time such as ``"10us"``, ``"1.5ms"`` or ``"2s"``: ms.

    Raises:
        ValueError: If the text is not a number with a unit of time.
    """
    return _parse(text, _MS, "a time", "10us or 1.5ms")


def format_bytes(num_bytes: float) -> str:
    """Return a size for people in powers of 1024, such as ``"23.4 GiB"``; three digits or a whole number."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 999.5 or unit == "TiB":
            break
        value /= 1024.0
    return f"{int(value)} B" if unit == "B" else f"{_digits(value)} {unit}"


def format_ms(ms: float) -> str:
    """Return a time for people, such as ``"12.3 ms"`` or ``"4.56 s"``."""
    if ms < 999.5:
        return f"{_digits(ms)} ms"
    return f"{_digits(ms / 1e3)} s"


def format_bandwidth(bytes_per_ms: float) -> str:
    """Return a speed for people in GB/s; ``"unlimited"`` where there is no limit."""
    return "unlimited" if math.isinf(bytes_per_ms) else f"{_digits(bytes_per_ms / 1e6)} GB/s"


def format_share(share: float) -> str:
    """Return a share for people, such as ``"14.3%"``; rounding noise below zero shows as ``"0.0%"``."""
    return f"{max(share, 0.0):.1%}"


def format_value(value: object) -> str:
    """Return a value's repr for a message, cut so that a whole document does not end up in it."""
    text = repr(value)
    return text if len(text) <= _MOST_CHARACTERS else text[:_MOST_CHARACTERS] + "..."


def _digits(value: float) -> str:
    """Three significant digits, but no rounding before the decimal point, and no exponent."""
    if value >= 99.95:
        return f"{value:,.0f}"
    if value >= 9.995:
        return f"{value:.1f}"
    return f"{value:.2f}"


def _parse(text: str, units: Mapping[str, float], kind: str, example: str, whole: str | None = None) -> float:
    match = _QUANTITY.fullmatch(text)
    unit = match.group(2) if match else ""
    factor = _factor(unit, units)
    shown = repr(whole or text)
    if match is not None and factor is not None:
        value = float(match.group(1)) * factor
        if math.isinf(value):
            raise ValueError(f"{shown} is too large: write {kind} like {example}.")
        return value
    if match is not None and not unit:
        raise ValueError(f"{shown} lacks a unit: write {kind} like {example}.")
    if unit.endswith("b") and _factor(unit[:-1] + "B", units) is not None:
        raise ValueError(f"{shown} says bits (a small b): write {kind} like {example}, with a capital B.")
    raise ValueError(f"{shown} is not {kind}: write one like {example}.")


def _factor(unit: str, units: Mapping[str, float]) -> float | None:
    """The unit's factor; upper and lower case are the same, but for the final letter."""
    for name, factor in units.items():
        if unit and name[-1] == unit[-1] and name.lower() == unit.lower():
            return factor
    return None
