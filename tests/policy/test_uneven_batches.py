"""Batches of different sizes on the ranks: every sample is dealt once, and plans follow the speed in samples."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.policy.effects import AverageReport, RankFacts
from outrider.policy.uneven_batches import deal_by_size
from outrider.policy.window_plan import PlannerConfig, WindowPlan
from outrider.policy.window_planner import WindowPlanner

ranks = st.lists(st.tuples(st.integers(1, 64), st.floats(1.0, 20.0)), min_size=1, max_size=5)


@given(remaining=st.integers(0, 2_000), world=ranks, bound=st.integers(0, 5) | st.none())
def test_every_sample_is_dealt_once(remaining: int, world: list[tuple[int, float]], bound: int | None) -> None:
    sizes, paces = [size for size, _ in world], [pace for _, pace in world]
    dealt = deal_by_size(remaining, sizes, paces, max_batch_diff=bound)
    assert sum(dealt) == remaining
    assert min(dealt) >= 0


@given(remaining=st.integers(2, 2_000), world=ranks)
def test_no_rank_is_left_with_a_single_sample(remaining: int, world: list[tuple[int, float]]) -> None:
    sizes, paces = [max(2, size) for size, _ in world], [pace for _, pace in world]
    dealt = deal_by_size(remaining, sizes, paces)
    assert all(count % size != 1 or count > size for count, size in zip(dealt, sizes, strict=True))


def test_each_batch_goes_to_the_rank_that_finishes_it_first() -> None:
    # Rank 0 takes 48 samples in 10 ms, rank 1 takes 16 in 10 ms.
    assert deal_by_size(48 + 16, (48, 16), (10.0, 10.0)) == (48, 16)
    assert deal_by_size(16, (48, 16), (10.0, 10.0)) == (16, 0)
    assert deal_by_size(48 * 3, (48, 16), (10.0, 1000.0)) == (144, 0)


def planner(**options: object) -> WindowPlanner:
    fields = {"world_size": 2, "batch_size": 32, "batch_sizes": (48, 16), "is_blocking": True, "anchor": 2, **options}
    return WindowPlanner(PlannerConfig(**fields))  # type: ignore[arg-type]


def report_of(plan: WindowPlan, sample_ms: tuple[float, float]) -> AverageReport:
    facts = tuple(
        RankFacts(samples=samples, batches=batches, compute_ms=samples * ms, exposed_ms=0.0)
        for samples, batches, ms in zip(plan.samples, plan.batches, sample_ms, strict=True)
    )
    return AverageReport(window=0, ranks=facts, drift=None)


def test_a_plan_has_whole_batches_of_each_rank_and_follows_what_each_takes() -> None:
    made = planner()
    for _ in range(3):
        # A batch of rank 0 takes 48 ms, one of rank 1 takes 96 ms.
        made.learn(report_of(made.window(10**6), (1.0, 6.0)))
    plan = made.window(10**6)
    assert plan.batches == (4, 2)
    assert plan.samples == (4 * 48, 2 * 16)
    assert made.share(0) == pytest.approx(6 / 7)


def test_given_shares_are_shares_of_samples() -> None:
    made = planner(shares=(0.75, 0.25))
    assert made.window(10**6).batches == (2, 2)
    assert made.share(0) == pytest.approx(0.75)


def test_the_last_window_deals_what_is_left() -> None:
    made = planner(shares=(0.75, 0.25))
    plan = made.window(100)
    assert sum(plan.samples) == 100
    assert plan.batches == (2, 1)
