from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msprobe.analysis.distribution import EXACT_VALUES, Distribution


def filled(values) -> Distribution:
    distribution = Distribution()
    for value in values:
        distribution.add(value)
    return distribution


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=200))
def test_few_values_have_their_exact_median_and_sum(values):
    distribution = filled(values)
    assert distribution.quantile_ns(0.5) == pytest.approx(statistics.median(values), abs=0.5)
    assert (distribution.total_ns, distribution.max_ns, distribution.count) == (sum(values), max(values), len(values))
    assert distribution.exact


def test_the_95th_percentile_interpolates_between_neighbours():
    assert filled(range(0, 1010, 10)).quantile_ns(0.95) == 950
    assert filled([0, 100]).quantile_ns(0.95) == 95


def test_nothing_added_has_no_quantile():
    assert Distribution().quantile_ns(0.5) is None


def test_many_values_are_right_within_half_a_percent_and_bounded():
    values = [(index * 7919) % 1_000_003 * 1000 for index in range(20 * EXACT_VALUES)]
    distribution = filled(values)
    ordered = sorted(values)
    assert not distribution.exact
    for fraction in (0.05, 0.5, 0.95):
        assert distribution.quantile_ns(fraction) == pytest.approx(ordered[round(fraction * (len(ordered) - 1))], rel=0.006)
    assert distribution.total_ns == sum(values)
    assert len(distribution._buckets) < 3000
    assert not distribution._values


def test_many_zeros_have_a_median_of_zero():
    assert filled([0] * (2 * EXACT_VALUES)).quantile_ns(0.5) == 0


def test_no_quantile_exceeds_the_greatest_value():
    assert filled([1001] * (2 * EXACT_VALUES)).quantile_ns(0.95) <= 1001
