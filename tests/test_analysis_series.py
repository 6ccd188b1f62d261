from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msprobe.analysis.series import Series

VALUES = st.one_of(st.none(), st.floats(-1e6, 1e6), st.sampled_from([math.nan, math.inf, -math.inf]))


def told(values):
    series = Series()
    for step, value in enumerate(values):
        series.add(step, value)
    return series.told()


def test_forty_of_fifty_bad_losses_are_counted_and_never_averaged():
    found = told([1.0 if step % 5 == 0 else math.nan for step in range(50)])
    assert (found.nonfinite_count, found.nan, found.count, found.first_nonfinite_step) == (40, 40, 50, 1)
    assert (found.finite_min, found.finite_max, found.finite_mean, found.finite_count) == (1.0, 1.0, 1.0, 10)
    assert sum(stretch.nonfinite for stretch in found.curve) == 40


def test_kinds_of_nonfinite_values_are_told_apart():
    found = told([math.inf, -math.inf, math.nan, math.nan, 2.0])
    assert (found.posinf, found.neginf, found.nan) == (1, 1, 2)
    assert math.isinf(found.first)
    assert found.last == 2.0


def test_a_value_that_was_not_recorded_is_not_a_value():
    found = told([None, 3.0, None])
    assert (found.count, found.not_recorded, found.first, found.first_step, found.last_step) == (1, 2, 3.0, 1, 1)


def test_nothing_recorded_has_no_statistics():
    found = told([])
    assert (found.count, found.first, found.finite_min, found.finite_mean, found.curve) == (0, None, None, None, [])


@given(st.lists(VALUES, max_size=600))
def test_statistics_are_those_of_the_finite_values(values):
    found = told(values)
    finite = [value for value in values if value is not None and math.isfinite(value)]
    assert found.finite_count == len(finite)
    assert found.finite_min == (min(finite) if finite else None)
    assert found.finite_max == (max(finite) if finite else None)
    if finite:
        assert found.finite_mean == pytest.approx(statistics.fmean(finite), rel=1e-9, abs=1e-6)
        assert values[found.finite_max_step] == max(finite)
    assert sum(stretch.finite + stretch.nonfinite for stretch in found.curve) == found.count


def test_the_curve_of_a_long_run_stays_short_and_keeps_a_single_bad_value():
    found = told([math.nan if step == 77_777 else float(step) for step in range(100_000)])
    assert 32 <= len(found.curve) <= 128
    assert [stretch.nonfinite for stretch in found.curve].count(1) == 1
    first = found.curve[0]
    assert first.finite_mean == pytest.approx((first.finite - 1) / 2)


def test_values_near_the_largest_double_have_a_mean():
    assert told([1.7e308, 1.7e308, 1.7e308]).finite_mean == pytest.approx(1.7e308)
