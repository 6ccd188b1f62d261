"""A bounded picture of many durations: how many, their sum, and any quantile of them.

The other modules of `analysis` keep one `Distribution` per phase, hook and module. The first values are kept as they are, so that
quantiles of an ordinary run are exact; beyond that they are counted in buckets whose bounds grow by one percent, and a quantile is then
right within half a percent. Memory is bounded either way. It never stores where a value came from.
"""

from __future__ import annotations

import math
from array import array

EXACT_VALUES = 4096
_GROWTH = 1.01
_LOG_GROWTH = math.log(_GROWTH)


class Distribution:
    """Durations in nanoseconds, added one at a time.

    Attributes:
        count: how many values were added.
        total_ns: their exact sum.
        max_ns: the greatest of them; 0 where there is none.
    """

    def __init__(self) -> None:
        self.count = 0
        self.total_ns = 0
        self.max_ns = 0
        self._values = array("d")
        self._buckets: dict[int, int] = {}

    def add(self, value_ns: int) -> None:
        """Add a duration in nanoseconds."""
        self.count += 1
        self.total_ns += value_ns
        if value_ns > self.max_ns:
            self.max_ns = value_ns
        if self.count <= EXACT_VALUES:
            self._values.append(value_ns)
        else:
            if self.count == EXACT_VALUES + 1:
                self._spill()
            self._count_in_bucket(value_ns)

    def quantile_ns(self, fraction: float) -> int | None:
        """Return the quantile in nanoseconds, or None where nothing was added.

        Args:
            fraction: 0.5 for the median; up to 1.
        """
        if self.count == 0:
            return None
        if self._values:
            return round(_interpolated(sorted(self._values), fraction))
        return min(self._from_buckets(fraction), self.max_ns)

    @property
    def exact(self) -> bool:
        """Whether quantiles are those of the values themselves."""
        return not self._buckets

    def _spill(self) -> None:
        for value in self._values:
            self._count_in_bucket(value)
        self._values = array("d")

    def _count_in_bucket(self, value_ns: float) -> None:
        # Everything up to one nanosecond shares the lowest bucket: a clock does not tell such durations apart.
        bucket = math.ceil(math.log(value_ns) / _LOG_GROWTH) if value_ns > 1 else 0
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1

    def _from_buckets(self, fraction: float) -> int:
        rank = fraction * (self.count - 1)
        passed = 0
        for bucket in sorted(self._buckets):
            passed += self._buckets[bucket]
            if passed > rank:
                return round(2 * _GROWTH**bucket / (_GROWTH + 1)) if bucket else 0
        return self.max_ns


def _interpolated(ordered: list[float], fraction: float) -> float:
    """Return the quantile of sorted values, interpolated linearly between the two nearest."""
    position = fraction * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)
