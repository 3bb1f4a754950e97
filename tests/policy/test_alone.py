"""When one rank works alone: told by times that are made up here, learned by the real splitter."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from outrider.policy.alone import (
    CLEAR_SHARED_STEPS,
    FIRST_STRETCH,
    LEAST_TRIAL_PART,
    SHARED_STEPS,
    STRETCH_MAX,
    STRETCH_MIN,
    TRIAL_PART,
    TRIAL_STEPS,
    Alone,
)
from outrider.policy.batch_splitter import Splitter
from outrider.policy.effects import AverageReport, RankFacts
from outrider.policy.step_cost import GivenCost
from outrider.policy.whole_batches import WholeBatches
from outrider.virtual.simulator import DeviceSpeed, MeasuredCosts, Network, Scenario, simulate

FAST, SLOW = GivenCost(0.0, 0.01), GivenCost(1.0, 0.05)
TOTAL = 100
"""Samples of a batch: 1 ms on the fast rank alone."""


def shared(*, ms: float, exposed_ms: float = 0.0) -> AverageReport:
    facts = RankFacts(samples=TOTAL // 2, batches=1, compute_ms=ms - exposed_ms, exposed_ms=exposed_ms)
    return AverageReport(window=0, ranks=(facts, facts))


def stretch(*, ms: float, batches: int = 64, exposed_ms: float = 0.0) -> AverageReport:
    worked = RankFacts(samples=batches * TOTAL, batches=batches, compute_ms=ms * batches, exposed_ms=exposed_ms)
    rested = RankFacts(samples=0, batches=0, compute_ms=0.0, exposed_ms=0.0)
    return AverageReport(window=0, ranks=(worked, rested))


def going_alone(*, shared_ms: float = 2.0, slow: GivenCost = SLOW) -> Alone:
    alone = Alone()
    while alone.rank is None:
        alone.shared(shared(ms=shared_ms), (FAST, slow), TOTAL)
    assert alone.rank == 0
    return alone


def test_a_rank_goes_on_alone_where_that_is_quicker_than_sharing() -> None:
    alone = Alone()
    reasons = [alone.shared(shared(ms=1.04, exposed_ms=0.5), (FAST, SLOW), TOTAL) for _ in range(SHARED_STEPS)]
    assert reasons == [None] * (SHARED_STEPS - 1) + [
        "a shared step takes 1.04 ms, rank 0 alone 1.00 ms by its fitted time"
    ]
    assert (alone.rank, alone.stretch) == (0, STRETCH_MIN)


def test_few_shared_steps_are_enough_where_alone_is_clearly_quicker() -> None:
    alone = Alone()
    reasons = [alone.shared(shared(ms=2.0), (FAST, SLOW), TOTAL) for _ in range(CLEAR_SHARED_STEPS)]
    assert [reason is None for reason in reasons] == [True] * (CLEAR_SHARED_STEPS - 1) + [False]


def test_the_quickest_rank_is_the_one() -> None:
    alone = Alone()
    for _ in range(SHARED_STEPS):
        alone.shared(shared(ms=2.0), (SLOW, FAST), TOTAL)
    assert alone.rank == 1


@pytest.mark.parametrize("shared_ms", [0.5, 0.8, 0.86])
def test_all_share_where_alone_is_clearly_slower(shared_ms: float) -> None:
    alone = Alone()
    for _ in range(10 * SHARED_STEPS):
        assert alone.shared(shared(ms=shared_ms), (FAST, SLOW), TOTAL) is None
    assert alone.rank is None


def test_one_hiccup_sends_nobody_to_rest() -> None:
    alone = Alone()
    for number in range(10 * SHARED_STEPS):
        alone.shared(shared(ms=100.0 if number == 3 else 0.8), (FAST, SLOW), TOTAL)
    assert alone.rank is None


@pytest.mark.parametrize(("alone_ms", "stays"), [(0.94, True), (0.96, False)])
def test_where_the_two_are_close_alone_is_tried_and_measured(alone_ms: float, stays: bool) -> None:
    alone = going_alone(shared_ms=0.95)
    assert alone.stretch == STRETCH_MIN
    for _ in range(2):
        alone.alone(stretch(ms=alone_ms, batches=STRETCH_MIN))
    assert (alone.rank == 0) == stays


def test_the_first_stretch_carries_the_warm_up() -> None:
    alone = going_alone(shared_ms=2.0)
    assert alone.alone(stretch(ms=50.0)) is None
    assert alone.alone(stretch(ms=1.5)) is None
    assert alone.rank == 0


def test_steps_are_shared_again_where_alone_turns_out_slower() -> None:
    alone = going_alone(shared_ms=2.0)
    alone.alone(stretch(ms=1.0))
    assert alone.alone(stretch(ms=2.5)) == "rank 0 alone takes 2.50 ms, a shared step 2.00 ms"
    assert alone.rank is None


def test_what_turned_out_slower_is_not_tried_again_soon() -> None:
    alone = going_alone(shared_ms=2.0)
    alone.alone(stretch(ms=1.0))
    alone.alone(stretch(ms=2.5))
    steps = 0
    while alone.rank is None:
        alone.shared(shared(ms=2.0), (FAST, SLOW), TOTAL)
        steps += 1
    assert steps == TRIAL_STEPS / TRIAL_PART


@pytest.mark.parametrize("shared_ms", [2.0, 20.0])
def test_the_ranks_that_rest_are_tried_again_at_a_hundredth_of_the_time(shared_ms: float) -> None:
    alone = going_alone(shared_ms=shared_ms)
    steps = 0
    while (reason := alone.alone(stretch(ms=1.0, batches=16))) is None:
        steps += 16
    assert reason == "the other ranks have rested for long, and are tried again"
    assert steps == pytest.approx(100 * TRIAL_STEPS * shared_ms, rel=0.01)


def test_what_was_measured_before_a_trial_of_sharing_is_not_counted_after_it() -> None:
    alone = going_alone(shared_ms=2.0)
    alone.alone(stretch(ms=1.0, batches=4_790))
    assert alone.alone(stretch(ms=100.0, batches=SHARED_STEPS - 1)) is not None
    while alone.rank is None:
        alone.shared(shared(ms=2.0), (FAST, SLOW), TOTAL)
    for _ in range(2):
        alone.alone(stretch(ms=1.0, batches=STRETCH_MIN))
    assert alone.rank == 0


@pytest.mark.parametrize(("steps_left", "steps"), [(None, STRETCH_MIN), (5_000, STRETCH_MIN), (400, 8), (40, 4)])
def test_a_trial_takes_little_of_a_short_run(steps_left: int | None, steps: int) -> None:
    alone = Alone()
    while alone.rank is None:
        alone.shared(shared(ms=2.0), (FAST, SLOW), TOTAL, steps_left=steps_left)
    assert alone.stretch == steps


@pytest.mark.parametrize(("steps_left", "ends"), [(40, True), (5_000, False)])
def test_a_trial_that_loses_too_much_of_the_run_is_not_completed(steps_left: int, ends: bool) -> None:
    alone = going_alone()
    for _ in range(2):
        alone.alone(stretch(ms=2.4, batches=4), steps_left=steps_left)
    assert (alone.rank is None) == ends


def test_short_stretches_are_judged_together() -> None:
    alone = going_alone(shared_ms=2.0)
    reasons = [alone.alone(stretch(ms=9.0, batches=3)) for _ in range(7)]
    # The first is warm-up; the next six have 18 steps, enough to judge.
    assert [reason is None for reason in reasons] == [True] * 6 + [False]


@pytest.mark.parametrize(("ms", "steps"), [(1.0, STRETCH_MAX), (5.0, 400), (500.0, STRETCH_MIN)])
def test_once_proven_a_stretch_lasts_about_two_seconds(ms: float, steps: int) -> None:
    alone = going_alone(shared_ms=5_000.0, slow=GivenCost(5_000.0, 0.0))
    for _ in range(2):
        alone.alone(stretch(ms=ms, batches=alone.stretch))
    assert alone.stretch == steps


@pytest.mark.parametrize(("exposed_ms", "stays"), [(900.0, True), (1_100.0, False)])
def test_handing_over_is_judged_by_stretches_as_long_as_they_will_be(exposed_ms: float, stays: bool) -> None:
    alone = going_alone(shared_ms=2.0)
    for _ in range(2):
        alone.alone(stretch(ms=1.0, batches=STRETCH_MIN, exposed_ms=exposed_ms))
    assert (alone.rank == 0) == stays


def test_a_stretch_with_an_unusual_batch_is_not_judged() -> None:
    alone = going_alone(shared_ms=2.0)
    alone.alone(stretch(ms=1.0))
    assert alone.alone(stretch(ms=50.0), is_usual=False) is None
    assert alone.rank == 0


@pytest.mark.parametrize("lost_ms", [10.0, 500.0])
def test_a_trial_of_sharing_that_cost_much_is_not_repeated_soon(lost_ms: float) -> None:
    alone = going_alone(shared_ms=2.0)
    alone.alone(stretch(ms=1.0, batches=4_800))
    assert alone.rank is None
    alone.forget()
    alone.spent(
        AverageReport(window=0, ranks=(RankFacts(samples=1, batches=1, compute_ms=0, exposed_ms=0, setup_ms=lost_ms),))
    )
    while alone.rank is None:
        step = shared(ms=2.0)
        alone.spent(step)
        alone.shared(step, (FAST, SLOW), TOTAL)
    steps = 0
    while alone.alone(stretch(ms=1.0, batches=16)) is None:
        steps += 16
    # Each of the few steps that were measured took a millisecond more than one alone; the second time the part is half.
    assert steps == pytest.approx(max(200 * TRIAL_STEPS * 2.0, 200 * (lost_ms - 1.0 + CLEAR_SHARED_STEPS)), rel=0.01)


def test_what_the_first_steps_of_all_cost_counts_as_well() -> None:
    alone = Alone()
    while alone.rank is None:
        step = shared(ms=20.0)
        # Exploring and capturing, beside those that are measured.
        for _ in range(10):
            alone.spent(step)
        alone.shared(step, (FAST, SLOW), TOTAL)
    steps = 0
    while alone.alone(stretch(ms=1.0, batches=16)) is None:
        steps += 16
    assert steps == pytest.approx(100 * 10 * CLEAR_SHARED_STEPS * (20.0 - 1.0), rel=0.01)


def test_trials_in_a_row_that_show_nothing_new_become_rarer() -> None:
    alone = going_alone(shared_ms=2.0)
    rests = []
    for _ in range(6):
        steps = 0
        while alone.alone(stretch(ms=1.0, batches=16)) is None:
            steps += 16
        rests.append(steps)
        while alone.rank is None:
            alone.shared(shared(ms=2.0), (FAST, SLOW), TOTAL)
    assert rests == pytest.approx([rests[0] * factor for factor in (1, 2, 4, 8, 10, 10)], rel=0.01)


def test_trials_go_on_in_the_longest_of_runs() -> None:
    alone = going_alone(shared_ms=2.0)
    for _ in range(1_100):
        alone.alone(stretch(ms=1.0, batches=1_000_000))
        while alone.rank is None:
            alone.shared(shared(ms=2.0), (FAST, SLOW), TOTAL)
    assert alone.state()["trial_part"] == LEAST_TRIAL_PART


def test_where_sharing_has_won_the_next_rest_is_tried_again_soon() -> None:
    alone = going_alone(shared_ms=2.0)
    alone.alone(stretch(ms=1.0, batches=4_800))
    for ms in (0.5, 2.0):
        alone.forget()
        for _ in range(2 * SHARED_STEPS):
            alone.shared(shared(ms=ms), (FAST, SLOW), TOTAL)
    assert alone.rank == 0
    assert alone.state()["left"] == pytest.approx(100 * TRIAL_STEPS * 2.0, rel=0.01)


def test_a_trial_in_which_sharing_proved_itself_is_over() -> None:
    alone = going_alone(shared_ms=2.0)
    alone.alone(stretch(ms=1.0, batches=4_800))
    alone.forget()
    for _ in range(SHARED_STEPS):
        alone.shared(shared(ms=0.5), (FAST, SLOW), TOTAL)
    alone.spent(shared(ms=5_000.0))
    assert alone.state()["spent"] is None


# Devices that hinder each other


def measured_alone(alone: Alone, *, steps_left: float | None) -> str | None:
    """Sixteen shared steps of 2 ms on ranks that would take 3 ms and 15 ms alone by their fitted times."""
    costs = (GivenCost(0.0, 0.03), GivenCost(0.0, 0.15))
    return [alone.shared(shared(ms=2.0), costs, TOTAL, steps_left=steps_left) for _ in range(SHARED_STEPS)][-1]


@pytest.mark.parametrize(("steps_left", "is_tried"), [(None, False), (4700, False), (4900, True)])
def test_alone_is_tried_once_against_the_fitted_time_where_that_is_little_of_the_run(
    steps_left: float | None, is_tried: bool
) -> None:
    assert (measured_alone(Alone(), steps_left=steps_left) is not None) == is_tried


def test_a_trial_that_the_fitted_time_speaks_against_is_not_repeated() -> None:
    alone = Alone()
    measured_alone(alone, steps_left=1e6)
    for _ in range(2):
        alone.alone(stretch(ms=3.0))
    assert alone.rank is None
    assert [measured_alone(alone, steps_left=1e6) for _ in range(200)] == [None] * 200


def parts(*times_ms: float) -> AverageReport:
    ranks = tuple(
        RankFacts(samples=TOTAL // 2, batches=1, compute_ms=ms, exposed_ms=10.0 + max(times_ms) - ms) for ms in times_ms
    )
    return AverageReport(window=0, ranks=ranks)


def told_at_first(*steps: AverageReport) -> int | None:
    alone = Alone()
    for step in steps:
        alone.bound(step)
        alone.shared_at_first(step)
    return alone.rank


def test_who_goes_alone_at_first_is_clearly_the_faster_one() -> None:
    assert told_at_first(*[parts(1.0, 1.3)] * 2) == 0
    assert told_at_first(*[parts(1.3, 1.0)] * 2) == 1
    assert told_at_first(*[parts(1.0, 1.2)] * 9) is None


def hasty(slow_ms: float = 2.5, *, steps_left: float | None) -> tuple[Alone, str | None]:
    """Two first shared steps of 12.5 ms, then 32 batches of 2 ms on the fast rank alone; its last reason."""
    alone = Alone()
    for _ in range(2):
        alone.bound(parts(1.0, slow_ms))
        alone.shared_at_first(parts(1.0, slow_ms), steps_left=steps_left)
    assert alone.rank == 0
    alone = saved(alone)
    alone.alone(stretch(ms=2.0, batches=STRETCH_MIN), steps_left=steps_left)
    return alone, alone.alone(stretch(ms=2.0, batches=STRETCH_MIN), steps_left=steps_left)


def saved(alone: Alone) -> Alone:
    again = Alone()
    again.restore(json.loads(json.dumps(alone.state())))
    return again


def test_sharing_is_tried_once_more_after_few_first_steps() -> None:
    """Three steps of 12.5 ms in place of 2 ms cost 15.75 of the latter, and a hundredth of the rest pays for that."""
    alone, reason = hasty(steps_left=1_600)
    assert reason == "rank 0 alone takes 2.00 ms; few shared steps were seen, so they are tried again"
    assert alone.rank is None
    alone.forget()
    alone = saved(alone)
    for _ in range(2):
        alone.bound(parts(1.0, 2.5))
        alone.shared_at_first(parts(1.0, 2.5), steps_left=1_600)
    assert alone.rank == 0
    assert [alone.alone(stretch(ms=2.0, batches=16), steps_left=1_600) for _ in range(20)] == [None] * 20


def test_sharing_is_not_tried_once_more_where_that_costs_much_of_the_run() -> None:
    alone, reason = hasty(steps_left=1_500)
    assert (alone.rank, reason) == (0, None)


def test_sharing_is_not_tried_once_more_with_a_rank_that_could_help_little() -> None:
    alone, reason = hasty(150.0, steps_left=1e6)
    assert (alone.rank, reason) == (0, None)


def test_hiccups_do_not_make_the_slower_rank_work_alone() -> None:
    assert told_at_first(parts(1.0, 2.5), *[parts(30.0, 2.5)] * 2) == 0


def test_a_rank_that_gains_from_the_cores_of_others_goes_alone_sooner() -> None:
    """Half of a batch in 1 ms is a whole one in 2 ms, and in 1.25 ms with the cores of the other rank."""
    alone = Alone()
    alone.gains = (1.6, 1.6)
    step = RankFacts(samples=TOTAL // 2, batches=1, compute_ms=1.0, exposed_ms=0.6)
    slower = replace(step, compute_ms=1.5, exposed_ms=0.1)
    for _ in range(2):
        alone.bound(report := AverageReport(window=0, ranks=(step, slower)))
        reason = alone.shared_at_first(report)
    assert (alone.rank, reason) == (0, "a shared step takes 1.60 ms, rank 0 alone about 1.25 ms")
    assert told_at_first(*[AverageReport(window=0, ranks=(step, slower))] * 9) is None


def test_the_fitted_time_of_a_rank_counts_its_gain() -> None:
    """The fast rank takes 1 ms alone, beside the other."""
    for gains, rank in (((), None), ((1.5, 1.5), 0)):
        alone = Alone()
        alone.gains = gains
        for _ in range(SHARED_STEPS):
            alone.shared(shared(ms=0.8), (FAST, SLOW), TOTAL)
        assert alone.rank == rank


def second_stretch(*, ms: float, batches: int = 64) -> AverageReport:
    return AverageReport(window=0, ranks=stretch(ms=ms, batches=batches).ranks[::-1])


def similar(first_ms: float, second_ms: float, *, steps_left: float | None = None) -> tuple[Alone, list[int | None]]:
    """Two ranks of which shared steps say that the second takes 10 % less; who works alone after each stretch."""
    alone = Alone()
    while alone.rank is None:
        alone.shared(shared(ms=12.0), (GivenCost(0.0, 0.05), GivenCost(0.0, 0.045)), TOTAL)
    ranks = [alone.rank]
    for _ in range(8):
        report = stretch(ms=first_ms) if alone.rank == 0 else second_stretch(ms=second_ms)
        alone.alone(report, steps_left=steps_left)
        ranks.append(alone.rank)
    return alone, ranks


def test_of_two_similar_ranks_the_one_stays_alone_that_takes_less_time() -> None:
    # The first stretch of each carries its warm-up.
    assert similar(5.0, 6.0)[1] == [1, 1, 0, 0, 0, 0, 0, 0, 0]
    assert similar(5.0, 4.5)[1] == [1, 1, 0, 0, 1, 1, 1, 1, 1]


def test_two_ranks_are_not_compared_where_the_run_is_nearly_over() -> None:
    assert set(similar(5.0, 5.5, steps_left=100)[1]) == {1}
    assert similar(5.0, 9.0, steps_left=100)[1][-1] == 0


@pytest.mark.parametrize(("slow_ms", "batches"), [(20.0, 8), (6.0, 20)])
def test_a_rank_that_is_expected_to_be_slower_is_given_up_after_few_batches(slow_ms: float, batches: int) -> None:
    """The first stretch is its warm-up; it is measured longer where it is close to the other one."""
    alone = Alone()
    while alone.rank is None:
        alone.shared(shared(ms=12.0), (GivenCost(0.0, 0.05), GivenCost(0.0, 0.09)), TOTAL)
    while alone.rank == 0:
        alone.alone(stretch(ms=5.0, batches=16))
    taken = 0
    while alone.rank == 1:
        taken += alone.stretch
        alone.alone(second_stretch(ms=slow_ms, batches=alone.stretch))
    assert taken == batches
    assert alone.rank == 0


def test_a_rank_that_slows_down_gives_way_to_the_one_it_was_compared_with() -> None:
    alone, _ = similar(5.0, 4.5)
    assert alone.alone(second_stretch(ms=5.2)) is None
    reason = alone.alone(second_stretch(ms=9.0))
    assert (alone.rank, reason) == (0, "rank 1 alone takes 9.00 ms, rank 0 alone 5.00 ms")


def test_the_comparison_outlives_a_checkpoint() -> None:
    alone, _ = similar(5.0, 4.5)
    restored = Alone()
    restored.restore(alone.state())
    assert restored.state() == alone.state()
    slow = second_stretch(ms=9.0)
    restored.alone(slow)
    restored.alone(slow)
    assert restored.rank == 0


def test_a_rank_is_expected_to_gain_by_working_alone_as_the_first_one_did() -> None:
    alone = Alone()
    # While both computed, each took twice as long as it takes alone.
    while alone.rank is None:
        alone.shared(shared(ms=12.0), (GivenCost(10.0, 0.0), GivenCost(7.0, 0.0)), TOTAL)
    for _ in range(2):
        alone.alone(second_stretch(ms=3.5), steps_left=3_000)
    assert alone.rank == 0


# In the splitter


def told(splitter: Splitter, *, steps: int, exposed_ms: float, setup_ms: float = 0.0) -> list[object]:
    """Steps of a fast rank and one a fifth as fast, which repeats an update of 4 ms; who works alone after each."""
    lone: list[object] = []
    for _ in range(steps):
        samples = splitter.next(TOTAL).samples
        times_ms = (0.2 + 0.01 * samples[0], 4.0 + 0.05 * samples[1])
        ranks = tuple(
            RankFacts(samples=count, batches=count > 0, compute_ms=ms, exposed_ms=exposed_ms + max(times_ms) - ms)
            for count, ms in zip(samples, times_ms, strict=True)
        )
        if setup_ms:
            ranks = tuple(replace(facts, compute_ms=0.0, setup_ms=setup_ms) for facts in ranks)
        splitter.learn(AverageReport(window=0, ranks=ranks))
        lone.append(splitter.lone)
    return lone


def test_the_splitter_leaves_a_rank_that_only_holds_up_the_other() -> None:
    splitter = Splitter(world_size=2, may_rest=True)
    assert told(splitter, steps=64, exposed_ms=0.3)[-1] == 0
    assert (splitter.share(0), splitter.share(1)) == (1.0, 0.0)


@pytest.mark.parametrize(
    "options", [{}, {"may_rest": True, "shares": (0.5, 0.5)}, {"may_rest": True, "caps": (90, 90)}]
)
def test_nobody_rests_where_shares_were_given_or_memory_binds_or_the_driver_cannot(options: dict[str, object]) -> None:
    splitter = Splitter(world_size=2, **options)  # type: ignore[arg-type]
    assert set(told(splitter, steps=64, exposed_ms=0.3)) == {None}


@pytest.mark.parametrize(("only", "ends_alone"), [(0, 0), (1, None)])
def test_only_the_named_rank_may_work_alone(only: int, ends_alone: int | None) -> None:
    splitter = Splitter(world_size=2, may_rest=True, only_alone=only)
    assert told(splitter, steps=200, exposed_ms=0.3)[-1] == ends_alone
    assert [splitter.may_work_alone(rank) for rank in range(2)] == [only == 0, only == 1]


@pytest.mark.parametrize(
    ("only", "steps_left", "begins_alone"), [(0, 60, True), (0, 10_000, False), (1, 60, False), (None, 10_000, True)]
)
def test_the_only_rank_begins_alone_where_the_run_is_too_short_to_try_the_others(
    only: int | None, steps_left: int, begins_alone: bool
) -> None:
    """In a longer run nobody would find out whether sharing is better, since that rank stays alone."""
    splitter = Splitter(world_size=2, may_rest=True, only_alone=only)
    splitter.hint((0.9, 0.1))
    splitter.begin(TOTAL, left=steps_left * TOTAL)
    assert (splitter.lone == 0) == begins_alone
    assert splitter.stays_alone == (begins_alone and only == 0)


def test_the_only_rank_that_may_work_alone_stays_alone_whatever_is_measured() -> None:
    splitter, resumed = (Splitter(world_size=2, may_rest=True, only_alone=0) for _ in range(2))
    told(splitter, steps=64, exposed_ms=0.3)
    for ms in (1.0, 50.0, 500.0):
        assert [splitter.learn_alone(stretch(ms=ms, batches=1024)) for _ in range(64)] == [[]] * 64
    resumed.restore(json.loads(json.dumps(splitter.state())))
    assert [resumed.learn_alone(stretch(ms=50.0, batches=1024)) for _ in range(64)] == [[]] * 64
    assert (splitter.lone, resumed.lone) == (0, 0)


def test_before_a_rank_stays_alone_one_more_step_is_shared_in_which_local_steps_may_be_chosen() -> None:
    splitter, other = (Splitter(world_size=2, may_rest=True, only_alone=0) for _ in range(2))
    steps = 0
    while splitter.soon_alone is None:
        told(splitter, steps=1, exposed_ms=0.3)
        steps += 1
    assert (splitter.lone, splitter.stays_alone) == (None, False)
    assert splitter.exact_rate is not None
    told(splitter, steps=1, exposed_ms=0.3)
    assert (splitter.lone, splitter.stays_alone, splitter.soon_alone) == (0, True, None)
    # Where the segment ends with that step, as for local steps, nobody rests yet.
    told(other, steps=steps, exposed_ms=0.3)
    ranks = tuple(RankFacts(samples=TOTAL // 2, batches=1, compute_ms=5.0, exposed_ms=0.3) for _ in range(2))
    assert other.learn(AverageReport(window=0, ranks=ranks, is_last=True)) == []
    assert (other.lone, other.soon_alone) == (None, 0)


@pytest.mark.parametrize("steps", [3, 64])
def test_after_local_steps_the_only_rank_that_may_work_alone_does_and_says_why(steps: int) -> None:
    """Also if it was about to stay alone when local steps were chosen."""
    splitter, resumed = (Splitter(world_size=2, may_rest=True, only_alone=0) for _ in range(2))
    while splitter.soon_alone is None and steps:
        told(splitter, steps=1, exposed_ms=0.3)
        steps -= 1
    before = splitter.soon_alone
    resumed.restore(json.loads(json.dumps(splitter.state())))
    assert resumed.soon_alone == before
    assert [one.stay_alone() for one in (splitter, resumed)] == [0, 0]
    resumed.restore(json.loads(json.dumps(splitter.state())))
    for one in (splitter, resumed):
        assert (one.lone, one.stays_alone, one.soon_alone) == (0, True, None)
        assert one.unshared_reason == (
            "rank 0 works alone: loops that trained on batches of their own share no steps again"
        )
        assert [one.learn_alone(stretch(ms=50.0, batches=64)) for _ in range(9)] == [[]] * 9


def test_after_local_steps_a_slower_rank_that_works_alone_advises_to_name_the_faster_device_first() -> None:
    splitter = Splitter(world_size=2, may_rest=True, only_alone=0)
    splitter.hint((0.3, 0.7))
    splitter.stay_alone()
    assert splitter.unshared_reason is not None
    assert splitter.unshared_reason.endswith("no steps again; name the device of rank 1 first, it is faster")


def test_after_local_steps_all_share_again_where_any_rank_or_none_may_work_alone() -> None:
    forbidden = Splitter(world_size=2, may_rest=True, only_alone=0)
    forbidden.share_always()
    for splitter in (forbidden, Splitter(world_size=2, may_rest=True)):
        told(splitter, steps=3, exposed_ms=0.3)
        assert (splitter.stay_alone(), splitter.stays_alone, splitter.unshared_reason) == (None, False, None)


@pytest.mark.parametrize("speeds", [(1.0, 1.0, 1.0, 1.0), (1.0, 0.9, 0.9)])
def test_a_user_loop_takes_local_steps_at_once_where_they_beat_one_rank_alone(speeds: tuple[float, ...]) -> None:
    """Over a slow link sharing loses; once rank 0 stays alone, it would be too late."""
    outcome = simulate("auto", slow_link(speeds))
    assert outcome.samples_per_s > 2 * 64 / 10e-3
    assert min(outcome.samples_by_rank) > 0.2 * max(outcome.samples_by_rank)


def test_rank_0_stays_alone_where_local_steps_promise_too_little() -> None:
    outcome = simulate("auto", slow_link((1.0, 0.4)))
    assert outcome.samples_by_rank[1] < 0.01 * outcome.samples_by_rank[0]


def slow_link(speeds: tuple[float, ...]) -> Scenario:
    """Steps of 10 ms at speed 1, gradients of 4 MB over 1 Gbit/s; in a user's own loop."""
    return Scenario(
        speeds=tuple(DeviceSpeed(per_sample_ms=0.125 / one, fixed_ms=2.0 / one, jitter=0.05) for one in speeds),
        network=Network(bandwidth_bytes_per_s=1.25e8),
        num_samples=64 * 2000,
        batch_size=64,
        global_batch_size=64,
        model_bytes=4_000_000,
        only_alone=0,
    )


def whole(*, ms: float) -> AverageReport:
    """A shared step in which rank 0 took the whole batch."""
    ranks = (
        RankFacts(samples=TOTAL, batches=1, compute_ms=ms, exposed_ms=0.1),
        RankFacts(samples=0, batches=0, compute_ms=0.0, exposed_ms=0.1),
    )
    return AverageReport(window=0, ranks=ranks)


def measuring_wholes(*, shared_ms: float) -> Alone:
    alone = Alone(only=0)
    while not alone.compares_wholes:
        assert alone.shared(shared(ms=shared_ms), (FAST, SLOW), TOTAL, steps_left=1e6) is None
    assert alone.rank is None
    return alone


def test_the_only_rank_stays_alone_once_whole_batches_are_measured_to_be_quicker() -> None:
    alone = measuring_wholes(shared_ms=1.2)
    reasons = [alone.whole(whole(ms=0.8)) for _ in range(2)]
    assert reasons == [None, "a shared step takes 1.20 ms, a whole batch on rank 0 0.80 ms"]
    assert (alone.rank, alone.stays, alone.step_ms) == (0, True, 0.8)


def test_sharing_stays_where_whole_batches_take_as_long_and_is_compared_ever_later() -> None:
    alone, waits = measuring_wholes(shared_ms=1.04), []
    for _ in range(3):
        while alone.compares_wholes:
            assert alone.whole(whole(ms=1.1)) is None
        steps = 0
        while not alone.compares_wholes:
            alone.shared(shared(ms=1.04), (FAST, SLOW), TOTAL, steps_left=1e6)
            steps += 1
        waits.append(steps)
    assert alone.rank is None
    assert waits == [64, 256, 1024]


def test_a_comparison_with_whole_batches_needs_more_of_them_the_closer_it_is() -> None:
    found = {}
    for ratio in (0.5, 0.7, 0.85, 0.93, 0.97, 1.05):
        wholes, number, verdict = WholeBatches(), 0, None
        wholes.begin()
        while verdict is None:
            verdict, number = wholes.add(ratio, shared_ms=1.0), number + 1
        found[ratio] = (number, verdict)
    assert found == {
        0.5: (1, True),
        0.7: (2, True),
        0.85: (8, True),
        0.93: (16, True),
        0.97: (16, False),
        1.05: (4, False),
    }


def learn_slow_sum(splitter: Splitter) -> None:
    """One shared step, with sums that take longer than what a second rank saves."""
    times_ms = [(0.02 * n, n) for n in splitter.next(TOTAL).samples]
    ranks = tuple(RankFacts(samples=n, batches=n > 0, compute_ms=ms, exposed_ms=5.0) for ms, n in times_ms)
    splitter.learn(AverageReport(window=0, ranks=ranks))


def test_the_splitter_gives_the_only_rank_whole_batches_before_it_stays_alone() -> None:
    splitter = Splitter(world_size=2, may_rest=True, only_alone=0)
    splits = []
    while splitter.lone is None:
        splits.append(splitter.next(TOTAL).samples)
        learn_slow_sum(splitter)
    assert (TOTAL, 0) in splits[:-1]
    # The last step before it stays alone is shared as usual.
    assert splits[-1] != (TOTAL, 0)


def test_a_resumed_splitter_shares_as_usual_after_a_comparison_was_cut_short() -> None:
    splitter, resumed = (Splitter(world_size=2, may_rest=True, only_alone=0) for _ in range(2))
    while splitter.next(TOTAL).samples != (TOTAL, 0):
        learn_slow_sum(splitter)
    resumed.restore(json.loads(json.dumps(splitter.state())))
    assert resumed.next(TOTAL).samples != (TOTAL, 0)


def test_a_comparison_ends_where_all_are_to_share_always() -> None:
    splitter = Splitter(world_size=2, may_rest=True, only_alone=0)
    while not splitter.compares_wholes:
        learn_slow_sum(splitter)
    splitter.share_always()
    assert not splitter.compares_wholes
    for _ in range(100):
        assert splitter.next(TOTAL).samples != (TOTAL, 0)
        learn_slow_sum(splitter)
    assert (splitter.lone, splitter.soon_alone) == (None, None)


def test_a_comparison_ends_where_the_rank_stays_alone_after_local_steps() -> None:
    splitter, resumed = (Splitter(world_size=2, may_rest=True, only_alone=0) for _ in range(2))
    while not splitter.compares_wholes:
        learn_slow_sum(splitter)
    assert splitter.stay_alone() == 0
    resumed.restore(json.loads(json.dumps(splitter.state())))
    for one in (splitter, resumed):
        assert not one.compares_wholes
        assert [one.learn_alone(stretch(ms=50.0, batches=64)) for _ in range(3)] == [[]] * 3


@pytest.mark.parametrize("jitter", [0.05, 0.1, 0.15])
def test_a_user_loop_goes_on_sharing_where_that_gains_though_some_steps_are_lucky(jitter: float) -> None:
    """Once rank 0 stays alone, there is no way back; before, a single short step time was enough."""
    for seed in range(4):
        outcome = simulate("auto", short_sums((1.0, 0.4), jitter=jitter, seed=seed))
        assert outcome.samples_per_s > 1.15 * outcome.fastest_samples_per_s


def short_sums(speeds: tuple[float, ...], *, jitter: float, seed: int) -> Scenario:
    """Steps of 64 ms at speed 1, sums of about 1 ms; in a user's own loop."""
    return Scenario(
        speeds=tuple(DeviceSpeed(per_sample_ms=0.95 / one, fixed_ms=3.2 / one, jitter=jitter) for one in speeds),
        network=Network(bandwidth_bytes_per_s=1e8),
        num_samples=64 * 1000,
        batch_size=64,
        global_batch_size=64,
        model_bytes=80_000,
        only_alone=0,
        seed=seed,
    )


def test_stretches_of_the_only_rank_grow_slowly_because_its_loop_may_pause() -> None:
    alone = measuring_wholes(shared_ms=2.0)
    alone.whole(whole(ms=1.0))
    lengths = []
    for _ in range(9):
        alone.alone(stretch(ms=1.0, batches=alone.stretch))
        lengths.append(alone.stretch)
    assert lengths == [16, 32, 64, 128, 256, 512, 1024, 1024, 1024]


def test_nobody_rests_once_all_are_to_share() -> None:
    splitter = Splitter(world_size=2, may_rest=True)
    splitter.share_always()
    assert set(told(splitter, steps=200, exposed_ms=0.3)) == {None}


def test_a_stretch_is_no_longer_than_others_can_wait_with_the_pauses_of_the_users_loop() -> None:
    alone = Alone(longest_stretch_s=20.0, only=0)
    alone.begin(0, slowness=9.0, steps_left=60)
    worked = RankFacts(samples=16 * TOTAL, batches=16, compute_ms=16.0, exposed_ms=0.0, paused_ms=16 * 1_000.0)
    rested = RankFacts(samples=0, batches=0, compute_ms=0.0, exposed_ms=0.0)
    for _ in range(8):
        alone.alone(AverageReport(window=0, ranks=(worked, rested)))
    assert alone.stretch <= 20
    # One evaluation at the end of an epoch is soon forgotten.
    for _ in range(64):
        alone.alone(stretch(ms=1.0, batches=alone.stretch))
    assert alone.stretch == STRETCH_MAX


def test_a_report_without_samples_at_the_start_of_an_epoch_teaches_nothing() -> None:
    """GPUs report a step with the next one, so the first report of an epoch of few steps comes while splits vary."""
    splitter = Splitter(world_size=2, may_rest=True)
    told(splitter, steps=2, exposed_ms=0.3)
    assert splitter.is_exploring
    before, empty = splitter.state(), RankFacts(samples=0, batches=0, compute_ms=0.0, exposed_ms=0.0)
    assert splitter.learn(AverageReport(window=0, ranks=(empty, empty)), left=10 * TOTAL) == []
    assert splitter.state() == before | {"num_steps": before["num_steps"] + 1}


def test_sharing_is_explored_anew_after_a_rest() -> None:
    splitter = Splitter(world_size=2, may_rest=True)
    told(splitter, steps=64, exposed_ms=0.3)
    while not (decisions := splitter.learn_alone(stretch(ms=1.2, batches=512))):
        assert splitter.lone == 0
    assert [(decision.kind, decision.value) for decision in decisions] == [("alone", None)]
    assert splitter.lone is None
    assert min(splitter.next(TOTAL).samples) > 0


def test_shapes_that_a_trial_of_sharing_captures_are_part_of_its_price() -> None:
    rests = []
    for setup_ms in (0.1, 500.0):
        splitter = Splitter(world_size=2, may_rest=True)
        told(splitter, steps=64, exposed_ms=0.3)
        while not splitter.learn_alone(stretch(ms=1.2, batches=512)):
            pass
        told(splitter, steps=2, exposed_ms=0.3, setup_ms=setup_ms)
        assert told(splitter, steps=64, exposed_ms=0.3)[-1] == 0
        rests.append(splitter.state()["alone"]["left"])
    assert rests[1] > 4 * rests[0]


def test_nobody_goes_alone_by_steps_that_were_captured() -> None:
    splitter = Splitter(world_size=2, may_rest=True)
    assert set(told(splitter, steps=200, exposed_ms=0.3, setup_ms=50.0)) == {None}


def test_a_short_try_alone_leaves_the_split_as_it_was() -> None:
    splitter = Splitter(world_size=2, may_rest=True)
    told(splitter, steps=64, exposed_ms=0.3)
    split = splitter.next(TOTAL)
    splitter.learn_alone(stretch(ms=9.0), left=TOTAL)
    assert [decision.kind for decision in splitter.learn_alone(stretch(ms=9.0), left=TOTAL)] == ["alone"]
    assert splitter.lone is None
    assert splitter.next(TOTAL) == split


def test_the_short_batch_at_the_end_of_an_epoch_sends_nobody_back_to_sharing() -> None:
    splitter = Splitter(world_size=2, may_rest=True)
    told(splitter, steps=64, exposed_ms=0.3)
    splitter.learn_alone(stretch(ms=1.2))
    worked = RankFacts(samples=64 * TOTAL - 20, batches=64, compute_ms=64 * 9.0, exposed_ms=0.0)
    rested = RankFacts(samples=0, batches=0, compute_ms=0.0, exposed_ms=0.0)
    assert splitter.learn_alone(AverageReport(window=0, ranks=(worked, rested))) == []
    assert splitter.lone == 0


def test_shared_steps_that_were_on_their_way_change_nothing_for_who_works_alone() -> None:
    splitter = Splitter(world_size=2, may_rest=True)
    told(splitter, steps=64, exposed_ms=0.3)
    for _ in range(32):
        slow = RankFacts(samples=TOTAL, batches=1, compute_ms=50.0, exposed_ms=0.0)
        quick = RankFacts(samples=1, batches=1, compute_ms=0.01, exposed_ms=0.0)
        assert splitter.learn(AverageReport(window=0, ranks=(slow, quick))) == []
    for _ in range(2):
        splitter.learn_alone(stretch(ms=1.2), left=20 * TOTAL)
    assert splitter.lone == 0


def test_who_works_alone_outlives_a_checkpoint() -> None:
    splitter, resumed = (Splitter(world_size=2, may_rest=True) for _ in range(2))
    told(splitter, steps=64, exposed_ms=0.3)
    resumed.restore(json.loads(json.dumps(splitter.state())))
    assert (resumed.lone, resumed.stretch) == (splitter.lone, splitter.stretch)
    assert resumed.state() == splitter.state()


def test_what_a_trial_of_sharing_has_cost_outlives_a_checkpoint() -> None:
    alone, resumed = going_alone(shared_ms=2.0), Alone()
    alone.alone(stretch(ms=1.0, batches=4_800))
    alone.spent(shared(ms=500.0))
    resumed.restore(json.loads(json.dumps(alone.state())))
    assert resumed.state() == alone.state()
    assert alone.state()["spent"] == [500.0, 1]


def test_a_checkpoint_from_before_anybody_could_rest_can_be_resumed() -> None:
    state = Splitter(world_size=2).state()
    del state["alone"]
    resumed = Splitter(world_size=2, may_rest=True)
    resumed.restore(state)
    assert resumed.lone is None


# In the simulator


def test_over_a_slow_network_balanced_is_about_as_fast_as_the_fast_rank_alone() -> None:
    speeds = (DeviceSpeed(per_sample_ms=0.01), DeviceSpeed(per_sample_ms=0.05))
    far = Scenario(speeds=speeds, network=Network(latency_ms=5.0), num_samples=1_000_000, batch_size=32)
    near = Scenario(
        speeds=speeds, network=Network(latency_ms=0.001), num_samples=1_000_000, batch_size=32, model_bytes=4
    )
    alone = 1e3 / speeds[0].per_sample_ms
    assert 0.9 * alone < simulate("balanced", far).samples_per_s < alone
    assert simulate("balanced", near).samples_per_s > 1.1 * alone
    assert simulate("sync", far).samples_per_s < 0.1 * alone


@pytest.mark.parametrize("jitter", [0.02, 0.1])
@pytest.mark.parametrize("ratio", [1.1, 1.2, 1.5])
def test_the_faster_of_two_similar_devices_works_alone(ratio: float, jitter: float) -> None:
    """They slow each other down by 10 % in shared steps, whose sums cost more than they save."""

    def speeds(slowdown: float) -> tuple[DeviceSpeed, ...]:
        return tuple(
            DeviceSpeed(per_sample_ms=0.008 * slowdown * part, fixed_ms=0.5 * slowdown * part, jitter=jitter)
            for part in (1.0, ratio)
        )

    for seed in range(10):
        costs = MeasuredCosts(local=speeds(1.1), shared=speeds(1.1), average_ms=0.3, gradient_ms=0.3)
        outcome = simulate(
            "balanced",
            Scenario(
                speeds=speeds(1.0),
                network=Network(),
                num_samples=3_000 * 64,
                batch_size=64,
                global_batch_size=64,
                measured=costs,
                seed=seed,
            ),
        )
        assert outcome.samples_by_rank[0] > 0.9 * 3_000 * 64


# Beside much slower ranks


def beginning(*, slowness: float = 10.0, steps_left: float) -> Alone:
    alone = Alone()
    alone.begin(0, slowness=slowness, steps_left=steps_left)
    assert alone.rank == 0
    return alone


def test_a_run_too_short_for_a_trial_is_left_to_the_rank_that_began() -> None:
    alone = beginning(steps_left=300)
    assert alone.is_unshared
    told = [alone.alone(stretch(ms=25.0, batches=16), steps_left=300 - 16 * n) for n in range(1, 19)]
    assert (told, alone.rank) == ([None] * 18, 0)


def test_the_first_stretch_is_short_and_none_takes_minutes() -> None:
    """Ranks that rest wait for its end, and nothing is known of the time of a step."""
    alone = beginning(steps_left=1_000_000)
    found = [alone.stretch]
    for ms in (20_000.0, 5_000.0, 5_000.0):
        alone.alone(stretch(ms=ms, batches=alone.stretch), steps_left=1_000_000)
        found.append(alone.stretch)
    assert found == [FIRST_STRETCH, 1, 1, 1]


@pytest.mark.parametrize(
    ("ms", "longest_s", "steps"),
    [(25.0, 30.0, STRETCH_MIN), (3_000.0, 30.0, 10), (3_000.0, 75.0, STRETCH_MIN), (5e5, 1.0, 1)],
)
def test_a_stretch_is_as_long_as_others_can_wait(ms: float, longest_s: float, steps: int) -> None:
    alone = Alone(longest_stretch_s=longest_s)
    alone.begin(0, slowness=10.0, steps_left=300)
    alone.alone(stretch(ms=ms, batches=alone.stretch), steps_left=299)
    assert alone.stretch == steps


def test_in_a_long_run_the_others_are_tried_once_a_whole_batch_is_measured() -> None:
    alone = beginning(steps_left=10_000)
    assert not alone.is_unshared
    assert alone.alone(stretch(ms=40.0, batches=16), steps_left=9_984) is None
    reason = alone.alone(stretch(ms=25.0, batches=16), steps_left=9_968)
    assert reason == "rank 0 alone takes 25.00 ms; the run is long enough to try the others"
    assert (alone.rank, alone.is_unshared) == (None, False)


def test_the_warm_up_of_a_slow_rank_is_many_short_steps() -> None:
    """1,000 steps of 1 ms are one second: a first step of a slow rank may take a tenth of that."""
    found = {}
    for ms in (1.0, 25.0):
        alone = beginning(steps_left=1_000)
        for left in (984, 968):
            alone.alone(stretch(ms=ms, batches=16), steps_left=left)
        found[ms] = alone.rank
    assert found == {1.0: 0, 25.0: None}


def test_a_trial_of_sharing_that_shows_nothing_leaves_the_rank_alone_again() -> None:
    alone = beginning(steps_left=10_000)
    for left in (9_984, 9_968):
        alone.alone(stretch(ms=1.0, batches=16), steps_left=left)
    for _ in range(CLEAR_SHARED_STEPS):
        alone.shared(shared(ms=3.0), (FAST, SLOW), TOTAL, steps_left=9_900)
    assert alone.rank == 0


def test_who_began_alone_goes_on_so_after_a_checkpoint() -> None:
    alone, restored = beginning(steps_left=10_000), Alone()
    alone.alone(stretch(ms=25.0, batches=16), steps_left=9_984)
    restored.restore(json.loads(json.dumps(alone.state())))
    assert restored.rank == 0
    for left in (9_968, 9_952):
        reason = restored.alone(stretch(ms=25.0, batches=16), steps_left=left)
    assert reason is not None
    assert restored.rank is None


@pytest.mark.parametrize("steps", [32, 100, 300])
@pytest.mark.parametrize("slowdown", [4.0, 10.0])
def test_a_short_run_beside_a_much_slower_rank_takes_what_the_fast_one_takes(steps: int, slowdown: float) -> None:
    """Half of a step does not depend on its samples, so that nothing can be gained, and all can be lost."""
    fast, slow = (DeviceSpeed(per_sample_ms=0.2 * by, fixed_ms=12.8 * by) for by in (1.0, slowdown))
    scenario = Scenario(
        speeds=(fast, slow), network=Network(), num_samples=64 * steps, batch_size=64, global_batch_size=64
    )
    assert simulate("balanced", scenario).gain > 0.99


def test_a_long_run_beside_a_much_slower_rank_gains_what_there_is() -> None:
    speeds = tuple(DeviceSpeed(per_sample_ms=0.4 * by) for by in (1.0, 5.0))
    scenario = Scenario(
        speeds=speeds, network=Network(), model_bytes=1_000, num_samples=64 * 5_000, batch_size=64, global_batch_size=64
    )
    assert simulate("balanced", scenario).gain > 1.12


@pytest.mark.parametrize("seed", range(6))
def test_first_splits_that_differ_on_purpose_leave_no_device_out(seed: int) -> None:
    """A rank waits in one step for another that had much to do in the step before: that is no slow step."""
    speeds = tuple(DeviceSpeed(per_sample_ms=3.2 * by, jitter=0.1) for by in (1.0, 2.5))
    costs = MeasuredCosts(local=speeds, shared=speeds, average_ms=2.0, gradient_ms=2.0)
    scenario = Scenario(
        speeds=speeds,
        network=Network(),
        num_samples=128 * 400,
        batch_size=128,
        global_batch_size=128,
        measured=costs,
        seed=seed,
    )
    assert simulate("balanced", scenario).gain > 1.25


def test_a_rank_that_lost_against_few_shared_steps_is_compared_again_soon() -> None:
    alone = Alone()
    fast = RankFacts(samples=90, batches=1, compute_ms=36.0, exposed_ms=0.0)
    slow = RankFacts(samples=10, batches=1, compute_ms=90.0, exposed_ms=0.0)
    for _ in range(2):
        alone.bound(AverageReport(window=0, ranks=(fast, slow)))
        alone.shared_at_first(AverageReport(window=0, ranks=(fast, slow)))
    assert alone.rank == 0
    while alone.rank == 0:
        alone.alone(stretch(ms=95.0, batches=16))
    alone.forget()
    costs = (GivenCost(0.0, 0.4), GivenCost(0.0, 9.0))
    reasons = [alone.shared(shared(ms=99.0), costs, TOTAL) for _ in range(SHARED_STEPS)]
    assert reasons[-1] is not None
