"""Intervals and tests against values from tables and from worked examples."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import t as student

from outrider.bench.statistics import bootstrap_interval, difference_interval, equivalence, mean, student_interval

FINITE = st.floats(min_value=-1e6, max_value=1e6)


def test_the_student_interval_of_three_values() -> None:
    interval = student_interval([1.0, 2.0, 3.0])
    assert interval is not None
    assert interval.low == pytest.approx(2 - 4.3026527297 / math.sqrt(3))
    assert interval.high == pytest.approx(2 + 4.3026527297 / math.sqrt(3))


def test_one_value_has_no_interval() -> None:
    assert student_interval([1.0]) is None
    assert difference_interval([1.0], [1.0, 2.0]) is None
    assert equivalence([1.0, 2.0], [1.0], margin=1.0) is None


def test_the_welch_interval_of_a_worked_example() -> None:
    first = [27.5, 21.0, 19.0, 23.6, 17.0, 17.9, 16.9, 20.1, 21.9, 22.6, 23.1, 19.6, 19.0, 21.7, 21.4]
    second = [27.1, 22.0, 20.8, 23.4, 23.4, 23.5, 25.8, 22.0, 24.8, 20.2, 21.9, 22.1, 22.9, 20.5, 24.4]
    # Known of it: p = 0.021, so that the interval of 97.8 % leaves nothing out and that of 98 % does not.
    surer = difference_interval(first, second, confidence=0.98)
    less_sure = difference_interval(first, second, confidence=0.978)
    assert surer is not None
    assert less_sure is not None
    assert (surer.holds(0.0), less_sure.holds(0.0)) == (True, False)


def test_close_values_are_equivalent_within_a_wide_margin() -> None:
    test = equivalence([0.990, 0.991, 0.992], [0.991, 0.990, 0.989], margin=0.005)
    assert test is not None
    assert test.difference == pytest.approx(0.001)
    assert test.is_shown


def test_the_same_values_are_not_equivalent_within_a_narrow_margin() -> None:
    test = equivalence([0.990, 0.991, 0.992], [0.991, 0.990, 0.989], margin=0.001)
    assert test is not None
    assert not test.is_shown


def test_the_p_value_is_that_of_the_harder_side() -> None:
    # Standard error 1, four degrees of freedom: leads of 1 and 3 standard errors.
    values = [-math.sqrt(1.5), 0.0, math.sqrt(1.5)]
    test = equivalence([value + 1.0 for value in values], values, margin=2.0)
    assert test is not None
    assert test.p_value == pytest.approx(student.sf(1.0, 4))


def test_values_without_spread_are_equivalent_where_they_lie_within_the_margin() -> None:
    inside = equivalence([1.0, 1.0], [1.1, 1.1], margin=0.2)
    outside = equivalence([1.0, 1.0], [1.3, 1.3], margin=0.2)
    assert inside is not None
    assert outside is not None
    assert (inside.p_value, outside.p_value) == (0.0, 1.0)


def test_the_bootstrap_is_the_same_for_the_same_seed() -> None:
    groups = [[1.0, 2.0, 4.0, 8.0]]
    assert bootstrap_interval(groups, lambda drawn: mean(drawn[0]), seed=3) == bootstrap_interval(
        groups, lambda drawn: mean(drawn[0]), seed=3
    )


def test_the_bootstrap_of_a_mean_is_near_the_normal_interval() -> None:
    values = [float(value) for value in range(100)]
    interval = bootstrap_interval([values], lambda drawn: mean(drawn[0]))
    assert interval is not None
    half = 1.96 * math.sqrt(statistics.variance(values) / 100)
    assert interval.low == pytest.approx(49.5 - half, abs=0.6)
    assert interval.high == pytest.approx(49.5 + half, abs=0.6)


def test_the_bootstrap_of_one_value_is_unknown() -> None:
    assert bootstrap_interval([[1.0], [1.0, 2.0]], lambda drawn: mean(drawn[0])) is None


@given(st.lists(FINITE, min_size=2, max_size=20))
def test_the_mean_lies_within_its_interval(values: list[float]) -> None:
    interval = student_interval(values)
    assert interval is not None
    assert interval.low <= mean(values) <= interval.high
