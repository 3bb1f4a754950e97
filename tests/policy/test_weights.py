from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import ConfigError
from outrider.policy.weights import proportions, weights

unhurried = settings(deadline=None)


def test_weights_are_parts_of_all_samples() -> None:
    assert weights([30, 10]) == (0.75, 0.25)


def test_a_rank_without_samples_has_no_weight() -> None:
    assert weights([0, 64]) == (0.0, 1.0)


def test_when_nobody_moved_all_weights_are_zero() -> None:
    assert weights([0, 0, 0]) == (0.0, 0.0, 0.0)


@unhurried
@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=50).filter(any))
def test_weights_sum_to_one(samples: list[int]) -> None:
    assert sum(weights(samples)) == pytest.approx(1.0, abs=1e-12)


def test_proportions_are_scaled_to_one() -> None:
    assert proportions("shares", (3, 1), world_size=2) == (0.75, 0.25)


def test_too_few_entries_are_an_error() -> None:
    with pytest.raises(ConfigError) as caught:
        proportions("shares", (0.5, 0.5), world_size=3)
    assert caught.value.message == "shares must have one entry per rank, got 2 for world_size=3"
    assert caught.value.hint == "give 3 numbers or leave shares out"


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_entries_that_are_not_positive_numbers_are_an_error(value: float) -> None:
    with pytest.raises(ConfigError) as caught:
        proportions("speed_hints", (1.0, value), world_size=2)
    assert caught.value.message == f"speed_hints must be positive numbers, got 1, {value:g}"
    assert caught.value.hint == "leave a device out of devices to give it nothing"
