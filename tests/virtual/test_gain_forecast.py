"""The expected gain of training on all devices, before anyone starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.machine.forecast import relative_speeds
from outrider.machine.machine_facts import Facts, MeasuredSpeed, load_facts
from outrider.virtual.gain_forecast import forecast, policy_gains, slow_devices

FACTS = Path(__file__).parents[1] / "machine" / "facts"
SPEEDS = st.lists(st.floats(0.05, 1.0), min_size=1, max_size=3).map(lambda rest: [1.0, *sorted(rest, reverse=True)])
some = settings(max_examples=10, deadline=None)


def recorded(machine: str) -> Facts:
    return load_facts(FACTS / f"{machine}.json")


def gains(speeds: list[float], backend: str = "nccl") -> dict[str, float]:
    return {gain.policy: gain.gain for gain in policy_gains(speeds, backend=backend)}


def test_sync_runs_at_the_pace_of_the_slowest() -> None:
    # 97 ms at full speed, 6 ms of an all-reduce of 102 MB at 17 GB/s.
    assert gains([1.0, 0.4])["sync"] == pytest.approx(2 * 97 / (97 / 0.4 + 6), rel=0.01)


def test_the_others_come_close_to_the_sum_of_the_speeds() -> None:
    found = gains([1.0, 0.4])
    assert found["balanced"] == pytest.approx(1.4 * 138.6 / (138.6 + 6), rel=0.02)
    assert 1.37 < found["cadence"] <= 1.4
    assert 1.38 < found["async"] <= 1.4


def test_averaging_every_step_over_the_host_costs_more() -> None:
    assert gains([1.0, 1.0], backend="cpu")["sync"] == pytest.approx(2 * 97 / (97 + 85), rel=0.01)
    assert gains([1.0, 1.0], backend="cpu")["async"] == pytest.approx(gains([1.0, 1.0])["async"], rel=0.02)


def test_balanced_is_about_as_fast_as_the_fastest_alone_where_sharing_a_step_costs_more() -> None:
    assert 0.98 < gains([1.0, 0.4], backend="cpu")["balanced"] <= 1.0


@pytest.mark.slow
@some
@given(speeds=SPEEDS)
def test_sync_never_beats_balanced(speeds: list[float]) -> None:
    # Balanced tries a few splits before it knows the best one.
    assert gains(speeds)["sync"] <= 1.02 * gains(speeds)["balanced"]


@pytest.mark.slow
@some
@given(speeds=SPEEDS)
def test_no_policy_promises_more_than_the_sum_of_the_speeds(speeds: list[float]) -> None:
    assert max(gains(speeds).values()) <= sum(speeds) + 1e-9


@pytest.mark.slow
@some
@given(speeds=SPEEDS)
def test_the_fastest_is_never_left_out(speeds: list[float]) -> None:
    assert 0 not in slow_devices(speeds, backend="cpu")


def test_a_device_that_adds_nothing_is_left_out() -> None:
    assert slow_devices([1.0, 0.03], backend="nccl") == (1,)
    assert slow_devices([1.0, 0.9, 0.02], backend="nccl") == (2,)
    assert slow_devices([1.0, 0.4], backend="nccl") == ()


def test_leaving_the_slow_card_out_is_the_advice_where_it_is_the_answer() -> None:
    found = forecast(recorded("rtx4090-gt1030"))
    assert found is not None
    assert found.leave_out == ("cuda:1",)
    assert found.advice == "leave cuda:1 (3% of the fastest) out: cuda:0 alone is about as fast"


def test_the_others_gain_is_told_where_one_of_three_is_left_out() -> None:
    facts = recorded("rtx4090-gt1030")
    third = replace(facts.gpus[0], index=2)
    speed = MeasuredSpeed(device="cuda:2", matmul_tflops=82.6, memory_gb_per_s=1008.0)
    found = forecast(replace(facts, gpus=(*facts.gpus, third), speeds=(*facts.speeds, speed)))
    assert found is not None
    assert found.advice == "leave cuda:1 (3% of the fastest) out: the others reach about 2.00 × the fastest alone"


def test_mismatched_cards_worth_having_are_kept() -> None:
    found = forecast(recorded("rtx3090-rtx3060"))
    assert found is not None
    assert found.leave_out == ()
    assert found.advice == "train on all with async: about 1.37 × the fastest alone"


def test_speed_is_the_geometric_mean_of_matmul_and_memory() -> None:
    fast, slow = relative_speeds(recorded("rtx3090-rtx3060"))
    assert (fast.device, fast.relative) == ("cuda:0", 1.0)
    assert slow.relative == pytest.approx(((12.7 * 360) / (35.6 * 936)) ** 0.5)


def test_the_host_backend_is_assumed_where_nccl_failed() -> None:
    facts = recorded("rtx4080-rtx3070")
    failed = tuple(item for item in facts.reductions if item.outcome != "ok")
    found = forecast(replace(facts, reductions=failed))
    assert found is not None
    assert found.backend == "cpu"


def test_a_setting_that_nccl_needs_is_among_the_assumptions() -> None:
    found = forecast(recorded("rtx4080-rtx3070"))
    assert found is not None
    assert found.assumptions[1] == "backend nccl: NCCL passed its all-reduce with NCCL_P2P_DISABLE=1"


@pytest.mark.parametrize("machine", ["no-gpu", "h200", "rtx5060ti-gtx1060-bare", "broken-torch"])
def test_there_is_no_forecast_for_fewer_than_two_measured_cards(machine: str) -> None:
    assert forecast(recorded(machine)) is None
