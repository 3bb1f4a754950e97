from __future__ import annotations

import json
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.policy.pace import Pace

unhurried = settings(deadline=None)


def observed(pace: Pace, times_ms: Iterable[float]) -> float:
    for ms in times_ms:
        pace.observe(compute_ms=ms, samples=64, batch_size=64)
    assert pace.ms is not None
    return pace.ms


def test_nothing_is_known_at_first() -> None:
    assert Pace().ms is None


def test_the_first_observation_is_taken_as_is() -> None:
    assert observed(Pace(), [120.0]) == 120.0


def test_times_are_per_full_batch() -> None:
    pace = Pace()
    pace.observe(compute_ms=300.0, samples=96, batch_size=64)
    assert pace.ms == 200.0


def test_a_window_without_samples_teaches_nothing() -> None:
    pace = Pace(100.0)
    pace.observe(compute_ms=5.0, samples=0, batch_size=64)
    assert pace.ms == 100.0


def test_a_window_without_measured_time_teaches_nothing() -> None:
    pace = Pace(100.0)
    pace.observe(compute_ms=0.0, samples=64, batch_size=64)
    assert pace.ms == 100.0


@pytest.mark.parametrize("after_ms", [10.0, 50.0, 130.0, 200.0, 1000.0])
def test_a_step_change_of_speed_is_learned_in_three_windows(after_ms: float) -> None:
    assert observed(Pace(100.0), [after_ms] * 3) == pytest.approx(after_ms, rel=0.1)


def test_jitter_of_ten_percent_is_smoothed() -> None:
    jittered = [90.0, 110.0, 105.0, 92.0, 108.0, 95.0, 110.0, 90.0, 101.0, 97.0] * 5
    pace = Pace(100.0)
    assert all(observed(pace, [ms]) == pytest.approx(100.0, abs=4.0) for ms in jittered)


def test_one_hiccup_is_forgotten_after_three_windows() -> None:
    assert observed(Pace(100.0), [1000.0, 100.0, 100.0, 100.0]) == pytest.approx(100.0, rel=0.15)


@unhurried
@given(st.floats(0.1, 1e4), st.lists(st.floats(0.1, 1e4), min_size=1, max_size=20))
def test_the_gain_stays_between_a_tenth_and_eight_tenths(start_ms: float, times_ms: list[float]) -> None:
    pace = Pace(start_ms)
    before_ms = observed(pace, times_ms[:-1] or [start_ms])
    after_ms = observed(pace, times_ms[-1:])
    gap_ms = abs(times_ms[-1] - before_ms)
    assert 0.1 * gap_ms - 1e-6 <= abs(after_ms - before_ms) <= 0.8 * gap_ms + 1e-6


def test_a_restored_pace_goes_on_as_the_saved_one() -> None:
    pace = Pace()
    observed(pace, [100.0, 150.0])
    restored = Pace.restored(json.loads(json.dumps(pace.state())))
    assert observed(restored, [150.0]) == observed(pace, [150.0])
