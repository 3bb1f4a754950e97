"""Intervals and tests against values from tables and from worked examples."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.bench.statistics import (
    bootstrap_interval,
    difference_interval,
    equivalence,
    incomplete_beta,
    mean,
    student_interval,
    t_cdf,
    t_quantile,
    variance,
)

FINITE = st.floats(min_value=-1e6, max_value=1e6)


@pytest.mark.parametrize(
    ("freedom", "expected"),
    [(1, 12.7062047362), (2, 4.3026527297), (4, 2.7764451052), (10, 2.2281388520), (30, 2.0422724563)],
)
def test_quantiles_of_student_are_those_of_the_table(freedom: int, expected: float) -> None:
    assert t_quantile(0.975, freedom) == pytest.approx(expected, rel=1e-9)


def test_student_with_many_degrees_of_freedom_is_normal() -> None:
    assert t_quantile(0.975, 1e6) == pytest.approx(1.959966, abs=1e-5)


def test_with_one_degree_of_freedom_student_is_cauchy() -> None:
    assert t_cdf(1.0, 1) == pytest.approx(0.75, rel=1e-12)
    assert t_cdf(-3.0, 1) == pytest.approx(0.5 + math.atan(-3.0) / math.pi, rel=1e-12)


@given(st.floats(min_value=0.001, max_value=0.999), st.floats(min_value=1, max_value=200))
def test_the_quantile_undoes_the_distribution(part: float, freedom: float) -> None:
    assert t_cdf(t_quantile(part, freedom), freedom) == pytest.approx(part, abs=1e-9)


def test_the_incomplete_beta_function_of_whole_numbers_is_a_binomial_sum() -> None:
    assert incomplete_beta(2, 3, 0.4) == pytest.approx(0.5248, rel=1e-12)


@pytest.mark.parametrize(("x", "expected"), [(0.0, 0.0), (1.0, 1.0)])
def test_the_incomplete_beta_function_ends_at_nothing_and_one(x: float, expected: float) -> None:
    assert incomplete_beta(2.5, 0.5, x) == expected


def test_the_variance_is_of_the_population() -> None:
    assert variance([2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0]) == pytest.approx(32 / 7)


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
    assert test.p_value == pytest.approx(1 - t_cdf(1.0, 4))


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
    half = 1.96 * math.sqrt(variance(values) / 100)
    assert interval.low == pytest.approx(49.5 - half, abs=0.6)
    assert interval.high == pytest.approx(49.5 + half, abs=0.6)


def test_the_bootstrap_of_one_value_is_unknown() -> None:
    assert bootstrap_interval([[1.0], [1.0, 2.0]], lambda drawn: mean(drawn[0])) is None


@given(st.lists(FINITE, min_size=2, max_size=20))
def test_the_mean_lies_within_its_interval(values: list[float]) -> None:
    interval = student_interval(values)
    assert interval is not None
    assert interval.low <= mean(values) <= interval.high
