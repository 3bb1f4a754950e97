"""Every policy, driven by clocks alone: coverage of samples, agreement of ranks, ends and stops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.clockwork import Clockwork, Costs
from outrider.core.effects import Batch, Collect, Effect, Expect, Lease, Merge, Report, Seat, SharedStep, Step
from outrider.core.ledger import Ledger
from outrider.core.planner import Planner, PlannerConfig
from outrider.core.policies import POLICIES, open_policy
from outrider.core.split import Splitter

TRAINING = ("sync", "balanced", "cadence", "async")


class Watch:
    """Remembers what the policies asked for."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, Batch]] = []
        self.expected: dict[int, list[Batch]] = {}
        self.positions: dict[int, list[int]] = {}
        self.reports: list[Report] = []
        self.merges = 0

    def effect(self, rank: int, now: float, effect: Effect) -> None:
        if isinstance(effect, (Step, SharedStep)):
            self.batches.append((rank, effect.batch))
            self.positions.setdefault(rank, []).append(effect.at)
        self.merges += isinstance(effect, Merge)
        if isinstance(effect, Expect):
            self.expected.setdefault(rank, []).extend(effect.batches)

    def report(self, now: float, report: Report) -> None:
        self.reports.append(report)

    def uses(self) -> Counter[int]:
        return Counter(position for _, batch in self.batches for position in range(batch.start, batch.stop))


def drive(
    policy: str,
    *,
    num_samples: int,
    batch_size: int,
    step_ms: Callable[[int, int], float],
    ranks: int,
    average_ms: float = 0.3,
    start: int = 0,
    wants_stop: Callable[[], bool] | None = None,
) -> tuple[Watch, Clockwork]:
    watch = Watch()
    span = Lease(start, num_samples - start)
    config = PlannerConfig(world_size=ranks, batch_size=batch_size, is_blocking=policy == "cadence")
    policies = [
        open_policy(
            policy,
            Seat(rank, ranks, batch_size),
            span,
            planner=Planner(config),
            splitter=Splitter(world_size=ranks, may_rest=True),
            max_overshoot=4,
        )
        for rank in range(ranks)
    ]
    engine = Clockwork(
        policies,
        costs=Costs(step_ms=step_ms, average_ms=average_ms, gradient_ms=average_ms),
        ledger=Ledger(span.start, span.stop),
        batch_size=batch_size,
        on_effect=watch.effect,
        on_report=watch.report,
        wants_stop=wants_stop,
    )
    engine.run()
    return watch, engine


def steady(paces: Sequence[float], batch_size: int) -> Callable[[int, int], float]:
    return lambda rank, samples: 0.1 * paces[rank] + paces[rank] * samples / batch_size


PRIMES = st.sampled_from([2, 3, 7, 31, 97, 211, 1009, 4099])


@pytest.mark.parametrize("policy", POLICIES)
@given(
    num_samples=PRIMES,
    batch_size=st.sampled_from([1, 2, 3, 8, 17, 64]),
    paces=st.lists(st.floats(1.0, 20.0), min_size=1, max_size=5),
)
@settings(max_examples=25, deadline=None)
def test_every_sample_is_used_exactly_once(policy: str, num_samples: int, batch_size: int, paces: list[float]) -> None:
    watch, _ = drive(
        policy, num_samples=num_samples, batch_size=batch_size, step_ms=steady(paces, batch_size), ranks=len(paces)
    )
    assert watch.uses() == Counter(range(num_samples))


@pytest.mark.parametrize("policy", POLICIES)
@given(paces=st.lists(st.floats(1.0, 20.0), min_size=2, max_size=5), factor=st.sampled_from([0.1, 0.5, 3.0, 20.0]))
@settings(max_examples=15, deadline=None)
def test_a_rank_that_changes_speed_in_mid_epoch_loses_no_sample(policy: str, paces: list[float], factor: float) -> None:
    steps = Counter[int]()

    def step_ms(rank: int, samples: int) -> float:
        steps[rank] += 1
        change = factor if rank == 0 and steps[rank] > 10 else 1.0
        return paces[rank] * change * samples / 8

    watch, _ = drive(policy, num_samples=2003, batch_size=8, step_ms=step_ms, ranks=len(paces))
    assert watch.uses() == Counter(range(2003))


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_all_ranks_finish_within_one_batch_of_the_slowest(policy: str) -> None:
    paces = [1.0, 2.5, 7.0]
    _, engine = drive(policy, num_samples=20_011, batch_size=16, step_ms=steady(paces, 16), ranks=3)
    ends = [clock.last_step_ms for clock in engine.clocks]
    assert max(ends) - min(ends) <= 1.1 * max(paces)


def test_where_averages_are_dear_balanced_lets_the_fast_rank_work_alone() -> None:
    watch, engine = drive(
        "balanced", num_samples=40_009, batch_size=16, step_ms=steady([1.0, 7.0], 16), ranks=2, average_ms=50.0
    )
    assert watch.uses() == Counter(range(40_009))
    assert {rank for rank, _ in watch.batches[-2000:]} == {0}
    assert engine.clocks[1].wait_ms > 0.5 * engine.clocks[1].now_ms


@pytest.mark.parametrize(("average_ms", "merges"), [(50.0, 0), (0.01, 2)])
def test_what_was_handed_over_need_not_be_merged(average_ms: float, merges: int) -> None:
    """With dear averages a segment ends with one rank alone, with cheap ones all share to its end."""
    watch, _ = drive(
        "balanced", num_samples=40_009, batch_size=16, step_ms=steady([1.0, 2.0], 16), ranks=2, average_ms=average_ms
    )
    assert watch.merges == merges


def test_a_stop_is_heard_while_one_rank_works_alone() -> None:
    asked = Counter[str]()

    def wants_stop() -> bool:
        asked["times"] += 1
        return asked["times"] > 60

    watch, engine = drive(
        "balanced",
        num_samples=1_000_003,
        batch_size=16,
        step_ms=steady([1.0, 7.0], 16),
        ranks=2,
        average_ms=50.0,
        wants_stop=wants_stop,
    )
    assert watch.uses() == Counter(range(engine.reached))
    assert 0 < engine.reached < 100_000


@pytest.mark.parametrize("policy", TRAINING)
def test_a_segment_may_start_in_the_middle_of_an_epoch(policy: str) -> None:
    watch, _ = drive(policy, num_samples=1009, start=400, batch_size=8, step_ms=steady([1, 2], 8), ranks=2)
    assert watch.uses() == Counter(range(400, 1009))


@pytest.mark.parametrize("policy", TRAINING)
def test_reports_account_for_every_sample(policy: str) -> None:
    watch, engine = drive(policy, num_samples=1009, batch_size=8, step_ms=steady([1, 3], 8), ranks=2)
    assert sum(report.samples for report in watch.reports) == 1009
    assert engine.reached == 1009


@pytest.mark.parametrize("policy", TRAINING)
def test_a_stop_ends_all_ranks_and_what_was_done_is_a_whole_prefix(policy: str) -> None:
    watch: list[int] = []

    def wants_stop() -> bool:
        watch.append(1)
        return len(watch) > 20

    seen, engine = drive(
        policy, num_samples=100_003, batch_size=8, step_ms=steady([1, 2.5], 8), ranks=2, wants_stop=wants_stop
    )
    assert 0 < engine.reached < 100_003
    assert seen.uses() == Counter(range(engine.reached))


@pytest.mark.parametrize("policy", POLICIES)
def test_batches_are_announced_in_the_order_they_come(policy: str) -> None:
    watch, _ = drive(policy, num_samples=1009, batch_size=8, step_ms=steady([1, 2.5], 8), ranks=2)
    for rank in range(2):
        assert [batch for owner, batch in watch.batches if owner == rank] == watch.expected[rank]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_position_of_the_world_never_goes_backwards(policy: str) -> None:
    watch, _ = drive(policy, num_samples=4099, batch_size=8, step_ms=steady([1, 2.5, 4], 8), ranks=3)
    for positions in watch.positions.values():
        assert positions == sorted(positions)
        assert positions[-1] <= 4099


@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
def test_a_solo_sees_its_own_samples_as_the_position_of_the_world(policy: str) -> None:
    watch, _ = drive(policy, num_samples=100, batch_size=8, step_ms=steady([1], 8), ranks=1)
    assert watch.positions[0] == list(range(0, 100, 8))


def test_async_never_waits_where_speeds_are_steady_and_averages_short() -> None:
    _, engine = drive("async", num_samples=50_000, batch_size=8, step_ms=steady([1, 2.5], 8), ranks=2)
    waited = sum(clock.wait_ms for clock in engine.clocks)
    assert waited < 0.005 * sum(clock.now_ms for clock in engine.clocks)


def test_sync_makes_the_fast_rank_wait() -> None:
    _, engine = drive("sync", num_samples=8_000, batch_size=8, step_ms=steady([1, 2.5], 8), ranks=2, average_ms=0)
    assert engine.clocks[0].wait_ms / engine.clocks[0].now_ms == pytest.approx(0.6, abs=0.01)


def test_cadence_gives_the_slow_rank_its_share() -> None:
    _, engine = drive("cadence", num_samples=50_000, batch_size=8, step_ms=steady([1, 2.5], 8), ranks=2)
    assert engine.clocks[1].samples / 50_000 == pytest.approx(1 / 3.5, abs=0.02)


def test_async_takes_in_each_average_before_the_next_snapshot() -> None:
    pending = Counter[int]()
    most = 0

    def see(rank: int, now: float, effect: Effect) -> None:
        nonlocal most
        if type(effect).__name__ == "Begin":
            pending[rank] += 1
        if isinstance(effect, Collect):
            pending[rank] -= 1
        most = max(most, *pending.values(), 0)

    # Averages that take longer than a window: every one has to be waited for.
    config = PlannerConfig(world_size=2, batch_size=8, is_blocking=False, anchor=2)
    policies = [
        open_policy(
            "async", Seat(rank, 2, 8), Lease(0, 4000), planner=Planner(config),
            splitter=Splitter(world_size=2), max_overshoot=1,
        )
        for rank in range(2)
    ]  # fmt: skip
    Clockwork(
        policies,
        costs=Costs(step_ms=steady([1, 2], 8), average_ms=500.0, gradient_ms=0.0),
        ledger=Ledger(0, 4000),
        batch_size=8,
        on_effect=see,
    ).run()
    assert most == 1


def test_overshoot_fills_the_time_of_a_late_average() -> None:
    def waits(max_overshoot: int) -> float:
        config = PlannerConfig(world_size=2, batch_size=8, is_blocking=False, anchor=4)
        policies = [
            open_policy(
                "async", Seat(rank, 2, 8), Lease(0, 8000), planner=Planner(config),
                splitter=Splitter(world_size=2), max_overshoot=max_overshoot,
            )
            for rank in range(2)
        ]  # fmt: skip
        engine = Clockwork(
            policies,
            costs=Costs(step_ms=steady([1, 1], 8), average_ms=8.0, gradient_ms=0.0),
            ledger=Ledger(0, 8000),
            batch_size=8,
        )
        engine.run()
        return sum(clock.wait_ms for clock in engine.clocks)

    assert waits(8) < 0.2 * waits(0)
