"""What a sample is worth under local steps: bounds and directions; docs/results/learning judges the constants."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.policy.sample_worth import effective_ranks, sample_worth

WINDOWS = st.floats(min_value=0, max_value=1e6)
RANKS = st.floats(min_value=1, max_value=1e4)


@given(window=WINDOWS, ranks=RANKS)
def test_a_sample_is_worth_at_most_one_and_at_least_one_rank_of_many(window: float, ranks: float) -> None:
    assert 1 / ranks - 1e-9 <= sample_worth(window, ranks=ranks) <= 1


@given(window=WINDOWS, longer=WINDOWS, ranks=RANKS)
def test_longer_windows_never_raise_the_worth(window: float, longer: float, ranks: float) -> None:
    assert sample_worth(window + longer, ranks=ranks) <= sample_worth(window, ranks=ranks)


@given(window=WINDOWS, ranks=RANKS, more=RANKS)
def test_more_ranks_never_raise_the_worth(window: float, ranks: float, more: float) -> None:
    assert sample_worth(window, ranks=ranks + more) <= sample_worth(window, ranks=ranks)


def test_a_single_rank_loses_nothing() -> None:
    assert sample_worth(100, ranks=1) == 1


def test_effective_ranks_count_equal_ranks_in_full_and_slow_ranks_in_part() -> None:
    assert effective_ranks((3.0, 3.0, 3.0)) == pytest.approx(3)
    assert effective_ranks((1.0, 0.4)) == pytest.approx(1.69, abs=0.01)
