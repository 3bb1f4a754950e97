"""Every policy, driven by clocks alone: coverage of samples, agreement of ranks, ends and stops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.policy.batch_splitter import Splitter
from outrider.policy.effects import AverageReport, Batch, Collect, Effect, Expect, Lease, Merge, Seat, SharedStep, Step
from outrider.policy.ledger import Ledger
from outrider.policy.policies import POLICIES, open_policy
from outrider.policy.policy_chooser import PolicyChooser
from outrider.policy.remaining import Remaining
from outrider.policy.window_planner import PlannerConfig, WindowPlanner
from outrider.virtual.virtual_clock import Costs, RankClock, VirtualClock

TRAINING = ("sync", "balanced", "cadence", "async")


class Watch:
    """Remembers what the policies asked for."""

    def __init__(self) -> None:
        self.remaining = Remaining.whole(0)
        self.used = Counter[int]()
        self.batches: list[tuple[int, Batch]] = []
        self.expected: dict[int, list[Batch]] = {}
        self.positions: dict[int, list[int]] = {}
        self.reports: list[AverageReport] = []
        self.merges = 0

    def effect(self, rank: int, now: float, effect: Effect) -> None:
        if isinstance(effect, (Step, SharedStep)):
            self.batches.append((rank, effect.batch))
            for piece in self.remaining.after([Lease(effect.batch.start, effect.batch.count)]).pieces:
                self.used.update(range(piece.start, piece.stop))
            self.positions.setdefault(rank, []).append(effect.at)
        self.merges += isinstance(effect, Merge)
        if isinstance(effect, Expect):
            self.expected.setdefault(rank, []).extend(effect.batches)

    def report(self, now: float, report: AverageReport) -> None:
        self.reports.append(report)

    def uses(self) -> Counter[int]:
        return self.used

    def end_segment(self, left: Sequence[Lease]) -> None:
        """What was announced and left is announced again."""
        for rank, expected in self.expected.items():
            del expected[sum(owner == rank for owner, _ in self.batches) :]
        self.remaining = self.remaining.after(left)


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
) -> tuple[Watch, VirtualClock]:
    watch = Watch()
    watch.remaining = Remaining([Lease(start, num_samples - start)], end=num_samples)
    config = PlannerConfig(world_size=ranks, batch_size=batch_size, is_blocking=policy == "cadence")
    planners = [WindowPlanner(config) for _ in range(ranks)]
    splitters = [Splitter(world_size=ranks, may_rest=True) for _ in range(ranks)]
    choosers = [PolicyChooser(world_size=ranks) for _ in range(ranks)]
    clocks, windows = [RankClock() for _ in range(ranks)], 0
    while True:
        span = Lease(watch.remaining.position, watch.remaining.count)
        policies = [
            open_policy(
                policy,
                Seat(rank, ranks, batch_size),
                span,
                planner=planners[rank],
                splitter=splitters[rank],
                max_overshoot=4,
                chooser=choosers[rank],
            )
            for rank in range(ranks)
        ]
        engine = VirtualClock(
            policies,
            costs=Costs(step_ms=step_ms, average_ms=average_ms, gradient_ms=average_ms),
            ledger=Ledger(span.start, span.stop),
            batch_size=batch_size,
            clocks=clocks,
            windows_before=windows,
            on_effect=watch.effect,
            on_report=watch.report,
            wants_stop=wants_stop,
        )
        engine.run()
        windows = engine.windows
        watch.end_segment(engine.left)
        if not watch.remaining.count:
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
@given(
    num_samples=st.one_of(st.integers(2, 300), PRIMES),
    batch_size=st.sampled_from([2, 3, 8, 16, 17]),
    paces=st.lists(st.floats(1.0, 20.0), min_size=1, max_size=4),
    start=st.sampled_from([0, 1, 48]),
)
@settings(max_examples=60, deadline=None)
def test_no_batch_has_a_single_sample(
    policy: str, num_samples: int, batch_size: int, paces: list[float], start: int
) -> None:
    watch, _ = drive(
        policy,
        num_samples=start + num_samples,
        batch_size=batch_size,
        step_ms=steady(paces, batch_size),
        ranks=len(paces),
        start=start,
    )
    assert watch.uses() == Counter(range(start, start + num_samples))
    assert 1 not in {batch.count for _, batch in watch.batches}


@pytest.mark.parametrize("policy", ["cadence", "async", "independent"])
def test_a_single_sample_makes_the_batch_before_it_one_larger(policy: str) -> None:
    watch, _ = drive(policy, num_samples=97, batch_size=16, step_ms=steady([1.0], 16), ranks=1)
    assert [batch.count for _, batch in watch.batches] == [16, 16, 16, 16, 16, 17]


def test_batches_of_one_sample_stay_where_they_were_asked_for() -> None:
    watch, _ = drive("sync", num_samples=5, batch_size=1, step_ms=steady([1.0, 1.0], 1), ranks=2)
    assert [batch.count for rank, batch in watch.batches if rank == 0] == [1, 1, 1]


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
        return asked["times"] > 16

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


def asked_after(times: int) -> Callable[[], bool]:
    asked: list[int] = []

    def wants_stop() -> bool:
        asked.append(1)
        return len(asked) > times

    return wants_stop


@pytest.mark.parametrize("policy", sorted(set(TRAINING) - {"async"}))
def test_a_stop_ends_all_ranks_and_what_was_done_is_a_whole_prefix(policy: str) -> None:
    seen, engine = drive(
        policy, num_samples=100_003, batch_size=8, step_ms=steady([1, 2.5], 8), ranks=2, wants_stop=asked_after(20)
    )
    assert 0 < engine.reached < 100_003
    assert seen.uses() == Counter(range(engine.reached))


@given(paces=st.lists(st.floats(1.0, 20.0), min_size=1, max_size=5), times=st.integers(0, 60))
@settings(max_examples=40, deadline=None)
def test_a_stop_of_async_gives_back_what_was_leased_and_not_done(paces: list[float], times: int) -> None:
    seen, engine = drive(
        "async",
        num_samples=20_011,
        batch_size=8,
        step_ms=steady(paces, 8),
        ranks=len(paces),
        wants_stop=asked_after(times),
    )
    left = Counter(position for piece in engine.ledger.free for position in range(piece.start, piece.stop))
    assert seen.uses() + left == Counter(range(20_011))
    assert engine.reached == seen.uses().total()


def test_async_stops_within_two_windows_of_the_wish() -> None:
    seen, _ = drive(
        "async",
        num_samples=1_000_003,
        batch_size=8,
        step_ms=steady([1, 2.5], 8),
        ranks=2,
        wants_stop=asked_after(20),
    )
    assert len(seen.reports) <= 10 + 4


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
            "async", Seat(rank, 2, 8), Lease(0, 4000), planner=WindowPlanner(config),
            splitter=Splitter(world_size=2), max_overshoot=1,
        )
        for rank in range(2)
    ]  # fmt: skip
    VirtualClock(
        policies,
        costs=Costs(step_ms=steady([1, 2], 8), average_ms=500.0, gradient_ms=0.0),
        ledger=Ledger(0, 4000),
        batch_size=8,
        on_effect=see,
    ).run()
    assert most == 1


@pytest.mark.parametrize("policy", ["async", "cadence"])
@pytest.mark.parametrize("num_samples", [1_000, 4_099, 20_011])
@pytest.mark.parametrize("average_ms", [0.3, 3.0])
def test_one_average_ends_an_epoch_and_all_before_it_are_taken_in_on_the_way(
    policy: str, num_samples: int, average_ms: float
) -> None:
    _, engine = drive(
        policy,
        num_samples=num_samples,
        batch_size=8,
        step_ms=steady([1, 2.5], 8),
        ranks=2,
        average_ms=average_ms,
    )
    last_step_ms = max(clock.last_step_ms for clock in engine.clocks)
    end_ms = max(clock.now_ms for clock in engine.clocks)
    assert 1.0 <= (end_ms - last_step_ms) / average_ms + 1e-6 < 1.5


def test_async_gives_an_epoch_that_is_shorter_than_its_window_one_average() -> None:
    watch, _ = drive("async", num_samples=41, batch_size=8, step_ms=steady([1, 1], 8), ranks=2, average_ms=0.3)
    assert [report.samples for report in watch.reports] == [41]


def test_overshoot_fills_the_time_of_a_late_average() -> None:
    def waits(max_overshoot: int) -> float:
        config = PlannerConfig(world_size=2, batch_size=8, is_blocking=False, anchor=4)
        policies = [
            open_policy(
                "async", Seat(rank, 2, 8), Lease(0, 8000), planner=WindowPlanner(config),
                splitter=Splitter(world_size=2), max_overshoot=max_overshoot,
            )
            for rank in range(2)
        ]  # fmt: skip
        engine = VirtualClock(
            policies,
            costs=Costs(step_ms=steady([1, 1], 8), average_ms=8.0, gradient_ms=0.0),
            ledger=Ledger(0, 8000),
            batch_size=8,
        )
        engine.run()
        return sum(clock.wait_ms for clock in engine.clocks)

    assert waits(8) < 0.2 * waits(0)
