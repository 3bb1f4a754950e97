"""How a rank's time follows its samples: what is fixed, what each sample adds, and how changes are learned."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from outrider.policy.step_cost import TimeModel


def fitted(observations: Sequence[tuple[int, float]]) -> TimeModel:
    model = TimeModel()
    for samples, ms in observations:
        model.observe(samples, ms)
        model.fit()
    return model


def test_with_one_size_seen_time_is_proportional() -> None:
    model = fitted([(64, 32.0)] * 8)
    assert (model.fixed_ms, model.per_sample_ms) == pytest.approx((0.0, 0.5))


def test_sizes_that_vary_tell_fixed_from_per_sample_cost() -> None:
    model = fitted([(count, 10 + 0.5 * count) for count in (64, 80, 48, 80, 48)])
    assert (model.fixed_ms, model.per_sample_ms) == pytest.approx((10.0, 0.5))


def test_coefficients_are_never_negative() -> None:
    model = fitted([(64, 32.0), (80, 64.0), (48, 12.0), (80, 64.0), (48, 12.0)])
    assert model.fixed_ms == 0.0
    assert model.per_sample_ms > 0


def test_samples_are_never_taken_for_free() -> None:
    model = fitted([(64, 10.0), (80, 10.0), (48, 10.0), (80, 10.0), (48, 10.0)])
    assert model.per_sample_ms == pytest.approx(0.05 * 10 / 64, rel=0.01)


def test_what_was_learned_of_the_fixed_cost_outlives_the_varied_sizes() -> None:
    model = fitted([(count, 10 + 0.5 * count) for count in (64, 80, 48, 80, 48)] + [(64, 42.0)] * 300)
    assert (model.fixed_ms, model.per_sample_ms) == pytest.approx((10.0, 0.5), rel=0.01)


def test_a_single_hiccup_hardly_moves_the_model() -> None:
    model = fitted([(64, 32.0)] * 20 + [(64, 320.0)])
    assert model.per_sample_ms == pytest.approx(0.5, rel=0.05)


def test_a_lasting_change_of_speed_is_learned_in_three_steps() -> None:
    model = fitted([(64, 32.0)] * 20 + [(64, 96.0)] * 3)
    assert model.per_sample_ms == pytest.approx(1.5)


def test_a_lasting_change_of_speed_is_announced_once() -> None:
    model = fitted([(64, 32.0)] * 20)
    announced = []
    for _ in range(6):
        announced.append(model.observe(64, 96.0))
        model.fit()
    assert announced == [False, False, True, False, False, False]


def test_a_restored_model_goes_on_as_the_saved_one() -> None:
    model = fitted([(64, 32.0), (80, 41.0), (48, 22.0), (80, 43.0), (48, 90.0)])
    restored = TimeModel.restored(json.loads(json.dumps(model.state())))
    assert restored.state() == model.state()
