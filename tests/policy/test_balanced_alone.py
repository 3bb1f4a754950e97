"""What the ranks of `balanced` do while one works alone: when they meet, and when they are handed what it learned."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.policy.batch_splitter import Splitter
from outrider.policy.effects import (
    AverageReport,
    Confer,
    Effect,
    HandOver,
    Lease,
    Merge,
    RankFacts,
    Seat,
    SharedStep,
    Step,
)
from outrider.policy.policies import open_policy
from outrider.policy.window_planner import PlannerConfig, WindowPlanner

TOTAL = 100
"""Samples of a batch."""


class Rester:
    """A splitter that leaves stretches of two batches to one rank, for so many of them; at first to `lone`."""

    stretch = 2
    is_exploring = False

    def __init__(self, *, stretches: int, lone: Sequence[int] = (0,)) -> None:
        self.left = stretches
        self.ranks = [*lone, *[lone[-1]] * (stretches - len(lone))]
        self.asked = Splitter(world_size=2)

    @property
    def lone(self) -> int | None:
        return self.ranks[-self.left] if self.left else None

    def begin(self, total: int, *, left: int | None) -> list[object]:
        return []

    def next(self, total: int, *, is_usual: bool) -> object:
        return self.asked.next(total, is_usual=is_usual)

    def learn(self, report: AverageReport, *, left: int | None = None) -> list[object]:
        return []

    def learn_alone(self, report: AverageReport, *, left: int | None = None) -> list[object]:
        self.left -= 1
        return []


def done(
    *, rank: int, batches: int, stretches: int, lone: Sequence[int] = (0,), stops_after: int | None = None
) -> list[Effect]:
    """What a rank does for so many batches; the wish to stop comes with the report of a meeting."""
    seat = Seat(rank=rank, world_size=2, batch_size=TOTAL)
    policy = open_policy(
        "balanced",
        seat,
        Lease(0, batches * TOTAL),
        planner=WindowPlanner(PlannerConfig(world_size=2, batch_size=TOTAL, is_blocking=False)),
        splitter=Rester(stretches=stretches, lone=lone),  # type: ignore[arg-type]
        max_overshoot=0,
    )
    effects, result = [], None
    while True:
        try:
            effect = policy.send(result)
        except StopIteration:
            return [one for one in effects if isinstance(one, Confer | HandOver | Merge | Step | SharedStep)]
        effects.append(effect)
        meetings = sum(isinstance(one, Confer | HandOver) for one in effects)
        facts = RankFacts(samples=0, batches=0, compute_ms=0.0, exposed_ms=0.0, wants_stop=meetings == stops_after)
        result = None if isinstance(effect, Step) else AverageReport(window=0, ranks=(facts, facts))


def names(effects: list[Effect]) -> str:
    return " ".join(type(effect).__name__ for effect in effects)


def test_what_one_rank_learned_goes_to_the_others_at_the_end_of_a_segment_only() -> None:
    worked, rested = (done(rank=rank, batches=6, stretches=9) for rank in range(2))
    assert names(worked) == "Step Step Confer Step Step Confer Step Step HandOver"
    assert names(rested) == "Confer Confer HandOver"
    assert worked[-1] == HandOver(source=0, samples=2 * TOTAL, at=5 * TOTAL, may_wait=True)
    assert rested[-1] == HandOver(source=0, samples=0, at=5 * TOTAL, may_wait=True)


def test_before_all_share_again_they_are_handed_what_one_has_learned() -> None:
    worked, rested = (done(rank=rank, batches=5, stretches=2) for rank in range(2))
    assert names(worked) == "Step Step Confer Step Step Confer HandOver SharedStep Merge"
    assert names(rested) == "Confer Confer HandOver SharedStep Merge"
    assert worked[6] == rested[2] == HandOver(source=0, samples=0, at=3 * TOTAL)


def test_a_run_that_stops_while_one_works_alone_ends_with_what_it_has_learned() -> None:
    worked, rested = (done(rank=rank, batches=6, stretches=9, stops_after=1) for rank in range(2))
    assert names(worked) == "Step Step Confer HandOver"
    assert names(rested) == "Confer HandOver"


def test_a_rank_that_takes_over_is_handed_what_the_one_before_it_has_learned() -> None:
    first, second = (done(rank=rank, batches=6, stretches=9, lone=(0, 1)) for rank in range(2))
    assert names(first) == "Step Step Confer HandOver Confer HandOver"
    assert names(second) == "Confer HandOver Step Step Confer Step Step HandOver"
    assert first[3] == second[1] == HandOver(source=0, samples=0, at=TOTAL)
    assert second[-1] == HandOver(source=1, samples=2 * TOTAL, at=5 * TOTAL, may_wait=True)


def test_a_change_of_who_works_alone_does_not_wait_at_the_end_of_a_segment() -> None:
    first, second = (done(rank=rank, batches=2, stretches=9, lone=(0, 1)) for rank in range(2))
    assert names(first) == "Step Step HandOver HandOver"
    assert first[-1] == second[-1] == HandOver(source=0, samples=0, at=TOTAL)
