"""The rank-sum test against what can be counted by hand, and what it must never do."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import rankdata

from outrider.bench.statistics import RankSum, holm, rank_sum

TIMES = st.lists(st.integers(1, 9).map(float), min_size=1, max_size=5)
GROUPS = st.lists(st.lists(st.integers(1, 30).map(float), min_size=2, max_size=4), min_size=2, max_size=4)


def alone(times: list[float]) -> list[list[float]]:
    """Every timing a group of its own: the classical test."""
    return [[time] for time in times]


def counted_p(first: list[float], second: list[float]) -> float:
    """Every way to deal the ranks out, one by one."""
    ranks = rankdata(first + second).tolist()
    middle = len(first) * (len(ranks) + 1) / 2
    distance = abs(sum(ranks[: len(first)]) - middle)
    sums = [sum(chosen) for chosen in combinations(ranks, len(first))]
    return sum(abs(total - middle) >= distance - 1e-9 for total in sums) / len(sums)


def test_five_against_five_with_no_overlap_has_two_chances_in_252() -> None:
    tested = rank_sum(alone([1, 2, 3, 4, 5]), alone([6, 7, 8, 9, 10]))
    assert tested == RankSum(p_value=pytest.approx(2 / 252), method="exact", quicker_part=0.0)


@given(TIMES, TIMES)
def test_the_exact_p_value_is_the_one_that_counting_gives(first: list[float], second: list[float]) -> None:
    assert rank_sum(alone(first), alone(second)).p_value == pytest.approx(counted_p(first, second))


def test_many_timings_take_the_normal_curve() -> None:
    # U = 0, its mean is 84.5 and its deviation 19.5; half a step nearer.
    tested = rank_sum(alone([float(time) for time in range(13)]), alone([float(time) for time in range(13, 26)]))
    assert tested.method == "normal"
    assert tested.p_value == pytest.approx(1.65e-5, rel=0.01)


def test_ties_narrow_the_normal_curve() -> None:
    # Nineteen ones and seven twos: U = 39, and 14.99 in place of 19.5.
    assert rank_sum(alone([1.0] * 13), alone([1.0] * 6 + [2.0] * 7)).p_value == pytest.approx(0.00269, rel=0.01)


def test_timings_that_are_all_equal_differ_in_nothing() -> None:
    tested = rank_sum(alone([1.0] * 20), alone([1.0] * 20))
    assert (tested.p_value, tested.cliffs_delta) == (1.0, 0.0)


def test_rounds_that_differ_among_themselves_are_no_difference_between_two_sets() -> None:
    rounds = [[1.0, 1.1, 1.2, 1.3], [3.0, 3.1, 3.2, 3.3]]
    others = [[1.4, 1.5, 1.6, 1.7], [9.0, 9.1, 9.2, 9.3]]
    assert rank_sum(rounds, others).p_value > 0.3


def test_rounds_that_agree_show_a_small_difference() -> None:
    rounds = [[1.00, 1.01, 1.02, 1.03]] * 5
    others = [[1.04, 1.05, 1.06, 1.07]] * 5
    tested = rank_sum(rounds, others)
    assert tested.method == "groups"
    assert tested.p_value < 0.001
    assert (tested.quicker_part, tested.effect) == (0.0, "large")


def test_one_round_on_each_side_shows_nothing() -> None:
    assert rank_sum([[1.0, 1.1]], [[2.0, 2.1]]).p_value == 1.0


@given(GROUPS, GROUPS)
def test_the_other_way_round_it_is_the_same_test(first: list[list[float]], second: list[list[float]]) -> None:
    there, back = rank_sum(first, second), rank_sum(second, first)
    assert there.p_value == pytest.approx(back.p_value)
    assert there.cliffs_delta == pytest.approx(-back.cliffs_delta)
    assert 0.0 <= there.p_value <= 1.0


@pytest.mark.parametrize(
    ("quicker_part", "effect"), [(0.5, "negligible"), (0.6, "small"), (0.7, "medium"), (0.1, "large")]
)
def test_the_size_of_an_effect_has_a_word(quicker_part: float, effect: str) -> None:
    assert RankSum(p_value=0.5, method="exact", quicker_part=quicker_part).effect == effect


def test_holm_raises_the_smallest_most_and_keeps_the_order() -> None:
    assert holm([0.04, 0.01, 0.5]) == [pytest.approx(0.08), pytest.approx(0.03), pytest.approx(0.5)]


def test_holm_never_passes_one() -> None:
    assert holm([0.9, 0.8]) == [1.0, 1.0]
