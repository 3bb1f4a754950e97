"""Epochs that nobody looks at: windows and averages go on from one to the next, on all ranks alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.policy.batch_splitter import Splitter
from outrider.policy.effects import AverageReport, Effect, Lease, Seat, Step
from outrider.policy.ledger import Ledger
from outrider.policy.policies import open_policy
from outrider.policy.policy_chooser import PolicyChooser
from outrider.policy.window_planner import PlannerConfig, WindowPlanner
from outrider.virtual.virtual_clock import Costs, Flights, RankClock, VirtualClock

LOCAL = ("async", "cadence")
MOST_REPORTS = 20_000


@dataclass
class Run:
    """Some epochs in virtual time, and what happened in them."""

    uses: list[Counter[int]] = field(default_factory=list)
    """Of each position, by epoch."""
    left: list[int] = field(default_factory=list)
    is_open: list[set[int]] = field(default_factory=list)
    """The ranks that left their windows open, by epoch."""
    positions: dict[int, list[int]] = field(default_factory=dict)
    """Of the whole run, as each rank's steps see it."""
    reports: list[AverageReport] = field(default_factory=list)
    clocks: list[RankClock] = field(default_factory=list)

    def count(self, report: AverageReport) -> None:
        self.reports.append(report)
        assert len(self.reports) < MOST_REPORTS, "ranks average for ever"

    @property
    def waited_ms(self) -> float:
        return sum(clock.wait_ms for clock in self.clocks)

    @property
    def wall_ms(self) -> float:
        return max(clock.now_ms for clock in self.clocks)


def drive(
    policy: str,
    *,
    epochs: int,
    num_samples: int,
    batch_size: int = 4,
    paces: list[float],
    average_ms: float = 0.3,
    may_stay_open: bool = True,
    anchor: int | None = None,
    max_batch_diff: int | None = None,
    shares: tuple[float, ...] | None = None,
    max_overshoot: int = 4,
    wants_stop: Callable[[], bool] | None = None,
    step_ms: Callable[[int, int], float] | None = None,
) -> Run:
    size, run = len(paces), Run()
    config = PlannerConfig(
        world_size=size,
        batch_size=batch_size,
        is_blocking=policy == "cadence",
        anchor=anchor,
        max_batch_diff=max_batch_diff,
        shares=shares,
    )
    planners = [WindowPlanner(config) for _ in range(size)]
    splitters = [Splitter(world_size=size, may_rest=True) for _ in range(size)]
    choosers = [PolicyChooser(world_size=size) for _ in range(size)]
    clocks, flights, windows = [RankClock() for _ in range(size)], Flights(size), 0
    run.clocks = clocks
    opened: dict[int, object] = {}
    for epoch in range(epochs):
        uses = Counter[int]()
        run.uses.append(uses)

        def saw(rank: int, now: float, effect: Effect, uses: Counter[int] = uses, epoch: int = epoch) -> None:
            if isinstance(effect, Step):
                uses.update(range(effect.batch.start, effect.batch.stop))
                run.positions.setdefault(rank, []).append(epoch * num_samples + effect.at)

        engine = VirtualClock(
            [
                open_policy(
                    policy,
                    Seat(rank, size, batch_size),
                    Lease(0, num_samples),
                    planner=planners[rank],
                    splitter=splitters[rank],
                    max_overshoot=max_overshoot,
                    samples_after=(epochs - 1 - epoch) * num_samples,
                    chooser=choosers[rank],
                    window=opened.get(rank),  # type: ignore[arg-type]
                    may_stay_open=may_stay_open and epoch < epochs - 1,
                )
                for rank in range(size)
            ],
            costs=Costs(
                step_ms=step_ms or (lambda rank, samples: paces[rank] * (0.1 + samples / batch_size)),
                average_ms=average_ms,
                gradient_ms=average_ms,
            ),
            ledger=Ledger(0, num_samples),
            batch_size=batch_size,
            clocks=clocks,
            windows_before=windows,
            on_effect=saw,
            on_report=lambda now, report: run.count(report),
            wants_stop=wants_stop,
            flights=flights,
        )
        engine.run()
        windows, opened = engine.windows, dict(engine.open_windows)
        run.is_open.append(set(opened))
        run.left.append(sum(piece.count for piece in engine.ledger.free) if policy == "async" else 0)
        latest = max(clock.now_ms for clock in clocks)
        for clock in clocks:
            clock.now_ms = latest
        if any(report.ends_segment for report in run.reports):
            break
    return run


WORLDS = st.lists(st.floats(1.0, 20.0), min_size=2, max_size=4)


@pytest.mark.parametrize("policy", LOCAL)
@given(
    num_samples=st.integers(5, 300),
    batch_size=st.sampled_from([2, 3, 8, 17]),
    paces=WORLDS,
    epochs=st.integers(2, 6),
    anchor=st.sampled_from([None, 1, 3, 40]),
    average_ms=st.sampled_from([0.0, 0.3, 5.0, 60.0]),
    max_batch_diff=st.sampled_from([None, None, 1]),
    max_overshoot=st.sampled_from([0, 4]),
)
@settings(max_examples=150, deadline=None)
def test_each_epoch_uses_every_sample_once_and_averages_account_for_all(
    policy: str,
    num_samples: int,
    batch_size: int,
    paces: list[float],
    epochs: int,
    anchor: int | None,
    average_ms: float,
    max_batch_diff: int | None,
    max_overshoot: int,
) -> None:
    run = drive(
        policy,
        epochs=epochs,
        num_samples=num_samples,
        batch_size=batch_size,
        paces=paces,
        anchor=anchor,
        average_ms=average_ms,
        max_batch_diff=max_batch_diff,
        max_overshoot=max_overshoot,
    )
    assert run.uses == [Counter(range(num_samples))] * epochs
    assert sum(report.samples for report in run.reports) == epochs * num_samples
    assert all(ranks in (set(), set(range(len(paces)))) for ranks in run.is_open)
    assert run.is_open[-1] == set()
    for positions in run.positions.values():
        assert positions == sorted(positions)
        assert positions[-1] < epochs * num_samples


@given(
    num_samples=st.integers(40, 300),
    paces=WORLDS,
    jitter=st.randoms(use_true_random=False),
    stop_after=st.integers(1, 200),
    average_ms=st.sampled_from([0.0, 0.3, 5.0, 60.0]),
)
@settings(max_examples=150, deadline=None)
def test_a_wish_to_stop_ends_all_ranks_in_the_same_epoch(
    num_samples: int, paces: list[float], jitter: object, stop_after: int, average_ms: float
) -> None:
    asked = 0

    def wants_stop() -> bool:
        nonlocal asked
        asked += 1
        return asked > stop_after

    draw = jitter.uniform  # type: ignore[attr-defined]
    run = drive(
        "async",
        epochs=6,
        num_samples=num_samples,
        paces=paces,
        average_ms=average_ms,
        wants_stop=wants_stop,
        step_ms=lambda rank, samples: paces[rank] * draw(0.5, 2.0),
    )
    done = sum(sum(uses.values()) for uses in run.uses)
    assert max(max(uses.values(), default=1) for uses in run.uses) == 1
    assert sum(report.samples for report in run.reports) == done
    # Whatever was not done of the last epoch is left in its ledger.
    assert done + run.left[-1] == len(run.uses) * num_samples
    assert run.is_open[-1] == set()


def test_a_rank_for_which_no_batch_is_planned_notices_the_end_of_the_epoch() -> None:
    shares = (0.9, 0.09, 0.01)
    run = drive("async", epochs=2, num_samples=20, paces=[1.0] * 3, shares=shares, max_overshoot=0)
    assert run.uses == [Counter(range(20))] * 2
    assert run.is_open == [{0, 1, 2}, set()]


def test_a_wish_to_stop_ends_an_open_window_of_cadence_with_its_epoch() -> None:
    asked = iter([False, False])
    run = drive("cadence", **EQUAL | {"num_samples": 40, "anchor": 1000}, wants_stop=lambda: next(asked, True))
    # The wish comes while ranks meet at the end of the third of eight epochs.
    assert run.is_open == [{0, 1}, {0, 1}, set()]
    assert [report.samples for report in run.reports] == [120]


EQUAL: dict[str, Any] = {"epochs": 8, "paces": [1.0, 1.0], "shares": (0.5, 0.5)}


def test_async_waits_for_no_average_at_the_end_of_an_epoch() -> None:
    setting = EQUAL | {"num_samples": 400, "average_ms": 30.0, "anchor": 40}
    through, ended = drive("async", **setting), drive("async", **setting, may_stay_open=False)
    assert through.is_open == [{0, 1}] * 7 + [set()]
    assert ended.is_open == [set()] * 8
    # Of eight averages for which both ranks wait, one is left: that at the end of the run.
    assert ended.waited_ms == pytest.approx(8 * 2 * 30.0)
    assert through.waited_ms == pytest.approx(2 * 30.0)
    assert ended.wall_ms - through.wall_ms == pytest.approx(7 * 30.0)


def test_cadence_has_no_average_that_the_plan_did_not_want() -> None:
    setting = EQUAL | {"num_samples": 48, "anchor": 24}
    through, ended = drive("cadence", **setting), drive("cadence", **setting, may_stay_open=False)
    # Each rank has six batches per epoch, so a window of 24 takes four epochs.
    assert [report.samples for report in ended.reports] == [48] * 8
    assert [report.samples for report in through.reports] == [192, 192]


def test_a_window_of_cadence_that_an_epoch_cuts_has_its_planned_length() -> None:
    run = drive("cadence", **EQUAL | {"num_samples": 80, "epochs": 5, "anchor": 3})
    # Ten batches of each rank per epoch: windows of three, and what is left at the very end.
    *windows, last = [report.ranks[0].batches for report in run.reports]
    assert set(windows) == {3}
    assert sum(windows) + last == 50


def test_where_a_rank_lags_at_the_end_of_an_epoch_others_take_part_in_its_averages() -> None:
    """Nobody expects the slow steps of rank 1: the others are done long before it, and must not keep it waiting."""
    run = drive(
        "async",
        **EQUAL | {"paces": [1.0] * 3, "shares": (1.0, 1.0, 1.0), "num_samples": 256, "anchor": 1, "epochs": 3},
        step_ms=lambda rank, samples: 50.0 if rank == 1 else 1.0,
    )
    assert run.uses == [Counter(range(256))] * 3
    alone = [r for r in run.reports if r.ranks[1].samples and not r.ranks[0].samples and not r.ranks[2].samples]
    assert len(alone) >= 3


@pytest.mark.slow
@given(
    num_batches=st.integers(2, 40),
    paces=WORLDS,
    anchor=st.sampled_from([None, 1, 3, 9, 40]),
    average_ms=st.sampled_from([0.3, 5.0]),
)
@settings(max_examples=100, deadline=None)
def test_a_window_of_cadence_ends_within_as_many_epochs_as_it_is_long(
    num_batches: int, paces: list[float], anchor: int | None, average_ms: float
) -> None:
    epochs = 30
    run = drive(
        "cadence", epochs=epochs, num_samples=4 * num_batches, paces=paces, anchor=anchor, average_ms=average_ms
    )
    # A full window has at most this many batches: the anchor for the slowest rank, in proportion for the others.
    most = max((anchor or 200) * sum(max(paces) / pace + 1 for pace in paces), num_batches)
    assert all(report.samples / 4 <= most + num_batches for report in run.reports)


@pytest.mark.parametrize(
    ("paces", "num_batches", "anchor", "average_ms"),
    [
        ([1.0, 10.0], 8, 9, 0.3),
        ([1.0, 10.0], 8, 6, 0.3),
        ([1.0, 20.0], 15, None, 2.0),
        ([1.0, 3.0], 7, 8, 1.0),
        ([1.0, 1.6, 3.0], 7, 8, 1.0),
        ([1.0, 1.0], 6, 24, 3.0),
    ],
)
def test_epochs_of_cadence_that_stay_open_take_no_longer(
    paces: list[float], num_batches: int, anchor: int | None, average_ms: float
) -> None:
    through, ended = (
        drive(
            "cadence",
            epochs=60,
            num_samples=4 * num_batches,
            paces=paces,
            anchor=anchor,
            average_ms=average_ms,
            may_stay_open=is_open,
        )
        for is_open in (True, False)
    )
    assert through.wall_ms < ended.wall_ms


def test_a_bound_on_the_lead_of_fast_ranks_holds_within_an_epoch_and_across_epochs() -> None:
    setting: dict[str, Any] = {"epochs": 6, "num_samples": 40, "paces": [1.0, 3.0], "anchor": 20, "max_batch_diff": 1}
    run = drive("cadence", **setting)
    assert run.is_open == [set()] * 6
    assert all(abs(report.ranks[0].batches - report.ranks[1].batches) <= 1 for report in run.reports)


@pytest.mark.parametrize("policy", ["sync", "balanced", "auto", "independent"])
def test_policies_without_windows_end_their_epochs_as_before(policy: str) -> None:
    run = drive(policy, epochs=3, num_samples=40, paces=[1.0, 2.0])
    assert run.is_open == [set()] * 3


def test_a_report_tells_how_long_ranks_waited_where_epochs_stayed_open() -> None:
    run = drive("cadence", **EQUAL | {"paces": [1.0, 3.0], "num_samples": 48, "anchor": 24})
    # Three epochs before each average stay open; rank 0 then waits for six steps that take 2.2 ms longer.
    waits_ms = [[facts.border_ms for facts in report.ranks] for report in run.reports]
    assert waits_ms == [[pytest.approx(3 * 6 * 2.2), 0.0]] * 2
