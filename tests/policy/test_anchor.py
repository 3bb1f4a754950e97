from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.policy.anchor import Anchor, AverageCost, batches_at, least_waste, waste
from outrider.policy.effects import Decision

unhurried = settings(deadline=None)


def anchor_of(start: int, *, minimum: int = 1, maximum: int = 200) -> Anchor:
    return Anchor(start, minimum=minimum, maximum=maximum, overhead_target=0.10)


def after(
    anchor: Anchor, exposed_ms: float, *, batch_ms: float, may_grow: bool = True, **costs: float
) -> Decision | None:
    return anchor.after(AverageCost(exposed_ms=exposed_ms, **costs), batch_ms=batch_ms, may_grow=may_grow)


def test_the_start_is_clamped() -> None:
    assert anchor_of(10, minimum=20).value == 20


def test_a_costly_average_moves_the_anchor_at_once_to_what_the_cost_asks_for() -> None:
    # 15 ms are 7 % of the whole time where a window takes 199.3 ms: 20 batches of 10 ms.
    decision = after(anchor_of(2), 15.0, batch_ms=10.0)
    assert decision == Decision(
        "anchor",
        20,
        "2 -> 20: averaging takes 42.9%, above the target of 10%",
        {"from": 2, "to": 20, "overhead": pytest.approx(15 / 35)},
    )


def test_growth_can_be_blocked() -> None:
    anchor = anchor_of(10)
    assert after(anchor, 1000.0, batch_ms=10.0, may_grow=False) is None
    assert anchor.value == 10


def test_a_cheap_average_moves_the_anchor_at_once_to_what_the_cost_asks_for() -> None:
    decision = after(anchor_of(20), 2.0, batch_ms=10.0)
    assert decision == Decision(
        "anchor",
        3,
        "20 -> 3: averaging takes 1.0%, below half the target of 10%",
        {"from": 20, "to": 3, "overhead": pytest.approx(2 / 202)},
    )


def test_an_average_in_the_background_of_long_steps_allows_windows_of_one_step() -> None:
    anchor = anchor_of(20)
    after(anchor, 0.5, batch_ms=10.0)
    assert anchor.value == 1


def test_a_blocked_anchor_may_still_shrink() -> None:
    anchor = anchor_of(10)
    after(anchor, 2.0, batch_ms=10.0, may_grow=False)
    assert anchor.value == 3


def test_between_half_the_target_and_the_target_nothing_changes() -> None:
    assert after(anchor_of(10), 8.0, batch_ms=10.0) is None


def test_waiting_for_others_makes_windows_longer_too() -> None:
    decision = after(anchor_of(2), 1.0, batch_ms=10.0, lost_ms=6.0)
    assert decision is not None
    assert decision.reason == "2 -> 8: averaging and waiting take 23.1%, above the target of 10%"


def test_waiting_for_others_makes_no_window_longer_than_twenty() -> None:
    anchor = anchor_of(2)
    after(anchor, 1.0, batch_ms=10.0, lost_ms=500.0)
    assert anchor.value == 20


def test_the_anchor_does_not_shrink_while_ranks_wait_for_each_other() -> None:
    assert after(anchor_of(10), 1.0, batch_ms=10.0, lost_ms=9.0) is None


def test_a_window_is_no_shorter_than_an_average_in_the_background() -> None:
    decision = after(anchor_of(2), 0.1, batch_ms=10.0, background_ms=50.0, lost_ms=40.0)
    assert decision is not None
    assert decision.reason == "2 -> 8: an average takes 50.0 ms in the background, longer than a window"


def test_windows_without_waits_do_not_shrink_below_the_average_in_the_background() -> None:
    anchor = anchor_of(200)
    after(anchor, 0.1, batch_ms=10.0, background_ms=50.0)
    assert anchor.value == 8
    assert after(anchor, 0.1, batch_ms=10.0, background_ms=50.0) is None


def test_at_the_maximum_nothing_changes() -> None:
    assert after(anchor_of(200), 1000.0, batch_ms=1.0) is None


def test_at_the_minimum_nothing_changes() -> None:
    assert after(anchor_of(1), 0.0, batch_ms=100.0) is None


def test_a_batch_of_no_time_decides_nothing() -> None:
    assert after(anchor_of(10), 5.0, batch_ms=0.0) is None


def test_the_guard_shrinks_by_a_factor() -> None:
    decision = anchor_of(10).shrink(0.5, "drift is rising")
    assert decision == Decision("anchor", 5, "10 -> 5: drift is rising", {"from": 10, "to": 5, "overhead": None})


def test_shrinking_takes_at_least_one_batch() -> None:
    anchor = anchor_of(3)
    anchor.shrink(0.99, "drift is rising")
    assert anchor.value == 2


def test_the_guard_may_go_below_the_minimum_but_leaves_a_batch() -> None:
    anchor = anchor_of(4, minimum=4)
    for _ in range(5):
        anchor.shrink(0.5, "drift is rising")
    assert anchor.value == 1


def test_a_fixed_anchor_is_not_shrunk() -> None:
    assert anchor_of(4, minimum=4, maximum=4).shrink(0.5, "drift is rising") is None


def test_the_anchor_climbs_back_to_its_minimum_when_the_guard_is_content() -> None:
    anchor = anchor_of(4, minimum=4)
    anchor.shrink(0.5, "drift is rising")
    assert after(anchor, 0.0, batch_ms=25.0, may_grow=False) is None
    decision = after(anchor, 0.0, batch_ms=25.0)
    assert decision is not None
    assert decision.reason == "2 -> 3: the guard is content again"


def test_a_restored_anchor_keeps_its_value() -> None:
    anchor = anchor_of(10)
    after(anchor, 15.0, batch_ms=10.0)
    state = json.loads(json.dumps(anchor.state()))
    assert Anchor.restored(state, minimum=1, maximum=200, overhead_target=0.10).value == 20


costs = st.floats(0.01, 100.0)


@unhurried
@given(cost_ms=costs, pace_ms=st.floats(1.0, 100.0), start=st.integers(1, 200))
def test_a_steady_cost_is_brought_to_the_target_in_one_move_or_the_anchor_to_its_bound(
    cost_ms: float, pace_ms: float, start: int
) -> None:
    anchor = anchor_of(start)
    after(anchor, cost_ms, batch_ms=pace_ms)
    overhead = cost_ms / (cost_ms + anchor.value * pace_ms)
    assert overhead <= 0.10 + 1e-9 or anchor.value == 200
    assert after(anchor, cost_ms, batch_ms=pace_ms) is None


@unhurried
@given(cost_ms=costs, pace_ms=st.floats(1.0, 100.0), start=st.integers(1, 200))
def test_no_anchor_is_twice_as_long_as_its_cost_asks_for(cost_ms: float, pace_ms: float, start: int) -> None:
    anchor = anchor_of(start)
    after(anchor, cost_ms, batch_ms=pace_ms)
    shorter = anchor.value // 2 - 1
    assert shorter < 1 or cost_ms / (cost_ms + shorter * pace_ms) > 0.09


@unhurried
@given(cost_ms=st.floats(0.01, 80.0), noise=st.lists(st.floats(0.8, 1.25), min_size=1, max_size=20))
def test_noise_of_the_cost_does_not_move_a_settled_anchor(cost_ms: float, noise: list[float]) -> None:
    anchor = anchor_of(200)
    after(anchor, cost_ms, batch_ms=10.0)
    moves = [after(anchor, cost_ms * part, batch_ms=10.0) for part in noise]
    assert moves == [None] * len(noise)


def test_the_slowest_rank_does_the_anchor_and_the_others_fill_its_time() -> None:
    assert batches_at(10, [10.0, 25.0]) == (25, 10)


def test_the_lead_over_the_slowest_can_be_bounded() -> None:
    assert batches_at(10, [10.0, 25.0], max_batch_diff=5) == (15, 10)


def test_waste_is_the_idle_part_of_all_ranks() -> None:
    assert waste((2, 1), [10.0, 25.0]) == pytest.approx(1 - 45 / 50)


def test_the_near_anchor_that_wastes_least_is_chosen() -> None:
    assert least_waste(3, [10.0, 25.0], minimum=1, maximum=200) == 4


def test_among_equals_the_nearest_anchor_is_chosen() -> None:
    assert least_waste(30, [10.0, 10.0], minimum=1, maximum=200) == 30


def test_the_chosen_anchor_respects_the_bounds() -> None:
    assert least_waste(3, [10.0, 25.0], minimum=1, maximum=3) == 2


@unhurried
@given(st.integers(1, 200), st.lists(st.floats(1.0, 20.0), min_size=1, max_size=5))
def test_the_chosen_anchor_is_near_and_wastes_no_more(anchor: int, paces: list[float]) -> None:
    chosen = least_waste(anchor, paces, minimum=1, maximum=200)
    assert abs(chosen - anchor) <= max(1, round(anchor / 10))
    assert waste(batches_at(chosen, paces), paces) <= waste(batches_at(anchor, paces), paces) + 1e-9
