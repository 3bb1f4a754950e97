"""Idle gaps and their causes, beside the waits that ranks recorded."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.timeline.idle import IDLE_S, Gap, idle_gaps, recorded_s, sampled_s
from outrider.timeline.spans import spans

from .conftest import Event, busy_except, make_utilization, rank_events


def gaps_of(events: list[Event], *percents: list[float | None]) -> list[Gap]:
    return idle_gaps(make_utilization(*percents), events, spans(events))


@pytest.mark.parametrize(
    ("start_s", "stop_s", "cause"),
    [
        (0.2, 1.8, "startup"),
        (3.1, 3.9, "average"),
        (6.2, 6.9, "evaluation"),
        (7.1, 7.9, "epoch boundary"),
        (4.1, 4.9, "unexplained"),
    ],
)
def test_a_gap_gets_the_cause_that_the_rank_recorded(start_s: float, stop_s: float, cause: str) -> None:
    (gap,) = gaps_of(rank_events(0, "cpu"), busy_except(start_s, stop_s))
    assert (gap.start_s, gap.end_s, gap.cause) == (pytest.approx(start_s), pytest.approx(stop_s), cause)


def test_a_window_that_waited_for_data_explains_its_gap() -> None:
    events = rank_events(0, "cpu")
    events[3]["data_ms"] = 900.0
    assert [gap.cause for gap in gaps_of(events, busy_except(2.1, 2.9))] == ["data"]


def test_shared_steps_that_averaged_for_long_explain_their_gap() -> None:
    events = rank_events(0, "cpu")
    events[6]["average_ms"] = 800.0
    assert [gap.cause for gap in gaps_of(events, busy_except(4.1, 4.9))] == ["average"]


def test_a_hand_over_explains_a_gap() -> None:
    events = [*rank_events(0, "cpu"), {"t": 5.0, "rank": 0, "kind": "hand over", "source": 1, "ms": 900.0}]
    del events[6]
    assert [gap.cause for gap in gaps_of(events, busy_except(4.1, 4.9))] == ["average"]
    (span,) = [span for span in spans(events) if span.name == "hand-over"]
    assert (span.lane, span.start_s, span.end_s) == ("average", pytest.approx(4.1), 5.0)


def test_an_average_in_the_background_does_not_explain_a_gap() -> None:
    events = rank_events(0, "cpu")
    events[6]["start"] = 3.2
    assert [gap.cause for gap in gaps_of(events, busy_except(3.2, 3.9))] == ["unexplained"]


def test_half_a_second_is_a_gap_and_less_is_none() -> None:
    events = rank_events(0, "cpu")
    assert len(gaps_of(events, busy_except(3.0, 3.6))) == 1
    assert gaps_of(events, busy_except(3.0, 3.4)) == []


def test_five_per_cent_are_not_idle() -> None:
    assert gaps_of(rank_events(0, "cpu"), [5.0] * 90) == []


def test_a_sample_that_is_not_known_is_not_idle() -> None:
    assert gaps_of(rank_events(0, "cpu"), [None] * 90) == []


def test_what_comes_after_the_last_epoch_is_no_gap() -> None:
    assert gaps_of(rank_events(0, "cpu"), busy_except(9.0, 12.0, until_s=12.0)) == []


def test_without_samples_there_are_no_gaps() -> None:
    events = rank_events(0, "cpu")
    assert idle_gaps(None, events, spans(events)) == []
    assert sampled_s(None, []) == {}


def test_gaps_add_up_by_rank_and_cause() -> None:
    events = rank_events(0, "cpu") + rank_events(1, "cpu")
    percents = busy_except(3.0, 4.0), busy_except(0.0, 0.0)
    sums = sampled_s(make_utilization(*percents), gaps_of(events, *percents))
    assert sums[0]["average"] == pytest.approx(1.0)
    assert set(sums[1].values()) == {0.0}


def test_recorded_waits_add_up_over_the_epochs() -> None:
    assert recorded_s(rank_events(1, "cpu"))[1]["average"] == pytest.approx(1.4)


@given(percent=st.lists(st.one_of(st.none(), st.floats(0, 100)), max_size=90))
def test_gaps_are_long_enough_and_do_not_overlap(percent: list[Any]) -> None:
    gaps = gaps_of(rank_events(0, "cpu"), percent)
    assert all(gap.seconds >= IDLE_S - 1e-9 for gap in gaps)
    assert all(one.end_s <= other.start_s for one, other in pairwise(gaps))
