"""A curve in one line of text, on which non-finite values are seen.

The summary draws losses and norms with it. Every column stands for one or more steps and is as high as the mean of their finite values;
a column with any non-finite value is a cross, whatever else it holds, so that a bad value is never smoothed away.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.text import Text

from msprobe.analysis.series import Stretch

LEVELS = "▁▂▃▄▅▆▇█"
NOT_FINITE = "×"
# A variation below this part of the values is rounding, and would look like a rise and fall if it were stretched to the full height.
_FLAT = 1e-4


def sparkline(curve: Sequence[Stretch], columns: int) -> Text:
    """Return the curve, at most `columns` characters wide."""
    merged = _merged(curve, columns)
    means = [stretch.finite_mean for stretch in merged if stretch.finite_mean is not None]
    low, high = (min(means), max(means)) if means else (0.0, 0.0)
    line = Text()
    for stretch in merged:
        if stretch.nonfinite or stretch.finite_mean is None:
            line.append(NOT_FINITE, style="bold red")
        else:
            line.append(_level(stretch.finite_mean, low, high), style="cyan")
    return line


def _merged(curve: Sequence[Stretch], columns: int) -> list[Stretch]:
    """Join neighbours so that no more than `columns` stretches are left."""
    per_column = max(math.ceil(len(curve) / columns), 1)
    merged = []
    for start in range(0, len(curve), per_column):
        first = curve[start]
        stretch = Stretch(first.step, first.finite_mean, first.finite, first.nonfinite)
        for other in curve[start + 1 : start + per_column]:
            stretch.absorb(other)
        merged.append(stretch)
    return merged


def _level(value: float, low: float, high: float) -> str:
    # Halved first: the distance between two large doubles of opposite sign overflows.
    span = high / 2 - low / 2
    if span <= _FLAT * max(abs(low), abs(high)) / 2:
        return LEVELS[0]
    place = (value / 2 - low / 2) / span
    return LEVELS[min(int(place * len(LEVELS)), len(LEVELS) - 1)]
