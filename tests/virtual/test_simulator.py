"""The simulator: what-if questions on clocks alone."""

from __future__ import annotations

import math
import random

import pytest

from outrider.errors import ConfigError
from outrider.policy.policies import POLICIES
from outrider.virtual.simulator import DeviceSpeed, Network, Outcome, Scenario, simulate

FREE = Network(latency_ms=0.0, bandwidth_bytes_per_s=1e15)


def pair(ratio: float, *, jitter: float = 0.0, network: Network = FREE) -> Scenario:
    return Scenario(
        speeds=(DeviceSpeed(per_sample_ms=0.1, jitter=jitter), DeviceSpeed(per_sample_ms=0.1 * ratio, jitter=jitter)),
        network=network,
        num_samples=64 * 2000,
        batch_size=64,
    )


@pytest.mark.parametrize("ratio", [1.0, 2.0, 2.5, 5.0])
def test_sync_on_two_unequal_devices_has_the_known_efficiency(ratio: float) -> None:
    assert simulate("sync", pair(ratio)).efficiency == pytest.approx(2 / (1 + ratio), abs=0.01)


@pytest.mark.parametrize("policy", ["balanced", "cadence", "async", "independent"])
def test_the_other_policies_come_close_to_the_ideal(policy: str) -> None:
    assert simulate(policy, pair(2.5)).efficiency > 0.97


def test_async_hides_an_average_that_cadence_shows() -> None:
    slow = Network(latency_ms=0.02, bandwidth_bytes_per_s=1e8)
    shown = simulate("cadence", pair(2.5, network=slow))
    hidden = simulate("async", pair(2.5, network=slow))
    assert hidden.efficiency > shown.efficiency
    assert hidden.exposed_average_fraction < 0.1 * shown.exposed_average_fraction


def test_cadence_keeps_averaging_near_its_target_on_a_slow_network() -> None:
    slow = Network(latency_ms=20.0, bandwidth_bytes_per_s=1e9)
    assert simulate("cadence", pair(2.5, network=slow)).exposed_average_fraction < 0.15


def test_leases_from_a_far_store_make_windows_longer() -> None:
    near, far = (Network(latency_ms=latency, bandwidth_bytes_per_s=1e12) for latency in (0.01, 10.0))
    assert simulate("async", pair(2.5, network=far)).averages < simulate("async", pair(2.5, network=near)).averages
    assert simulate("async", pair(2.5, network=far)).efficiency > 0.85


def test_the_same_question_has_the_same_answer() -> None:
    assert simulate("async", pair(3.3, jitter=0.2)) == simulate("async", pair(3.3, jitter=0.2))


def test_jitter_costs_cadence_more_than_async() -> None:
    noisy = pair(2.5, jitter=0.3)
    assert simulate("cadence", noisy).wait_fraction > simulate("async", noisy).wait_fraction


@pytest.fixture(scope="module")
def thousand() -> dict[str, Outcome]:
    draw = random.Random(0)
    scenario = Scenario(
        speeds=tuple(DeviceSpeed(per_sample_ms=0.1 * draw.uniform(1, 5), jitter=0.1) for _ in range(1000)),
        network=Network(latency_ms=0.1, bandwidth_bytes_per_s=1.25e9),
        num_samples=64 * 1000 * 20,
        batch_size=64,
    )
    return {policy: simulate(policy, scenario) for policy in POLICIES}


def test_a_thousand_ranks_use_every_sample(thousand: dict[str, Outcome]) -> None:
    assert {sum(outcome.samples_by_rank) for outcome in thousand.values()} == {64 * 1000 * 20}


def test_a_thousand_ranks_do_best_without_lockstep(thousand: dict[str, Outcome]) -> None:
    efficiency = {policy: outcome.efficiency for policy, outcome in thousand.items()}
    assert efficiency["async"] > efficiency["balanced"] > efficiency["sync"]
    assert efficiency["cadence"] > efficiency["sync"]


def test_fractions_of_time_are_fractions(thousand: dict[str, Outcome]) -> None:
    for outcome in thousand.values():
        assert 0 <= outcome.wait_fraction <= 1
        assert 0 <= outcome.exposed_average_fraction <= 1


def test_an_all_reduce_of_one_rank_is_free() -> None:
    assert Network().all_reduce_ms(1_000_000, 1) == 0.0


def test_an_all_reduce_pays_for_bytes_and_rounds() -> None:
    network = Network(latency_ms=1.0, bandwidth_bytes_per_s=1e6)
    assert network.all_reduce_ms(1_000_000, 2) == pytest.approx(1000.0 + 2.0)


@pytest.mark.parametrize("name", ["asinc", "Async"])
def test_an_unknown_policy_is_an_error_with_the_nearest_name(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        simulate(name, pair(2.0))
    assert str(caught.value) == f"unknown policy {name!r}\nhint: did you mean 'async'?"


def test_a_scenario_needs_a_rank() -> None:
    with pytest.raises(ConfigError) as caught:
        Scenario(speeds=(), network=FREE, num_samples=1, batch_size=1)
    assert caught.value.message == "a scenario needs at least one rank, got none"


@pytest.mark.parametrize("number", [math.nan, math.inf, -1])
def test_latency_and_model_size_are_finite(number: float) -> None:
    with pytest.raises(ConfigError, match="latency_ms must be finite and >= 0"):
        Network(latency_ms=number)
    with pytest.raises(ConfigError, match="model_bytes must be finite and >= 0"):
        Scenario.from_speeds((1.0,), model_bytes=number)  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [math.nan, 0.0, -1])
def test_a_network_needs_bandwidth(number: float) -> None:
    with pytest.raises(ConfigError, match=r"bandwidth_bytes_per_s > 0, got 0\.05 and"):
        Network(bandwidth_bytes_per_s=number)


def test_a_scenario_of_speeds_needs_a_batch() -> None:
    with pytest.raises(ConfigError, match="batch_size and batches must be >= 1, got 0 and 400"):
        Scenario.from_speeds((1.0,), batch_size=0)
