from __future__ import annotations

import itertools
import json
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import ConfigError
from outrider.policy.batch_splitter import Split, Splitter, even, minimise_slowest, without_singles
from outrider.policy.effects import AverageReport, Batch, Decision, RankFacts
from outrider.policy.step_cost import TimeModel, slowest_ms

unhurried = settings(deadline=None)
models = st.builds(
    TimeModel,
    fixed_ms=st.sampled_from([0.0, 0.5, 3.0, 10.0]) | st.floats(0.0, 20.0),
    per_sample_ms=st.sampled_from([0.1, 1.0, 2.5]) | st.floats(0.05, 5.0),
)
worlds = st.lists(models, min_size=1, max_size=3)

# (fixed ms, ms per sample) of each rank
Truth = Sequence[tuple[float, float]]


def report_of(samples: Sequence[int], times_ms: Sequence[float]) -> AverageReport:
    ranks = tuple(
        RankFacts(samples=count, batches=1, compute_ms=ms, exposed_ms=0.0)
        for count, ms in zip(samples, times_ms, strict=True)
    )
    return AverageReport(window=0, ranks=ranks)


def run(splitter: Splitter, steps: int, truth: Truth, *, total: int = 128) -> list[Decision]:
    decisions: list[Decision] = []
    for _ in range(steps):
        samples = splitter.next(total).samples
        times_ms = [fixed + count * each for count, (fixed, each) in zip(samples, truth, strict=True)]
        decisions += splitter.learn(report_of(samples, times_ms))
    return decisions


def run_captured(splitter: Splitter, steps: int, truth: Truth, *, total: int = 128, lag: int = 3) -> set[int]:
    """As on a GPU: reports come late, and twice a rank takes long for a shape; the shapes that rank 0 met."""
    sights: Counter[tuple[int, int]] = Counter()
    under_way: deque[AverageReport] = deque()
    for _ in range(steps):
        facts = []
        for rank, (count, (fixed, each)) in enumerate(zip(splitter.next(total).samples, truth, strict=True)):
            sights[rank, count] += 1
            ms, is_steady = fixed + count * each, sights[rank, count] > 2
            times = {"compute_ms": ms} if is_steady else {"compute_ms": 0.0, "setup_ms": 50.0 + ms}
            facts.append(RankFacts(samples=count, batches=1, exposed_ms=0.0, **times))
        under_way.append(AverageReport(window=0, ranks=tuple(facts)))
        if len(under_way) > lag:
            splitter.learn(under_way.popleft())
    return {count for rank, count in sights if rank == 0}


def best_by_trying_all(world: Sequence[TimeModel], total: int, caps: Sequence[int | None]) -> float:
    choices = [range((total if cap is None else min(cap, total)) + 1) for cap in caps]
    return min(slowest_ms(world, counts) for counts in itertools.product(*choices) if sum(counts) == total)


# The optimum.


@unhurried
@given(worlds, st.integers(0, 12))
def test_the_split_is_as_good_as_the_best_of_all_splits(world: list[TimeModel], total: int) -> None:
    samples = minimise_slowest(world, total, [None] * len(world))
    assert sum(samples) == total
    assert slowest_ms(world, samples) == best_by_trying_all(world, total, [None] * len(world))


@unhurried
@given(st.lists(st.tuples(models, st.none() | st.integers(0, 12)), min_size=1, max_size=3), st.integers(0, 12))
def test_with_caps_the_split_is_as_good_as_the_best_of_all_splits(
    world: list[tuple[TimeModel, int | None]], total: int
) -> None:
    costs, caps = [model for model, _ in world], [*[cap for _, cap in world], None]
    costs.append(TimeModel(50.0, 5.0))
    samples = minimise_slowest(costs, total, caps)
    assert sum(samples) == total
    assert all(cap is None or count <= cap for count, cap in zip(samples, caps, strict=True))
    assert slowest_ms(costs, samples) == best_by_trying_all(costs, total, caps)


@unhurried
@given(st.lists(models, min_size=2, max_size=8), st.integers(1_000, 20_000))
def test_in_large_batches_moving_one_sample_gains_nothing(world: list[TimeModel], total: int) -> None:
    samples = minimise_slowest(world, total)
    slowest = slowest_ms(world, samples)
    assert sum(samples) == total
    assert all(
        model.fixed_ms + model.per_sample_ms * (count + 1) >= slowest
        for model, count in zip(world, samples, strict=True)
    )


def test_a_rank_whose_fixed_cost_exceeds_the_others_time_is_left_out() -> None:
    assert minimise_slowest([TimeModel(0.0, 1.0), TimeModel(100.0, 1.0)], 64) == (64, 0)


def test_caps_that_cannot_hold_the_batch_are_an_error() -> None:
    with pytest.raises(ConfigError) as caught:
        minimise_slowest([TimeModel(0.0, 1.0)] * 2, 128, (64, 32))
    assert caught.value.message == "a batch of 128 samples does not fit: the ranks can hold 96 (caps 64, 32)"
    assert caught.value.hint == "lower batch_size, raise the caps or add a device"


def test_even_parts_give_the_remainder_to_the_first_ranks() -> None:
    assert even(11, 4) == (3, 3, 3, 2)


@unhurried
@given(st.integers(0, 10_000), st.integers(1, 100))
def test_even_parts_are_whole_and_differ_by_at_most_one(total: int, ranks: int) -> None:
    parts = even(total, ranks)
    assert (sum(parts), len(parts)) == (total, ranks)
    assert max(parts) - min(parts) <= 1


def test_positions_are_dealt_in_rank_order() -> None:
    split = Split(samples=(100, 0, 28), reason="")
    assert [split.batch(rank, 1000) for rank in range(3)] == [Batch(1000, 100), Batch(1100, 0), Batch(1100, 28)]
    assert split.total == 128


# The splitter.


def test_the_first_split_is_even() -> None:
    assert Splitter(world_size=3).next(10) == Split(samples=(4, 3, 3), reason="even: nothing measured yet")


def test_the_first_split_follows_speed_hints() -> None:
    split = Splitter(world_size=2, speed_hints=(3, 1)).next(128)
    assert split == Split(samples=(96, 32), reason="speed_hints as given")


def test_the_first_split_follows_measured_speeds_where_nothing_was_given() -> None:
    splitter = Splitter(world_size=2)
    assert splitter.needs_hints
    splitter.hint((1.0, 0.25))
    split = splitter.next(128)
    assert (split.samples, split.reason) == ((103, 25), "by a short measurement of the devices: 1.00, 0.25")


@pytest.mark.parametrize("options", [{"shares": (3, 1)}, {"speed_hints": (3, 1)}])
def test_nothing_is_measured_where_the_user_has_said_it(options: dict[str, Any]) -> None:
    assert not Splitter(world_size=2, **options).needs_hints
    assert not Splitter(world_size=1).needs_hints


def test_shares_are_kept_whatever_the_times() -> None:
    splitter = Splitter(world_size=2, shares=(0.75, 0.25))
    assert run(splitter, 50, [(0.0, 1.0), (0.0, 1.0)]) == []
    assert splitter.next(128) == Split(samples=(96, 32), reason="shares as given")


def test_the_first_step_is_warm_up_and_teaches_nothing() -> None:
    splitter = Splitter(world_size=2)
    splitter.next(128)
    splitter.learn(report_of((64, 64), (9_000.0, 10.0)))
    assert splitter.next(128).samples == (64, 64)


def test_sizes_are_varied_for_four_steps() -> None:
    splitter = Splitter(world_size=2)
    run(splitter, 2, [(0.0, 1.0), (0.0, 1.0)])
    seen = []
    for _ in range(5):
        seen.append(splitter.next(128).samples)
        run(splitter, 1, [(0.0, 1.0), (0.0, 1.0)])
    assert seen == [(48, 80), (80, 48), (48, 80), (80, 48), (64, 64)]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_two_splits_are_tried_in_turn_and_tell_enough(ranks: int) -> None:
    chance, losses = random.Random(1), []
    for _ in range(200):
        truth = [(chance.uniform(0.2, 3.0), chance.uniform(0.02, 0.2)) for _ in range(ranks)]
        splitter, tried = Splitter(world_size=ranks), []
        run(splitter, 2, truth)
        for _ in range(4):
            tried.append(splitter.next(128).samples)
            run(splitter, 1, truth)
        assert tried[2:] == tried[:2]
        world = [TimeModel(fixed_ms=fixed, per_sample_ms=each) for fixed, each in truth]
        losses.append(
            slowest_ms(world, splitter.next(128).samples) / slowest_ms(world, minimise_slowest(world, 128)) - 1
        )
    assert sum(losses) / len(losses) < 0.004


def test_the_short_batch_at_the_end_of_an_epoch_leaves_what_is_tried_as_it_was() -> None:
    splitter, truth = Splitter(world_size=2), [(10.0, 0.5), (0.0, 1.0)]
    run(splitter, 3, truth)
    tried = [splitter.next(128).samples]
    splitter.next(20)
    run(splitter, 1, truth)
    splitter.next(20)
    tried.append(splitter.next(128).samples)
    run(splitter, 1, truth)
    again = splitter.next(128).samples
    assert tried[0] != tried[1]
    assert again == tried[0]


def test_the_split_brings_all_ranks_to_the_same_time() -> None:
    splitter = Splitter(world_size=2)
    decisions = run(splitter, 7, [(10.0, 0.5), (0.0, 1.0)])
    assert splitter.next(128).samples == (79, 49)
    assert decisions == [
        Decision(
            "split",
            (79, 49),
            "slowest rank takes 49.50 ms by the fitted times",
            {"from": None, "to": (79, 49)},
        )
    ]


def test_nothing_is_decided_while_times_stay_the_same() -> None:
    splitter = Splitter(world_size=2)
    run(splitter, 10, [(10.0, 0.4), (0.0, 1.0)])
    assert run(splitter, 200, [(10.0, 0.4), (0.0, 1.0)]) == []


def test_a_gain_below_two_percent_is_not_worth_a_change() -> None:
    splitter = Splitter(world_size=2)
    run(splitter, 10, [(0.0, 1.0), (0.0, 1.0)])
    assert run(splitter, 200, [(0.0, 1.0), (0.0, 1.02)]) == []


def test_a_rank_that_slows_down_gets_less_within_three_steps() -> None:
    splitter = Splitter(world_size=2)
    run(splitter, 20, [(0.0, 1.0), (0.0, 1.0)])
    run(splitter, 3, [(0.0, 1.0), (0.0, 3.0)])
    assert splitter.next(128).samples == (96, 32)


def test_a_rank_that_slows_down_a_little_gets_less_after_a_while() -> None:
    splitter = Splitter(world_size=2)
    run(splitter, 20, [(0.0, 1.0), (0.0, 1.0)])
    run(splitter, 150, [(0.0, 1.0), (0.0, 1.3)])
    assert splitter.next(128).samples[1] in range(55, 58)


def test_one_hiccup_does_not_move_the_split() -> None:
    splitter = Splitter(world_size=2)
    run(splitter, 30, [(0.0, 1.0), (0.0, 1.0)])
    splitter.learn(report_of((64, 64), (640.0, 64.0)))
    assert run(splitter, 40, [(0.0, 1.0), (0.0, 1.0)]) == []


def test_a_smaller_batch_is_split_by_the_same_times() -> None:
    splitter = Splitter(world_size=2)
    run(splitter, 10, [(0.0, 1.0), (0.0, 3.0)])
    assert splitter.next(20) == Split(samples=(15, 5), reason="by the fitted times")


def test_a_smaller_batch_does_not_displace_the_usual_split() -> None:
    splitter = Splitter(world_size=2)
    run(splitter, 10, [(0.0, 1.0), (0.0, 3.0)])
    usual = splitter.next(128)
    splitter.next(20)
    assert splitter.next(128) is usual


def test_a_batch_that_is_one_larger_at_the_end_does_not_displace_the_usual_split() -> None:
    splitter = Splitter(world_size=2)
    usual = splitter.next(128)
    assert splitter.next(129, is_usual=False).total == 129
    assert splitter.next(128) is usual


def test_caps_bound_every_split() -> None:
    splitter = Splitter(world_size=2, caps=(70, None))
    seen = []
    for _ in range(40):
        seen.append(splitter.next(128).samples[0])
        run(splitter, 1, [(0.0, 1.0), (0.0, 3.0)])
    assert max(seen) == 70


def test_a_rank_that_was_left_out_is_tried_again() -> None:
    splitter = Splitter(world_size=2)
    run(splitter, 20, [(0.0, 1.0), (500.0, 1.0)])
    left_out = splitter.next(128).samples
    run(splitter, 600, [(0.0, 1.0), (0.0, 1.0)])
    assert left_out == (128, 0)
    assert splitter.next(128).samples[1] >= 60


def test_one_rank_has_it_all() -> None:
    splitter = Splitter(world_size=1)
    assert run(splitter, 40, [(1.0, 1.0)]) == []
    assert splitter.next(128).samples == (128,)


def test_steps_without_a_measured_time_teach_nothing() -> None:
    splitter = Splitter(world_size=2)
    for _ in range(40):
        assert splitter.learn(report_of(splitter.next(128).samples, (0.0, 0.0))) == []
    assert splitter.next(128).samples == (64, 64)


def test_shares_of_a_rank_follow_the_split() -> None:
    splitter = Splitter(world_size=2)
    before = splitter.share(0)
    run(splitter, 10, [(0.0, 1.0), (0.0, 3.0)])
    assert (before, splitter.share(0)) == (0.5, 0.75)


@unhurried
@given(
    total=st.integers(1, 300),
    truth=st.lists(st.tuples(st.floats(0.0, 20.0), st.floats(0.05, 5.0)), min_size=1, max_size=5),
)
def test_every_split_covers_the_batch(total: int, truth: list[tuple[float, float]]) -> None:
    splitter = Splitter(world_size=len(truth))
    for _ in range(24):
        split = splitter.next(total)
        assert split.total == total
        assert min(split.samples) >= 0
        run(splitter, 1, truth, total=total)


def test_a_restored_splitter_goes_on_as_the_saved_one() -> None:
    splitter = Splitter(world_size=2)
    run(splitter, 25, [(10.0, 0.4), (0.0, 1.0)])
    restored = Splitter(world_size=2)
    restored.restore(json.loads(json.dumps(splitter.state())))
    assert restored.next(128) == splitter.next(128)
    assert restored.state() == splitter.state()


def refused(make: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[str, str | None]:
    with pytest.raises(ConfigError) as caught:
        make(*arguments, **options)
    return caught.value.message, caught.value.hint


def test_the_state_of_another_world_is_refused() -> None:
    assert refused(Splitter(world_size=2).restore, Splitter(world_size=3).state()) == (
        "the saved splitter has 3 ranks, got world_size=2",
        "resume with the same number of devices",
    )


def test_caps_for_another_world_are_refused() -> None:
    assert refused(Splitter, world_size=3, caps=(64, None)) == (
        "caps must be one number >= 0 or none per rank, got 64, none for world_size=3",
        "leave caps out where memory does not bind",
    )


@given(samples=st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_no_rank_is_left_with_a_single_sample_of_several(samples: list[int]) -> None:
    parts = without_singles(samples)
    assert sum(parts) == sum(samples)
    assert 1 not in parts or sum(samples) == 1


def test_what_is_learned_leaves_no_rank_with_a_single_sample() -> None:
    splitter = Splitter(world_size=2)
    # The best would be 31 and 1: the second rank takes as long for one sample as the first for almost all.
    run(splitter, 40, [(0.0, 1.0), (30.0, 1.0)], total=32)
    assert splitter.next(32).samples == (32, 0)


def test_a_single_sample_stays_where_no_other_rank_has_room() -> None:
    assert without_singles((1, 4), caps=(None, 4)) == (1, 4)


def test_steps_in_which_a_new_shape_is_captured_tell_nothing_of_speed() -> None:
    splitter, truth = Splitter(world_size=2), ((1.0, 0.01), (2.0, 0.05))
    shapes = run_captured(splitter, 64, truth)
    best = minimise_slowest([TimeModel(fixed_ms=fixed, per_sample_ms=each) for fixed, each in truth], 128)
    assert splitter.next(128).samples == best
    # The even split, two that vary around the best known, and the best.
    assert len(shapes) <= 4


def test_every_split_that_is_tried_waits_for_a_steady_step() -> None:
    splitter, truth = Splitter(world_size=2), ((1.0, 0.01), (2.0, 0.05))
    shapes = run_captured(splitter, 3 * 3 + 2, truth, lag=0)
    world = [TimeModel(fixed_ms=fixed, per_sample_ms=each) for fixed, each in truth]
    # Two steps to capture each of three splits and one to measure it, then the two that vary once more: the fit knows
    # fixed from per-sample cost.
    assert len(shapes) == 3
    assert slowest_ms(world, splitter.next(128).samples) < 1.1 * slowest_ms(world, minimise_slowest(world, 128))


# Beside much slower ranks


def hinted(*speeds: float, **options: Any) -> Splitter:
    splitter = Splitter(world_size=len(speeds), **{"may_rest": True, **options})
    splitter.hint(speeds)
    return splitter


@pytest.mark.parametrize(("speeds", "lone"), [((1.0, 0.1), 0), ((0.1, 0.1, 1.0), 2), ((1.0, 0.4), None)])
def test_the_fastest_rank_begins_alone_where_the_others_can_bring_little(
    speeds: tuple[float, ...], lone: int | None
) -> None:
    splitter = hinted(*speeds)
    decisions = splitter.begin(128, left=128 * 300)
    assert splitter.lone == lone
    assert [(one.kind, one.value) for one in decisions] == ([] if lone is None else [("alone", lone)])
    assert splitter.begin(128, left=128 * 300) == []


@pytest.mark.parametrize(
    ("options", "left"),
    [({"may_rest": False}, 1_000), ({"shares_first": True}, 1_000), ({"shares": (3.0, 1.0)}, 1_000), ({}, None)],
)
def test_all_share_from_the_start_where_nobody_may_rest_or_the_length_is_not_known(
    options: dict[str, Any], left: int | None
) -> None:
    splitter = hinted(1.0, 0.1, **options)
    assert splitter.begin(8, left=left) == []
    assert splitter.lone is None


def test_a_rank_that_gains_from_the_cores_of_others_begins_alone() -> None:
    splitter = Splitter(world_size=2, may_rest=True)
    splitter.hint((1.0, 0.5))
    splitter.expect_gains((1.4, 1.4))
    [decision] = splitter.begin(128, left=128 * 100)
    assert (decision.value, decision.reason) == (
        0,
        "the others together add 0.071 to the speed of rank 0 with all cores, which begins alone",
    )
    assert splitter.unshared_reason == (
        "rank 0 works alone: the run is too short to try the others, which together add 0.071 to its speed with all "
        "cores"
    )
    restored = Splitter(world_size=2, may_rest=True)
    restored.restore(splitter.state())
    assert restored.state() == splitter.state()


def test_measured_alone_a_rank_counts_without_its_gain_beside_others() -> None:
    splitter = Splitter(world_size=2, may_rest=True)
    splitter.hint((1.0, 0.5))
    splitter.expect_gains((1.5, 1.5))
    while splitter.lone is None:
        parts = splitter.next(100).samples
        costs = zip(parts, (0.1, 1.0), strict=True)
        facts = [RankFacts(samples=n, batches=1, compute_ms=ms * n, exposed_ms=20.0) for n, ms in costs]
        splitter.learn(AverageReport(window=0, ranks=tuple(facts)))
    worked = RankFacts(samples=6400, batches=64, compute_ms=640.0, exposed_ms=0.0)
    rested = RankFacts(samples=0, batches=0, compute_ms=0.0, exposed_ms=0.0)
    for _ in range(2):
        splitter.learn_alone(AverageReport(window=0, ranks=(worked, rested)), left=2_000)
    assert splitter.lone == 0
    assert splitter.rates_alone is not None
    assert splitter.own_rates is not None
    assert splitter.exact_rate == pytest.approx(10.0)
    assert (splitter.own_rates[0], splitter.rates_alone[0]) == (pytest.approx(10.0 / 1.5), pytest.approx(10.0))


def test_beside_the_fastest_no_rank_counts_as_faster_alone_than_by_the_short_measurement() -> None:
    """The fit of few steps says that rank 1 is twice as fast."""
    rates = {}
    for hints in (None, (1.0, 0.5)):
        splitter = Splitter(world_size=2, may_rest=True)
        if hints is not None:
            splitter.hint(hints)
        for _ in range(12):
            parts = splitter.next(100).samples
            costs = zip(parts, (0.2, 0.1), strict=True)
            facts = [RankFacts(samples=n, batches=1, compute_ms=ms * n, exposed_ms=0.1) for n, ms in costs]
            splitter.learn(AverageReport(window=0, ranks=tuple(facts)))
        rates[hints] = splitter.rates_alone
    assert rates[None] == pytest.approx((5.0, 10.0), rel=0.01)
    assert rates[1.0, 0.5] == pytest.approx((5.0, 2.5), rel=0.01)


def test_what_was_measured_often_counts_more_than_the_short_measurement() -> None:
    """A GPU that waits for its host is slower at small batches than a CPU, whatever products of matrices say."""
    splitter = Splitter(world_size=2, may_rest=True)
    splitter.hint((1.0, 0.06))
    for _ in range(40):
        parts = splitter.next(100).samples
        costs = zip(parts, (0.2, 0.1), strict=True)
        facts = [RankFacts(samples=n, batches=1, compute_ms=ms * n, exposed_ms=0.1) for n, ms in costs]
        splitter.learn(AverageReport(window=0, ranks=tuple(facts)))
        if splitter.lone is not None:
            break
    assert splitter.rates_alone == pytest.approx((5.0, 10.0), rel=0.05)


def test_a_run_too_short_to_try_the_others_says_so() -> None:
    splitter = hinted(1.0, 0.1)
    splitter.begin(128, left=128 * 300)
    assert splitter.unshared_reason == (
        "rank 0 works alone: the run is too short to try the others, which together have 0.1 of its speed"
    )
    long = hinted(1.0, 0.1)
    long.begin(128, left=128 * 100_000)
    assert (long.lone, long.unshared_reason) == (0, None)


def test_the_first_step_that_all_share_is_a_warm_up_also_after_one_began_alone() -> None:
    splitter, left = hinted(1.0, 0.2), 128 * 100_000
    splitter.begin(128, left=left)
    rested = RankFacts(samples=0, batches=0, compute_ms=0.0, exposed_ms=0.0)
    while splitter.lone is not None:
        worked = RankFacts(samples=16 * 128, batches=16, compute_ms=16 * 13.0, exposed_ms=0.0)
        splitter.learn_alone(AverageReport(window=0, ranks=(worked, rested)), left=left)
    truth = [(0.0, 0.1), (0.0, 0.5)]
    samples = splitter.next(128).samples
    splitter.learn(report_of(samples, [500.0, 5_000.0]))
    run(splitter, 40, truth)
    assert splitter.next(128).samples == (107, 21)
