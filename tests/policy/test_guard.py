from __future__ import annotations

import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.policy.effects import Decision
from outrider.policy.guard import Guard

unhurried = settings(deadline=None)


def judged(guard: Guard, drifts: list[float]) -> list[Decision]:
    verdicts = [guard.judge(drift) for drift in drifts]
    return [verdict for verdict in verdicts if verdict is not None]


def noisy(level: float, count: int, *, seed: int, decay: float = 1.0) -> list[float]:
    generator = random.Random(seed)
    return [level * decay**step * generator.uniform(0.7, 1.3) for step in range(count)]


def test_a_diverging_run_is_shrunk_and_kept_from_growing() -> None:
    guard = Guard(None)
    verdicts = judged(guard, [0.01] * 10 + [0.01 * 1.3**step for step in range(1, 9)])
    assert [verdict.value for verdict in verdicts] == ["rising"]
    assert verdicts[0].reason == (
        "drift / sqrt(anchor) 0.0371, threshold 0.03: above the threshold: a shorter window, no growth"
    )
    assert guard.blocks_growth


def test_a_run_that_goes_on_diverging_is_shrunk_again_and_again() -> None:
    verdicts = judged(Guard(None), [0.01] * 10 + [0.01 * 1.2**step for step in range(30)])
    assert [verdict.value for verdict in verdicts] == ["rising"] * 6


def test_slow_divergence_is_seen_too() -> None:
    verdicts = judged(Guard(None), [0.01 * 1.03**step for step in range(100)])
    assert verdicts[0].value == "rising"


@unhurried
@given(st.integers(0, 10_000))
def test_a_steady_noisy_run_is_left_alone(seed: int) -> None:
    assert judged(Guard(None), noisy(0.01, 300, seed=seed)) == []


@unhurried
@given(st.integers(0, 10_000))
def test_a_decaying_noisy_run_is_left_alone(seed: int) -> None:
    assert judged(Guard(None), noisy(0.01, 300, seed=seed, decay=0.98)) == []


def test_a_drop_of_the_learning_rate_does_not_blind_the_guard() -> None:
    verdicts = judged(Guard(None), [0.1] * 20 + [0.01] * 20 + [0.05] * 3)
    assert [verdict.value for verdict in verdicts] == ["rising"]


def test_a_single_odd_average_is_not_a_trend() -> None:
    assert judged(Guard(None), [0.01] * 20 + [1.0] + [0.01] * 20) == []


def test_longer_windows_do_not_look_like_divergence() -> None:
    guard = Guard(None)
    short = [guard.judge(0.01, anchor=10) for _ in range(12)]
    long = [guard.judge(0.04, anchor=40) for _ in range(12)]
    assert set(short + long) == {None}


def test_growth_is_free_again_after_three_calm_averages() -> None:
    guard = Guard(0.05)
    verdicts = judged(guard, [0.1, 0.01, 0.01, 0.01, 0.01])
    assert [verdict.value for verdict in verdicts] == ["rising", "stable"]
    assert verdicts[1].reason == "drift 0.01, threshold 0.05: below the threshold for 3 averages"
    assert not guard.blocks_growth


def test_growth_stays_blocked_until_it_has_been_calm_long_enough() -> None:
    guard = Guard(0.05)
    judged(guard, [0.1, 0.01, 0.01, 0.01])
    assert guard.blocks_growth


def test_a_plateau_becomes_the_new_normal_of_an_automatic_threshold() -> None:
    guard = Guard(None)
    verdicts = judged(guard, [0.01] * 10 + [0.05] * 20)
    assert [verdict.value for verdict in verdicts] == ["rising", "stable"]
    assert verdicts[1].reason == (
        "drift / sqrt(anchor) 0.05, threshold 0.03: no longer rising; taken as the new normal"
    )
    assert guard.threshold == pytest.approx(0.15)


def test_a_given_threshold_is_not_moved_by_a_plateau() -> None:
    guard = Guard(0.03)
    verdicts = judged(guard, [0.05] * 9)
    assert [verdict.value for verdict in verdicts] == ["rising"] * 3
    assert guard.threshold == 0.03


def test_the_wish_to_shrink_lasts_for_one_judgement() -> None:
    guard = Guard(0.03)
    guard.judge(0.05)
    wished = guard.wants_shrink
    guard.judge(0.05)
    assert (wished, guard.wants_shrink) == (True, False)


@pytest.mark.parametrize("drift", [math.inf, math.nan])
def test_a_drift_that_is_no_number_is_above_any_threshold(drift: float) -> None:
    verdict = Guard(0.05).judge(drift)
    assert verdict is not None
    assert verdict.value == "rising"


@pytest.mark.parametrize("drift", [None, 0.0])
def test_no_drift_is_no_news(drift: float | None) -> None:
    guard = Guard(None)
    assert [guard.judge(drift) for _ in range(20)] == [None] * 20
    assert guard.threshold is None


def test_a_restored_guard_goes_on_as_the_saved_one() -> None:
    guard = Guard(None)
    judged(guard, [0.01] * 10 + [0.05] * 3)
    restored = Guard.restored(json.loads(json.dumps(guard.state())))
    assert judged(restored, [0.05] * 10) == judged(guard, [0.05] * 10)
