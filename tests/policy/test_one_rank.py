"""Policies of shared steps in a world of one rank: its own steps, and how often it listens."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.policy.batch_splitter import Splitter
from outrider.policy.effects import AverageReport, Confer, Effect, Expect, Lease, Merge, RankFacts, Seat, Step
from outrider.policy.policies import open_policy
from outrider.policy.policies.one_rank import MAX_STRETCH, STRETCH_MS
from outrider.policy.window_planner import PlannerConfig, WindowPlanner

SHARED = ["sync", "balanced", "auto"]


def effects_of(
    policy: str, span: Lease, *, batch_size: int, step_ms: float, stops_after: int | None = None
) -> list[Effect]:
    """What the only rank does; the wish to stop comes while it listens for the `stops_after`-th time."""
    opened = open_policy(
        policy,
        Seat(rank=0, world_size=1, batch_size=batch_size),
        span,
        planner=WindowPlanner(PlannerConfig(world_size=1, batch_size=batch_size, is_blocking=False)),
        splitter=Splitter(world_size=1, may_rest=True),
        max_overshoot=0,
    )
    effects: list[Effect] = []
    steps, words, result = 0, 0, None
    while True:
        try:
            effect = opened.send(result)
        except StopIteration:
            return effects
        effects.append(effect)
        result = None
        steps += isinstance(effect, Step)
        if isinstance(effect, Confer):
            words += 1
            facts = RankFacts(
                samples=effect.samples,
                batches=steps,
                compute_ms=steps * step_ms,
                exposed_ms=0.0,
                wants_stop=words == stops_after,
            )
            result, steps = AverageReport(window=words, ranks=(facts,)), 0


def stretches(effects: list[Effect]) -> list[int]:
    """Steps between two moments in which the rank listens."""
    lengths = [0]
    for effect in effects:
        if isinstance(effect, Confer):
            lengths.append(0)
        else:
            lengths[-1] += isinstance(effect, Step)
    return lengths[:-1]


@pytest.mark.parametrize("policy", SHARED)
@given(start=st.integers(0, 50), count=st.integers(1, 700), batch_size=st.integers(1, 40), step_ms=st.floats(0.0, 1e4))
def test_every_sample_is_used_once_in_order(
    policy: str, start: int, count: int, batch_size: int, step_ms: float
) -> None:
    effects = effects_of(policy, Lease(start, count), batch_size=batch_size, step_ms=step_ms)
    batches = [effect.batch for effect in effects if isinstance(effect, Step)]
    assert [batch for effect in effects if isinstance(effect, Expect) for batch in effect.batches] == batches
    assert batches[0].start == start
    assert batches[-1].stop == start + count
    assert all(before.stop == after.start for before, after in pairwise(batches))
    assert sum(effect.samples for effect in effects if isinstance(effect, Confer)) == count
    assert effects[-1] == Merge(samples=count)


@pytest.mark.parametrize("policy", SHARED)
def test_nothing_is_shared(policy: str) -> None:
    kinds = {type(effect) for effect in effects_of(policy, Lease(0, 64), batch_size=8, step_ms=1.0)}
    assert kinds == {Expect, Step, Confer, Merge}


def test_the_time_between_two_words_grows_to_half_a_second() -> None:
    lengths = stretches(effects_of("auto", Lease(0, 400), batch_size=1, step_ms=STRETCH_MS / 50))
    assert lengths[:8] == [1, 2, 4, 8, 16, 32, 50, 50]


def test_slow_steps_are_heard_after_each() -> None:
    assert stretches(effects_of("auto", Lease(0, 20), batch_size=4, step_ms=2 * STRETCH_MS)) == [1] * 5


def test_steps_without_a_time_are_not_queued_for_ever() -> None:
    assert max(stretches(effects_of("auto", Lease(0, 5_000), batch_size=1, step_ms=0.0))) == MAX_STRETCH


def test_a_wish_to_stop_ends_the_segment_at_the_next_word() -> None:
    effects = effects_of("sync", Lease(0, 400), batch_size=4, step_ms=1.0, stops_after=3)
    assert sum(isinstance(effect, Step) for effect in effects) == 1 + 2 + 4
    assert effects[-1] == Merge(samples=28)
