"""Where ranks wait that have taken their last step: for each other, but not while an average needs them."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.errors import WaitError
from outrider.policy.effects import AverageReport, Border, RankFacts
from outrider.rank.meter import Meter
from outrider.rank.segment_border import SegmentBorder
from outrider.rank.throttle import Throttle
from outrider.rank.window import as_report
from outrider.timeline.recorder import Recorder


class World:
    """Rank 0 of two; the other one comes after some looks, and then tells what it is given."""

    timeout_s = 0.05

    def __init__(self, looks: float, told: list[Any]) -> None:
        self.looks, self.told = looks, told
        self.arrivals = 0

    def arrive(self, name: str, *, what: str) -> str:
        self.arrivals += 1
        return name

    def have_arrived(self, meeting: str) -> bool:
        self.looks -= 1
        return self.looks < 0

    def refuse_absent(self, meeting: str) -> None:
        raise WaitError("rank 0 waited, rank 1 did not come", hint="see the logs", rank=1)

    def exchange_json(self, value: Any, *, name: str) -> list[Any]:
        return [value, self.told]


def wait(border: SegmentBorder, *, is_ready: bool = False, windows: int = 5, wants: bool = False) -> Border | None:
    return border.wait(is_ready=lambda: is_ready, windows=windows, wants_end=lambda: wants)


@pytest.mark.parametrize(
    ("told", "wants", "expected"),
    [
        ([5, False], False, Border(is_behind=False, wants_end=False)),
        ([6, False], False, Border(is_behind=True, wants_end=False)),
        ([4, True], False, Border(is_behind=False, wants_end=True)),
        ([5, False], True, Border(is_behind=False, wants_end=True)),
    ],
)
def test_all_ranks_learn_who_is_behind_and_whether_anybody_wants_to_end(
    told: list[Any], wants: bool, expected: Border
) -> None:
    border: Any = SegmentBorder(World(3, told))  # type: ignore[arg-type]
    assert wait(border, wants=wants) == expected


def test_an_average_that_is_ready_comes_first_and_the_rank_arrives_only_once() -> None:
    world = World(2, [5, False])
    border = SegmentBorder(world)  # type: ignore[arg-type]
    assert wait(border, is_ready=True) is None
    assert wait(border, is_ready=True) is None
    assert wait(border, is_ready=True) == Border(is_behind=False, wants_end=False)
    assert world.arrivals == 1
    assert wait(border) == Border(is_behind=False, wants_end=False)
    assert world.arrivals == 2


def test_a_rank_that_never_comes_is_named() -> None:
    border = SegmentBorder(World(float("inf"), []))  # type: ignore[arg-type]
    with pytest.raises(WaitError, match="rank 1 did not come"):
        wait(border)


@pytest.mark.parametrize(
    ("is_blocking", "cost_s", "wait_s", "recorded_s"), [(True, 0.25, 0.75, 0.75), (False, 0.5, 0.5, 0.0)]
)
def test_a_wait_for_an_average_is_not_its_cost(
    is_blocking: bool, cost_s: float, wait_s: float, recorded_s: float
) -> None:
    """The wait at the end of an epoch is called the same whether the epoch ends with an average or stays open."""
    meter = Meter(rank=0, throttle=Throttle(1.0), recorder=Recorder(0, origin_s=0.0))
    facts = {"samples": 8, "batches": 1, "compute_ms": 10.0}
    ranks = (
        RankFacts(**facts, exposed_ms=1_000.0, waited_ms=0.0 if is_blocking else 500.0),
        RankFacts(**facts, exposed_ms=250.0),
    )
    report = AverageReport(window=1, ranks=ranks)
    assert meter.charge(report, is_blocking=is_blocking, is_average=True) == recorded_s
    assert (meter.average_cost_s, meter.average_wait_s) == (cost_s, wait_s)


def test_the_wait_is_part_of_the_epochs_account() -> None:
    recorder = Recorder(0, origin_s=0.0)
    meter = Meter(rank=0, throttle=Throttle(1.0), recorder=recorder)
    meter.waited_for_others(0.25)
    meter.waited_for_others(0.5)
    assert meter.average_wait_s == 0.75
    assert recorder.wait_s["epoch boundary"] == 0.75


def test_the_wait_travels_with_the_facts_of_the_next_average_once() -> None:
    meter = Meter(rank=0, throttle=Throttle(1.0), recorder=Recorder(0, origin_s=0.0))
    meter.waited_for_others(0.25)
    rows = [tuple(meter.facts(loss=(0.0, 0), is_dry=False, wants_stop=False, wants_pause=False)) for _ in range(2)]
    assert [as_report(0, (row,), None).ranks[0].border_ms for row in rows] == [250.0, 0.0]
