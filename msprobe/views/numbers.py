"""How numbers are shown: values, durations in nanoseconds, sizes in bytes, shares.

All views come here, so that a number looks the same on every page. What is not a number, infinite, or not recorded has four renderings
of its own: `NaN`, `+inf`, `-inf` and `–`; none of them is ever shown as 0.
"""

from __future__ import annotations

import math

NOT_RECORDED = "–"
_DURATIONS = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "µs"))
_SIZES = ("B", "KiB", "MiB", "GiB", "TiB")


def number(value: float | None, digits: int = 5) -> str:
    """Return a value with so many significant digits; whole numbers below ten million in full."""
    if value is None:
        return NOT_RECORDED
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+inf" if value > 0 else "-inf"
    if value == int(value) and abs(value) < 10_000_000:
        return str(int(value))
    return f"{value:.{digits}g}"


def duration(value_ns: int | None) -> str:
    """Return a duration given in nanoseconds, with three significant digits and its unit."""
    if value_ns is None:
        return NOT_RECORDED
    if abs(value_ns) >= 100_000_000_000:
        return _long_duration(value_ns)
    for unit_ns, unit in _DURATIONS:
        # The bound lies where rounding to three digits would reach the next unit.
        if abs(value_ns) >= unit_ns * 0.9995:
            return f"{_three_digits(value_ns / unit_ns)} {unit}"
    return f"{value_ns} ns"


def _long_duration(value_ns: int) -> str:
    seconds = value_ns // 1_000_000_000
    if seconds < 3600:
        return f"{seconds // 60}m {seconds % 60:02d}s"
    return f"{seconds // 3600:,}h {seconds % 3600 // 60:02d}m"


def size(value_bytes: int | None) -> str:
    """Return a size given in bytes, in the largest unit that it fills."""
    if value_bytes is None:
        return NOT_RECORDED
    scaled, unit = float(value_bytes), 0
    while scaled >= 1024 and unit < len(_SIZES) - 1:
        scaled, unit = scaled / 1024, unit + 1
    return f"{value_bytes} B" if unit == 0 else f"{_three_digits(scaled)} {_SIZES[unit]}"


def percent(share: float | None) -> str:
    """Return a fraction as percent."""
    return NOT_RECORDED if share is None else f"{share * 100:.1f}%"


def rate(fraction: int, whole: int) -> str:
    """Return `k of n`."""
    return f"{fraction:,} of {whole:,}"


def _three_digits(value: float) -> str:
    decimals = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{decimals}f}"
