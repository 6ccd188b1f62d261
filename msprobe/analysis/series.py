"""A number that is recorded step by step, told briefly: first, last, extremes, what was not finite, and its curve.

`analysis.losses`, `analysis.norms` and `analysis.settings` keep one `Series` for each number. Non-finite values never enter a statistic
and are never dropped: they are counted by kind, with the first step, and every stretch of the curve says how many it holds. Memory is
bounded: the curve has at most a fixed number of stretches, which cover more steps each as the run grows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_STRETCHES = 128


@dataclass(slots=True)
class Stretch:
    """Consecutive values of a curve: the step of the first one, the mean of the finite ones, and the counts.

    `finite_mean` is None where no value of the stretch is finite.
    """

    step: int
    finite_mean: float | None
    finite: int
    nonfinite: int

    def absorb(self, other: Stretch) -> None:
        """Take in the stretch that follows."""
        if other.finite_mean is not None:
            weight = other.finite / (self.finite + other.finite)
            mine = other.finite_mean if self.finite_mean is None else self.finite_mean
            self.finite_mean = mine * (1 - weight) + other.finite_mean * weight
        self.finite += other.finite
        self.nonfinite += other.nonfinite


@dataclass(frozen=True, slots=True)
class Told:
    """What a series held. `finite_*` are statistics of the finite values alone; None where there is none."""

    count: int
    first: float | None
    first_step: int | None
    last: float | None
    last_step: int | None
    finite_count: int
    finite_min: float | None
    finite_min_step: int | None
    finite_max: float | None
    finite_max_step: int | None
    finite_mean: float | None
    nan: int
    posinf: int
    neginf: int
    nonfinite_count: int
    first_nonfinite_step: int | None
    not_recorded: int
    curve: list[Stretch]


class Series:
    """Collects a number over the steps; `told` says what it held so far."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None
        self._last: tuple[int, float] | None = None
        self._min: tuple[float, int] | None = None
        self._max: tuple[float, int] | None = None
        self._mean = 0.0
        self._finite = 0
        self._kinds = {"nan": 0, "posinf": 0, "neginf": 0}
        self._first_nonfinite: int | None = None
        self._missing = 0
        self._curve: list[Stretch] = []
        self._per_stretch = 1

    def add(self, step: int, value: float | None) -> None:
        """Add the value of a step; None for one that was not recorded."""
        if value is None:
            self._missing += 1
            return
        if self._first is None:
            self._first = (step, value)
        self._last = (step, value)
        finite = math.isfinite(value)
        if finite:
            self._add_finite(step, value)
        else:
            self._add_nonfinite(step, value)
        self._extend_curve(Stretch(step, value, 1, 0) if finite else Stretch(step, None, 0, 1))

    def _add_finite(self, step: int, value: float) -> None:
        self._finite += 1
        # A running mean: a plain sum of values near the largest double would overflow.
        self._mean += value / self._finite - self._mean / self._finite
        if self._min is None or value < self._min[0]:
            self._min = (value, step)
        if self._max is None or value > self._max[0]:
            self._max = (value, step)

    def _add_nonfinite(self, step: int, value: float) -> None:
        kind = "nan" if math.isnan(value) else "posinf" if value > 0 else "neginf"
        self._kinds[kind] += 1
        if self._first_nonfinite is None:
            self._first_nonfinite = step

    def _extend_curve(self, value: Stretch) -> None:
        if self._curve and self._curve[-1].finite + self._curve[-1].nonfinite < self._per_stretch:
            self._curve[-1].absorb(value)
            return
        if len(self._curve) == _STRETCHES:
            for left, right in zip(self._curve[::2], self._curve[1::2], strict=True):
                left.absorb(right)
            self._curve = self._curve[::2]
            self._per_stretch *= 2
        self._curve.append(value)

    def told(self) -> Told:
        """Return what the series held so far."""
        first_step, first = self._first or (None, None)
        last_step, last = self._last or (None, None)
        least, least_step = self._min or (None, None)
        greatest, greatest_step = self._max or (None, None)
        nonfinite = sum(self._kinds.values())
        return Told(
            count=self._finite + nonfinite,
            first=first,
            first_step=first_step,
            last=last,
            last_step=last_step,
            finite_count=self._finite,
            finite_min=least,
            finite_min_step=least_step,
            finite_max=greatest,
            finite_max_step=greatest_step,
            finite_mean=self._mean if self._finite else None,
            **self._kinds,
            nonfinite_count=nonfinite,
            first_nonfinite_step=self._first_nonfinite,
            not_recorded=self._missing,
            curve=list(self._curve),
        )
