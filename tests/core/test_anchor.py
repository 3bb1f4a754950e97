from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.anchor import Anchor, batches_at, least_waste, waste
from outrider.core.effects import Decision

unhurried = settings(deadline=None)


def anchor_of(start: int, *, minimum: int = 1, maximum: int = 200) -> Anchor:
    return Anchor(start, minimum=minimum, maximum=maximum, overhead_target=0.10)


def test_the_start_is_clamped() -> None:
    assert anchor_of(10, minimum=20).value == 20


def test_costly_averages_grow_the_anchor_in_proportion() -> None:
    # 15 ms of a window of 100 ms: a tenth of the whole time needs 135 ms, 13.5 batches of 10 ms.
    decision = anchor_of(10).after(exposed_ms=15.0, window_ms=100.0, may_grow=True)
    assert decision == Decision(
        "anchor",
        14,
        "10 -> 14: averaging takes 13.0%, above the target of 10%",
        {"from": 10, "to": 14, "overhead": pytest.approx(15 / 115)},
    )


def test_the_anchor_at_most_doubles_at_a_time() -> None:
    anchor = anchor_of(10)
    anchor.after(exposed_ms=1000.0, window_ms=100.0, may_grow=True)
    assert anchor.value == 20


def test_growth_can_be_blocked() -> None:
    anchor = anchor_of(10)
    assert anchor.after(exposed_ms=1000.0, window_ms=100.0, may_grow=False) is None
    assert anchor.value == 10


def test_cheap_averages_shrink_the_anchor_by_one() -> None:
    decision = anchor_of(10).after(exposed_ms=1.0, window_ms=100.0, may_grow=True)
    assert decision == Decision(
        "anchor",
        9,
        "10 -> 9: averaging takes 1.0%, below half the target of 10%",
        {"from": 10, "to": 9, "overhead": pytest.approx(1 / 101)},
    )


def test_a_blocked_anchor_may_still_shrink() -> None:
    anchor = anchor_of(10)
    anchor.after(exposed_ms=1.0, window_ms=100.0, may_grow=False)
    assert anchor.value == 9


def test_between_half_the_target_and_the_target_nothing_changes() -> None:
    assert anchor_of(10).after(exposed_ms=8.0, window_ms=100.0, may_grow=True) is None


def test_the_anchor_does_not_shrink_while_ranks_wait_for_each_other() -> None:
    assert anchor_of(10).after(exposed_ms=1.0, window_ms=100.0, may_grow=True, lost_ms=9.0) is None


def test_at_the_maximum_nothing_changes() -> None:
    assert anchor_of(200).after(exposed_ms=1000.0, window_ms=100.0, may_grow=True) is None


def test_at_the_minimum_nothing_changes() -> None:
    assert anchor_of(1).after(exposed_ms=0.0, window_ms=100.0, may_grow=True) is None


def test_a_window_of_no_time_decides_nothing() -> None:
    assert anchor_of(10).after(exposed_ms=5.0, window_ms=0.0, may_grow=True) is None


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
    assert anchor.after(exposed_ms=0.0, window_ms=100.0, may_grow=False) is None
    decision = anchor.after(exposed_ms=0.0, window_ms=100.0, may_grow=True)
    assert decision is not None
    assert decision.reason == "2 -> 3: the guard is content again"


def test_a_restored_anchor_keeps_its_value() -> None:
    anchor = anchor_of(10)
    anchor.after(exposed_ms=1000.0, window_ms=100.0, may_grow=True)
    state = json.loads(json.dumps(anchor.state()))
    assert Anchor.restored(state, minimum=1, maximum=200, overhead_target=0.10).value == 20


@unhurried
@given(cost_ms=st.floats(0.01, 100.0), pace_ms=st.floats(1.0, 100.0), start=st.integers(1, 200))
def test_a_steady_cost_is_brought_to_the_target_or_the_anchor_to_its_bound(
    cost_ms: float, pace_ms: float, start: int
) -> None:
    anchor = anchor_of(start)
    for _ in range(200):
        anchor.after(exposed_ms=cost_ms, window_ms=anchor.value * pace_ms, may_grow=True)
    overhead = cost_ms / (cost_ms + anchor.value * pace_ms)
    assert overhead <= 0.10 + 1e-9 or anchor.value == 200


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
