from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import ConfigError
from outrider.policy.effects import AverageReport, Decision, Lease, RankFacts
from outrider.policy.window_plan import deal
from outrider.policy.window_planner import PlannerConfig, WindowPlan, WindowPlanner

PLENTY = 10**9
paces = st.lists(st.floats(min_value=1.0, max_value=20.0), min_size=1, max_size=5)
unhurried = settings(deadline=None)


def planner_of(world_size: int = 2, batch_size: int = 10, **options: Any) -> WindowPlanner:
    return WindowPlanner(
        PlannerConfig(
            world_size=world_size,
            batch_size=batch_size,
            **({"is_blocking": True, "start_anchor": 10, "overhead_target": 0.1} | options),
        )
    )


def report_of(
    plan: WindowPlan,
    paces: Sequence[float],
    *,
    batch_size: int = 10,
    exposed_ms: Sequence[float] | None = None,
    drift: float | None = None,
) -> AverageReport:
    """What the ranks say after a plan, with the given ms per batch."""
    exposed = exposed_ms or [0.0] * len(paces)
    ranks = tuple(
        RankFacts(
            samples=plan.samples[rank],
            batches=plan.batches[rank],
            compute_ms=plan.samples[rank] / batch_size * paces[rank],
            exposed_ms=exposed[rank],
        )
        for rank in range(len(paces))
    )
    return AverageReport(window=0, ranks=ranks, drift=drift)


def run(planner: WindowPlanner, windows: int, paces: Sequence[float], **facts: Any) -> list[Decision]:
    decisions: list[Decision] = []
    for _ in range(windows):
        decisions += planner.learn(report_of(planner.window(PLENTY), paces, **facts))
    return decisions


def measured(paces: Sequence[float], **options: Any) -> WindowPlanner:
    """A planner after its probes."""
    planner = planner_of(len(paces), **options)
    run(planner, 2, paces)
    return planner


# Plans.


def test_a_probe_of_two_batches_each_comes_first() -> None:
    plan = planner_of(3).window(PLENTY)
    assert plan == WindowPlan(
        batches=(2, 2, 2), samples=(20, 20, 20), anchor=10, reason="probe of 2 batches each: no pace known yet"
    )


def test_the_warm_up_of_the_first_batches_is_not_taken_for_the_pace() -> None:
    planner = planner_of()
    run(planner, 1, [5000.0, 25.0])
    run(planner, 1, [10.0, 25.0])
    assert planner.paces == (10.0, 25.0)


def test_the_slowest_rank_gets_the_anchor_and_the_others_fill_its_time() -> None:
    plan = measured([10.0, 25.0], anchor=10).window(PLENTY)
    assert plan == WindowPlan(
        batches=(25, 10),
        samples=(250, 100),
        anchor=10,
        reason="rank 1 sets the pace by paces, rounding wastes 0.0%",
    )


def test_a_probe_follows_a_short_measurement_of_the_devices() -> None:
    planner = planner_of()
    planner.hint((1.0, 0.1))
    plan = planner.window(PLENTY)
    assert plan.batches == (20, 2)
    assert plan.reason == "probe, in proportion to a short measurement of the devices"
    assert planner.share(0) == pytest.approx(10 / 11)
    assert planner.window(60).batches == (6, 0)


def test_a_measurement_of_similar_devices_changes_nothing() -> None:
    planner = planner_of()
    planner.hint((1.0, 0.7))
    assert planner.window(PLENTY).batches == (2, 2)


def test_what_was_measured_counts_only_until_paces_are_known() -> None:
    planner = planner_of()
    planner.hint((1.0, 0.1))
    run(planner, 2, [10.0, 20.0])
    assert planner.window(PLENTY).batches[0] == 2 * planner.window(PLENTY).batches[1]


def test_speed_hints_of_the_user_count_more_than_a_measurement() -> None:
    planner = planner_of(speed_hints=(2.5, 1.0), anchor=10)
    planner.hint((0.1, 1.0))
    assert planner.window(PLENTY).batches == (25, 10)


def test_speed_hints_replace_the_probe() -> None:
    plan = planner_of(speed_hints=(2.5, 1.0), anchor=10).window(PLENTY)
    assert (plan.batches, plan.reason) == ((25, 10), "rank 1 sets the pace by speed_hints, rounding wastes 0.0%")


def test_measured_paces_replace_speed_hints() -> None:
    assert measured([10.0, 10.0], speed_hints=(2.5, 1.0), anchor=10).window(PLENTY).batches == (10, 10)


def test_shares_are_kept_whatever_the_paces() -> None:
    plan = measured([10.0, 10.0], shares=(0.75, 0.25), anchor=10).window(PLENTY)
    assert (plan.batches, plan.reason) == ((30, 10), "rank 1 sets the pace by shares, rounding wastes 0.0%")


def test_the_lead_over_the_slowest_is_bounded() -> None:
    assert measured([10.0, 25.0], anchor=10, max_batch_diff=5).window(PLENTY).batches == (15, 10)


def test_the_anchor_whose_rounding_wastes_least_is_planned() -> None:
    assert measured([10.0, 25.0], start_anchor=9).window(PLENTY).batches == (25, 10)


def test_positions_are_dealt_in_rank_order() -> None:
    plan = WindowPlan(batches=(2, 1), samples=(20, 7), anchor=1, reason="")
    assert (plan.lease(0, 100), plan.lease(1, 100), plan.total) == (Lease(100, 20), Lease(120, 7), 27)


def test_jitter_of_the_paces_does_not_change_the_plan() -> None:
    planner = measured([10.0, 25.0], anchor=20)
    before = planner.window(PLENTY).batches
    run(planner, 1, [10.3, 24.6])
    run(planner, 1, [9.8, 25.3])
    assert planner.window(PLENTY).batches == before


def test_a_change_of_speed_changes_the_plan() -> None:
    planner = measured([10.0, 25.0], anchor=20)
    run(planner, 4, [10.0, 50.0])
    assert planner.window(PLENTY).batches == (99, 20)


def test_a_small_change_that_lasts_is_followed() -> None:
    """Seen on two slices of a GPU: a plan that made the fast rank wait 6 % was kept, as good enough."""
    planner = measured([3.2, 7.29], min_anchor=20, start_anchor=20)
    run(planner, 40, [2.98, 7.29])
    fast, slow = planner.window(PLENTY).batches
    assert fast * 2.98 == pytest.approx(slow * 7.29, rel=0.015)


def test_a_rank_that_only_warmed_up_is_probed_again() -> None:
    """A device that captured both batches of the probe has no pace to tell."""
    planner = planner_of()
    run(planner, 1, [10.0, 25.0])
    run(planner, 1, [0.0, 25.0])
    assert planner.window(PLENTY).reason.startswith("probe")
    run(planner, 1, [10.0, 25.0])
    assert planner.paces == (10.0, 25.0)


def test_asking_twice_gives_the_same_plan() -> None:
    planner = measured([10.0, 23.0])
    assert planner.window(PLENTY) == planner.window(PLENTY)


def test_equal_reports_give_equal_plans_on_every_rank() -> None:
    one, other = measured([3.0, 7.1, 11.3]), measured([3.0, 7.1, 11.3])
    run(one, 5, [3.1, 7.0, 12.0], exposed_ms=[9.0, 9.0, 9.0])
    run(other, 5, [3.1, 7.0, 12.0], exposed_ms=[9.0, 9.0, 9.0])
    assert one.window(PLENTY) == other.window(PLENTY)


# The end of a segment.


def test_the_last_batches_go_to_the_rank_that_finishes_them_first() -> None:
    plan = measured([10.0, 25.0], anchor=10).window(43)
    assert plan == WindowPlan(
        batches=(3, 2),
        samples=(30, 13),
        anchor=10,
        reason="last window: 43 samples left, each batch to the rank that finishes it first",
    )


def test_a_rank_too_slow_for_the_last_batches_gets_none() -> None:
    assert measured([10.0, 200.0], anchor=1).window(50).samples == (50, 0)


def test_a_stub_is_merged_into_the_window_before_it() -> None:
    assert measured([10.0, 10.0], anchor=10).window(290).batches == (15, 14)


def test_more_than_half_a_window_left_over_is_a_window_of_its_own() -> None:
    assert measured([10.0, 10.0], anchor=10).window(300).batches == (10, 10)


def test_a_window_that_fits_exactly_is_planned_as_usual() -> None:
    assert measured([10.0, 10.0], anchor=10).window(200).reason == "rank 0 sets the pace by paces, rounding wastes 0.0%"


def test_nothing_left_is_a_plan_of_nothing() -> None:
    assert measured([10.0, 10.0]).window(0).samples == (0, 0)


def test_the_bound_of_the_lead_holds_for_the_last_batches() -> None:
    assert deal(100, 10, [1.0, 20.0], max_batch_diff=2) == (60, 40)


def test_with_no_lead_allowed_an_odd_batch_still_goes_to_somebody() -> None:
    assert deal(30, 10, [1.0, 20.0], max_batch_diff=0) == (20, 10)


@unhurried
@given(total=st.integers(0, 3_000), batch_size=st.integers(1, 64), paces=paces, anchor=st.integers(1, 20))
def test_successive_windows_cover_the_segment_exactly(
    total: int, batch_size: int, paces: list[float], anchor: int
) -> None:
    planner = planner_of(len(paces), batch_size, anchor=anchor)
    planned = 0
    while planned < total:
        plan = planner.window(total - planned)
        planned += plan.total
        planner.learn(report_of(plan, paces, batch_size=batch_size))
        assert plan.total > 0
    assert planned == total


@unhurried
@given(paces=paces, anchor=st.integers(1, 20), bound=st.none() | st.integers(0, 10))
def test_full_windows_starve_no_rank_and_keep_the_bound(paces: list[float], anchor: int, bound: int | None) -> None:
    batches = measured(paces, anchor=anchor, max_batch_diff=bound).window(PLENTY).batches
    assert min(batches) >= 1
    assert bound is None or max(batches) - min(batches) <= bound


@unhurried
@given(remaining=st.integers(0, 2_000), batch_size=st.integers(1, 64), paces=paces)
def test_dealing_hands_out_exactly_what_is_left(remaining: int, batch_size: int, paces: list[float]) -> None:
    assert sum(deal(remaining, batch_size, paces)) == remaining


@unhurried
@given(num_batches=st.integers(1, 300), paces=paces)
def test_dealt_ranks_finish_within_one_batch_of_the_slowest(num_batches: int, paces: list[float]) -> None:
    samples = deal(num_batches, 1, paces)
    finish = [count * pace for count, pace in zip(samples, paces, strict=True)]
    assert max(finish) - min(finish) <= max(paces) + 1e-6


# Shares.


def test_shares_are_equal_while_nothing_is_known() -> None:
    assert [planner_of(4).share(rank) for rank in range(4)] == [0.25] * 4


def test_shares_follow_the_measured_speeds() -> None:
    planner = measured([10.0, 30.0])
    assert [planner.share(0), planner.share(1)] == pytest.approx([0.75, 0.25])


def test_shares_follow_speed_hints_until_measured() -> None:
    assert planner_of(speed_hints=(3.0, 1.0)).share(0) == pytest.approx(0.75)


# The anchor.


def test_the_first_windows_are_short() -> None:
    planner = WindowPlanner(PlannerConfig(world_size=2, batch_size=10, is_blocking=True))
    windows = []
    for _ in range(5):
        windows.append(planner.window(PLENTY).batches)
        planner.learn(report_of(planner.window(PLENTY), [10.0, 25.0], exposed_ms=[60.0, 60.0]))
    assert windows == [(2, 2), (2, 2), (5, 2), (5, 2), (425, 170)]


def test_costly_averages_grow_the_anchor_once_two_of_them_are_measured() -> None:
    planner = planner_of()
    assert run(planner, 3, [10.0, 10.0], exposed_ms=[30.0, 30.0]) == []
    decisions = run(planner, 1, [10.0, 10.0], exposed_ms=[30.0, 30.0])
    assert [(decision.kind, decision.value) for decision in decisions] == [("anchor", 40)]


def test_cheap_averages_allow_windows_of_one_step() -> None:
    planner = planner_of()
    run(planner, 4, [10.0, 10.0], exposed_ms=[0.4, 0.4])
    assert planner.anchor == 1


def test_where_all_wait_the_cost_is_that_of_the_last_to_arrive() -> None:
    assert run(planner_of(start_anchor=20), 6, [10.0, 10.0], exposed_ms=[500.0, 18.0]) == []


def test_where_nobody_waits_the_cost_is_the_mean() -> None:
    decisions = run(planner_of(is_blocking=False, overhead_target=0.1), 4, [10.0, 10.0], exposed_ms=[22.0, 8.0])
    assert [(decision.kind, decision.value) for decision in decisions] == [("anchor", 20)]


def test_an_average_in_the_background_costs_its_processor_time() -> None:
    planner = planner_of(is_blocking=False, overhead_target=0.1)
    ranks = tuple(
        RankFacts(samples=100, batches=10, compute_ms=100.0, exposed_ms=1.0, average_ms=11.0 + rank, busy_ms=2.0)
        for rank in range(2)
    )
    for _ in range(4):
        planner.learn(AverageReport(window=0, ranks=ranks))
    # 3 ms are 7 % of a window of 4 batches, and the average is done after two of them.
    assert planner.anchor == 4


def test_one_rank_has_nothing_to_average_and_keeps_its_windows_long() -> None:
    planner = planner_of(1)
    run(planner, 10, [10.0], exposed_ms=[0.0])
    assert planner.anchor == 20


def test_one_slow_average_does_not_move_the_anchor() -> None:
    planner = planner_of()
    run(planner, 5, [10.0, 10.0], exposed_ms=[8.0, 8.0])
    assert run(planner, 1, [10.0, 10.0], exposed_ms=[800.0, 800.0]) == []


def test_cheap_averages_shrink_the_anchor_to_its_minimum() -> None:
    planner = planner_of(min_anchor=4)
    run(planner, 30, [10.0, 10.0], exposed_ms=[0.01, 0.01])
    assert planner.anchor == 4


def test_a_given_anchor_is_never_tuned() -> None:
    planner = planner_of(anchor=10)
    assert run(planner, 20, [10.0, 10.0], exposed_ms=[500.0, 500.0]) == []


def test_the_start_lies_within_the_bounds() -> None:
    assert planner_of(min_anchor=30).anchor == 30


# The end of a run.


def test_windows_get_shorter_towards_the_end_of_a_run() -> None:
    planner, windows, left = measured([10.0, 10.0], start_anchor=20), [], 1200
    while left:
        windows.append(planner.window(left, run_left=left).batches[0])
        left -= planner.window(left, run_left=left).total
    assert windows == [20, 13, 9, 6, 4, 2, 2, 1, 1, 1, 1]
    assert planner.window(600, run_left=600).reason == (
        "rank 0 sets the pace by paces, rounding wastes 0.0%; shorter, since 600 samples of the run are left"
    )


def test_a_segment_that_ends_in_the_middle_of_a_run_has_full_windows() -> None:
    assert measured([10.0, 10.0], start_anchor=20).window(400, run_left=4000).batches == (20, 20)


def test_a_run_of_unknown_length_has_full_windows() -> None:
    assert measured([10.0, 10.0], start_anchor=20).window(400).batches == (20, 20)


def test_a_given_anchor_is_kept_at_the_end_of_a_run() -> None:
    assert measured([10.0, 10.0], anchor=20).window(400, run_left=400).batches == (20, 20)


def test_the_last_windows_cost_at_most_twice_the_target() -> None:
    planner = planner_of(start_anchor=20)
    run(planner, 5, [10.0, 10.0], exposed_ms=[20.0, 20.0])
    assert planner.anchor == 20
    assert planner.window(400, run_left=400).batches == (8, 8)


@unhurried
@given(
    total=st.integers(1, 3_000),
    batch_size=st.integers(1, 64),
    paces=paces,
    cost_ms=st.floats(0.0, 50.0),
    is_blocking=st.booleans(),
)
def test_tuned_windows_cover_the_run_exactly_and_starve_no_rank(
    total: int, batch_size: int, paces: list[float], cost_ms: float, is_blocking: bool
) -> None:
    planner = planner_of(len(paces), batch_size, start_anchor=2, is_blocking=is_blocking)
    left, exposed_ms = total, [cost_ms] * len(paces)
    while left:
        plan = planner.window(left, run_left=left)
        assert 0 < plan.total <= left
        assert min(plan.batches) >= 1 or plan.reason.startswith("last window")
        planner.learn(report_of(plan, paces, batch_size=batch_size, exposed_ms=exposed_ms))
        left -= plan.total


# The guard.


def test_rising_drift_shrinks_the_anchor() -> None:
    planner = planner_of(drift_threshold=0.05)
    decisions = run(planner, 1, [10.0, 10.0], drift=0.08)
    assert [(decision.kind, decision.value) for decision in decisions] == [("guard", "rising"), ("anchor", 5)]
    assert decisions[1].reason == (
        "10 -> 5: guard: drift 0.08, threshold 0.05: above the threshold: a shorter window, no growth"
    )


def test_rising_drift_blocks_growth() -> None:
    planner = planner_of(drift_threshold=0.05)
    run(planner, 8, [10.0, 10.0], drift=0.08, exposed_ms=[90.0, 90.0])
    assert planner.anchor == 2


def test_growth_returns_once_the_drift_is_calm() -> None:
    planner = planner_of(drift_threshold=0.05)
    run(planner, 8, [10.0, 10.0], drift=0.08, exposed_ms=[90.0, 90.0])
    run(planner, 8, [10.0, 10.0], drift=0.01, exposed_ms=[90.0, 90.0])
    assert planner.anchor > 10


def test_without_a_guard_drift_changes_nothing() -> None:
    assert run(planner_of(guard=False, drift_threshold=0.05), 5, [10.0, 10.0], drift=9.0, exposed_ms=[8.0, 8.0]) == []


def test_an_automatic_threshold_acts_on_divergence() -> None:
    planner = planner_of(start_anchor=40)
    run(planner, 10, [10.0, 10.0], drift=0.01, exposed_ms=[30.0, 30.0])
    run(planner, 5, [10.0, 10.0], drift=0.2, exposed_ms=[30.0, 30.0])
    assert planner.anchor == 20


# State.


def test_a_restored_planner_plans_as_the_saved_one() -> None:
    planner = measured([10.0, 23.0, 31.0])
    run(planner, 7, [11.0, 22.0, 33.0], exposed_ms=[20.0, 25.0, 30.0], drift=0.01)
    restored = planner_of(3)
    restored.restore(json.loads(json.dumps(planner.state())))
    assert restored.window(PLENTY) == planner.window(PLENTY)
    assert restored.state() == planner.state()


def test_options_of_the_resumed_run_stay_in_force() -> None:
    saved = measured([10.0, 10.0])
    restored = planner_of(anchor=3)
    restored.restore(saved.state())
    assert restored.anchor == 3


def test_the_state_of_another_world_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        planner_of(2).restore(planner_of(3).state())
    assert caught.value.message == "the saved planner has 3 ranks, got world_size=2"
    assert caught.value.hint == "resume with the same number of devices"


# Options.


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"world_size": 0}, "world_size must be >= 1, got 0", "give a whole number from 1 on"),
        ({"batch_size": 0}, "batch_size must be >= 1, got 0", "give a whole number from 1 on"),
        ({"anchor": 0}, "anchor must be >= 1, got 0", "give a whole number from 1 on"),
        ({"min_anchor": 0}, "min_anchor must be >= 1, got 0", "give a whole number from 1 on"),
        ({"start_anchor": 0}, "start_anchor must be >= 1, got 0", "give a whole number from 1 on"),
        ({"max_batch_diff": -1}, "max_batch_diff must be >= 0, got -1", "give a whole number from 0 on"),
        (
            {"min_anchor": 5, "max_anchor": 2},
            "max_anchor must be >= min_anchor, got max_anchor=2, min_anchor=5",
            "raise max_anchor or leave min_anchor out",
        ),
        (
            {"overhead_target": 1.0},
            "overhead_target must be between 0 and 1, got 1",
            "0.10 lets averaging take a tenth of the time",
        ),
        (
            {"drift_threshold": 0.0},
            "drift_threshold must be > 0, got 0",
            "leave it out for an automatic threshold, or pass guard=False",
        ),
        (
            {"shares": (1.0,)},
            "shares must have one entry per rank, got 1 for world_size=2",
            "give 2 numbers or leave shares out",
        ),
        (
            {"speed_hints": (1.0, 0.0)},
            "speed_hints must be positive numbers, got 1, 0",
            "leave a device out of devices to give it nothing",
        ),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PlannerConfig(**({"world_size": 2, "batch_size": 10, "is_blocking": True} | options))
    assert (caught.value.message, caught.value.hint) == (message, hint)


def test_shares_are_normalised() -> None:
    assert PlannerConfig(world_size=2, batch_size=1, is_blocking=True, shares=(3, 1)).shares == (0.75, 0.25)
