"""Events are bounded in number, however long a run is; their sums are not touched by that."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.timeline import slots
from outrider.timeline.document import Timeline
from outrider.timeline.export_html import write_html
from outrider.timeline.exports import as_csv, as_trace
from outrider.timeline.idle import idle_gaps, recorded_s
from outrider.timeline.slots import EventLimit
from outrider.timeline.spans import spans
from outrider.timeline.timeline_summary import anchor_history, summarize

from .conftest import Event, make_utilization

WAITS_MS = {"average": 2.0, "data": 1.0}


@pytest.fixture(autouse=True)
def few_details(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "DETAILED_STEP_EVENTS", 20)
    monkeypatch.setattr(slots, "DETAILED_OTHER_EVENTS", 6)


def long_run(epochs: int, windows: int, *, window_s: float = 0.01, is_background: bool = False) -> list[Event]:
    """One rank of cadence: in each window compute, an average of 2 ms and a wait in the one before."""
    t, number = 1.0, 0
    events: list[Event] = [{"t": 1.0, "rank": 0, "kind": "ready", "device": "cpu"}]

    def add(kind: str, **fields: Any) -> None:
        events.append({"t": round(t, 6), "rank": 0, "kind": kind, **fields})

    for epoch in range(epochs):
        t += 0.05
        add("epoch start", epoch=epoch)
        for _ in range(windows):
            add("plan", value=[2], reason="paces", anchor=2 + number % 3)
            start_s, t = t - (0.001 if is_background else 0.0), t + window_s
            add("window", window=number, start=round(start_s, 6), batches=2, samples=16, compute_ms=1e3 * window_s)
            add("average start", window=number)
            t += 0.002
            add("wait", cause="average", window=number - 1, ms=0.5)
            add("average end", window=number, ms=2.0, drift=0.01)
            number += 1
        t += 0.02
        add("evaluation", epoch=epoch, ms=20.0)
        add("epoch end", epoch=epoch, loss=0.5, eval=0.9, waits_ms=WAITS_MS)
    return events


def limited(events: list[Event]) -> list[Event]:
    kept: list[Event] = []
    limit = EventLimit(kept.append)
    for event in events:
        limit.add(dict(event))
    limit.end()
    return kept


def seconds_by_name(events: list[Event]) -> dict[tuple[str, str], float]:
    sums: dict[tuple[str, str], float] = defaultdict(float)
    for span in spans(events):
        sums[span.lane, span.name] += span.seconds
    return dict(sums)


def counts(events: list[Event]) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for event in events:
        found[event["kind"]] += event.get("count", 1)
    # The start of a merged epoch or average is a field of its end.
    del found["epoch start"], found["average start"]
    return dict(found)


def test_few_events_stay_as_they_are() -> None:
    events = long_run(1, 3)
    assert limited(events) == events


@settings(deadline=None)
@given(epochs=st.integers(1, 8), windows=st.integers(1, 40), window_s=st.sampled_from([0.001, 0.01, 0.3]))
def test_sums_are_exact_whatever_is_merged(epochs: int, windows: int, window_s: float) -> None:
    events = long_run(epochs, windows, window_s=window_s)
    whole, kept = (Timeline(name="run", events=some) for some in (events, limited(events)))
    (expected,), (found,) = summarize(whole), summarize(kept)
    assert (found.batches, found.samples, found.averages) == (expected.batches, expected.samples, expected.averages)
    assert found.compute_s == pytest.approx(expected.compute_s)
    assert recorded_s(kept.events)[0] == pytest.approx(recorded_s(whole.events)[0])
    assert seconds_by_name(list(kept.events)) == pytest.approx(seconds_by_name(list(whole.events)), abs=1e-4)
    assert counts(list(kept.events)) == counts(list(whole.events))
    assert kept.end_s == whole.end_s


@settings(deadline=None)
@given(epochs=st.integers(1, 8), windows=st.integers(1, 40), window_s=st.sampled_from([0.001, 0.01, 0.3]))
def test_kept_events_are_in_the_order_of_time(epochs: int, windows: int, window_s: float) -> None:
    kept = limited(long_run(epochs, windows, window_s=window_s))
    assert all(one["t"] <= other["t"] for one, other in pairwise(kept))


def test_spans_of_a_lane_do_not_overlap_after_merging() -> None:
    found = spans(limited(long_run(3, 400)))
    for lane in ("compute", "average", "wait"):
        mine = [span for span in found if span.lane == lane]
        assert all(one.end_s <= other.start_s + 1e-9 for one, other in pairwise(mine))


@pytest.mark.slow
def test_a_hundred_times_as_many_windows_are_hardly_more_events() -> None:
    short, long = len(limited(long_run(2, 1_000))), len(limited(long_run(2, 100_000)))
    # 2,400 seconds: slots of one second at first, and of a thousandth of the run after a thousand seconds.
    assert short < 200
    assert long < 4 * 2_000


def test_a_slot_grows_with_the_run() -> None:
    kept = limited(long_run(1, 20_000, window_s=1.0))
    lengths_s = [event["t"] - event["start"] for event in kept if event["kind"] == "window" and "count" in event]
    assert lengths_s[0] < 3
    assert 15 < lengths_s[-2] < 25


def test_many_ranks_keep_fewer_events_each() -> None:
    kept: list[Event] = []
    limit = EventLimit(kept.append, world_size=40)
    for event in long_run(1, 100):
        limit.add(event)
    limit.end()
    assert sum("count" not in event for event in kept) < 10


def test_the_median_average_counts_merged_ones_as_often_as_they_were() -> None:
    events = long_run(2, 500)
    (found,) = summarize(Timeline(name="run", events=limited(events)))
    assert found.average_ms == pytest.approx(2.0)


def test_the_last_plan_of_a_slot_stands_for_all() -> None:
    changes = anchor_history(Timeline(name="run", events=limited(long_run(1, 500))))
    assert changes[-1].after == 2 + 499 % 3
    assert len(changes) < 30


@pytest.mark.parametrize(("is_background", "cause"), [(False, "average"), (True, "unexplained")])
def test_gaps_get_the_same_cause_after_merging(is_background: bool, cause: str) -> None:
    """Averages take two of three milliseconds: they explain a gap unless the rank computes meanwhile."""
    events = long_run(1, 1_000, window_s=0.001, is_background=is_background)
    utilization = make_utilization([90.0] * 15 + [0.0] * 10 + [90.0] * 20)
    for kept in (events, limited(events)):
        assert [gap.cause for gap in idle_gaps(utilization, kept, spans(kept))] == [cause]


def test_boundaries_between_merged_epochs_explain_a_gap() -> None:
    """Fifty milliseconds lie between two epochs of some thirty."""
    kept = limited(long_run(100, 1, window_s=0.001))
    utilization = make_utilization([90.0] * 30 + [0.0] * 20 + [90.0] * 30)
    assert [gap.cause for gap in idle_gaps(utilization, kept, spans(kept))] == ["epoch boundary"]


def test_everything_can_be_exported_after_merging(tmp_path: Path) -> None:
    timeline = Timeline(name="run", events=limited(long_run(30, 100)))
    assert write_html(timeline, tmp_path).stat().st_size < 1_000_000
    assert '"epochs ' in as_trace(timeline)
    assert as_csv(timeline).count("\n") == len(timeline.events) + 1
