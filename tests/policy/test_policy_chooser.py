"""When `auto` changes between exact and local steps, judged by what reports say."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import pytest

from outrider.policy.effects import AverageReport, RankFacts
from outrider.policy.policy_chooser import LEAST_STEPS_LEFT, WINDOWS_JUDGED, WINDOWS_SKIPPED, PolicyChooser
from outrider.virtual.simulator import Network, Scenario, simulate

BATCH = 32
ENOUGH = WINDOWS_SKIPPED + WINDOWS_JUDGED


@dataclass
class Measured:
    """Stands in for the splitter: what it has measured."""

    exact_rate: float | None
    own_rates: tuple[float, ...] | None
    lone: int | None = None
    candidates: tuple[int, ...] = (0, 1, 2, 3)
    usual_samples: int = BATCH
    unshared_reason: str | None = None
    gain_alone: float = 1.0
    soon_alone: int | None = None
    stays_alone: bool = False
    compares_wholes: bool = False
    lone_after_local: int | None = None

    @property
    def rates_alone(self) -> tuple[float, ...] | None:
        return self.own_rates and tuple(self.gain_alone * rate for rate in self.own_rates)

    def may_work_alone(self, rank: int) -> bool:
        return rank in self.candidates


@dataclass
class Plans:
    is_drifting: bool = False


def report(window: int, *, rates: tuple[float, ...] = (1.0, 0.4), loss: float | None = None) -> AverageReport:
    """Ranks that worked for 100 ms each at these samples per ms."""
    ranks = tuple(
        RankFacts(
            samples=round(100 * rate),
            batches=4,
            compute_ms=95.0,
            exposed_ms=5.0,
            loss_sum=(loss or 0.0) * 100 * rate,
            loss_samples=0 if loss is None else round(100 * rate),
        )
        for rate in rates
    )
    return AverageReport(window=window, ranks=ranks, drift=0.01)


def exact(chooser: PolicyChooser, measured: Measured, *, steps: int = 1, left: int | None = None, **facts: Any) -> Any:
    told = [chooser.learn_exact(report(n, **facts), measured, left) for n in range(steps)]  # type: ignore[arg-type]
    return [decision for decisions in told for decision in decisions]


def local(chooser: PolicyChooser, *, windows: int, is_drifting: bool = False, **facts: Any) -> Any:
    plans = Plans(is_drifting)
    told = [chooser.learn_local(report(100 + n, **facts), plans) for n in range(windows)]  # type: ignore[arg-type]
    return [decision for decisions in told for decision in decisions]


def gone_local(**options: Any) -> PolicyChooser:
    """A chooser after exact steps at the rate of the fastest rank alone, beside another of the same speed."""
    chooser = PolicyChooser(world_size=2)
    exact(chooser, Measured(1.0, (1.0, 1.0), lone=0), **options)
    assert not chooser.is_exact
    return chooser


def test_waits_between_epochs_count_when_local_steps_are_judged() -> None:
    """Each rank has 1.5 times the rate of exact steps while it steps; waiting half of the time, it has 0.75 of it."""
    judged = {}
    for border_ms in (0.0, 50.0):
        chooser = gone_local()
        for window in range(ENOUGH):
            told = report(100 + window, rates=(0.75, 0.75))
            ranks = tuple(replace(facts, compute_ms=45.0, border_ms=border_ms) for facts in told.ranks)
            chooser.learn_local(replace(told, ranks=ranks), Plans())  # type: ignore[arg-type]
        judged[border_ms] = chooser.is_exact
    assert judged == {0.0: False, 50.0: True}


def test_shared_steps_that_bring_nearly_all_stay_and_say_so_once() -> None:
    chooser = PolicyChooser(world_size=2)
    decisions = exact(chooser, Measured(1.35, (1.0, 0.4)), steps=50)
    assert chooser.is_exact
    [decision] = decisions
    assert (decision.kind, decision.value) == ("policy", "exact")
    assert decision.reason.startswith(
        "ranks share every step, 1.35x the fastest rank alone; local steps would learn 0."
    )
    assert decision.reason.endswith("x as much per second")


def test_a_rank_that_works_alone_beside_an_equal_one_goes_local() -> None:
    chooser = PolicyChooser(world_size=2)
    [decision] = exact(chooser, Measured(1.0, (1.0, 1.0), lone=0))
    assert (decision.kind, decision.value, chooser.is_exact, chooser.fastest) == ("policy", "local", False, 0)
    assert "1.90x the samples" in decision.reason


def test_a_promise_within_the_error_of_what_a_sample_is_worth_is_none() -> None:
    chooser = PolicyChooser(world_size=2)
    [decision] = exact(chooser, Measured(1.0, (1.0, 0.8), lone=0))
    assert (decision.value, chooser.is_exact) == ("exact", True)
    assert decision.reason.endswith("local steps would learn 1.11x as much per second, 1.2x is needed")


def test_a_much_slower_rank_is_not_worth_it() -> None:
    chooser = PolicyChooser(world_size=2)
    [decision] = exact(chooser, Measured(1.0, (1.0, 0.1), lone=0), steps=9)
    assert decision.reason.startswith("rank 0 alone is faster than sharing; local steps would learn 0.")


def test_local_steps_must_beat_the_fastest_device_where_ranks_cannot_rest() -> None:
    """Where all ranks share every step although that is slow, better than that is not good enough."""
    chooser = PolicyChooser(world_size=2)
    [decision] = exact(chooser, Measured(0.3, (1.0, 0.5), candidates=()), steps=9)
    assert chooser.is_exact
    assert decision.reason == (
        "ranks share every step, 0.30x the fastest rank alone: give the run that device only; local steps would learn "
        "0.97x as much per second"
    )


def test_the_fastest_device_is_to_be_named_first_where_only_rank_0_may_work_alone() -> None:
    chooser = PolicyChooser(world_size=2)
    [decision] = exact(chooser, Measured(0.3, (0.5, 1.0), candidates=(0,)), steps=9)
    assert "0.30x the fastest rank alone: give the run that device only, or name it first; local" in decision.reason


def test_local_steps_must_beat_the_fastest_device_with_the_cores_of_those_that_rest() -> None:
    """Both ranks together have 1.9x the samples of the fastest beside the other, which has 1.6x of that alone."""
    chooser = PolicyChooser(world_size=2)
    measured = Measured(0.8, (1.0, 1.0), candidates=(), gain_alone=1.6)
    [decision] = exact(chooser, measured, steps=9)
    assert chooser.is_exact
    assert decision.reason.startswith("ranks share every step, 0.50x the fastest rank alone")
    [decision] = exact(PolicyChooser(world_size=2), replace(measured, gain_alone=1.0), steps=9)
    assert decision.value == "local"


def test_local_steps_are_chosen_before_a_rank_stays_alone_or_never() -> None:
    soon = Measured(1.0, (1.0, 1.0, 1.0, 1.0), soon_alone=0, candidates=(0,))
    [decision] = exact(PolicyChooser(world_size=4), soon, steps=3)
    assert decision.value == "local"
    assert "as much per second as the fastest rank alone" in decision.reason
    # Too small a promise is told once the rank is alone.
    assert exact(PolicyChooser(world_size=4), replace(soon, own_rates=(1.0, 0.1, 0.1, 0.1)), steps=3) == []
    chooser = PolicyChooser(world_size=4)
    [decision] = exact(chooser, replace(soon, soon_alone=None, lone=0, stays_alone=True), steps=9)
    assert chooser.is_exact
    assert decision.reason.startswith("rank 0 alone is expected to be faster than sharing; local steps would learn")


def test_who_stays_alone_beside_a_faster_device_is_told_to_name_that_one_first() -> None:
    measured = Measured(0.4, (0.4, 1.0), lone=0, stays_alone=True, candidates=(0,))
    [decision] = exact(PolicyChooser(world_size=2), measured, steps=9)
    assert "be faster than sharing: name the device of rank 1 first, it is 2.5x as fast; local" in decision.reason


def test_nothing_is_chosen_or_told_while_whole_batches_are_compared() -> None:
    chooser = PolicyChooser(world_size=4)
    assert exact(chooser, Measured(1.0, (1.0,) * 4, compares_wholes=True), steps=9) == []
    [decision] = exact(chooser, Measured(1.0, (1.0,) * 4), steps=2)
    assert decision.value == "local"


def test_a_report_on_its_way_does_not_choose_local_steps_twice() -> None:
    chooser = PolicyChooser(world_size=2)
    assert len(exact(chooser, Measured(1.0, (1.0, 1.0)), steps=3)) == 1


@pytest.mark.parametrize(("rate", "own"), [(None, (1.0, 1.0)), (1.0, None)])
def test_nothing_is_chosen_before_it_is_measured(rate: float | None, own: tuple[float, ...] | None) -> None:
    chooser = PolicyChooser(world_size=2)
    assert exact(chooser, Measured(rate, own), steps=99) == []
    assert chooser.is_exact


def test_a_run_that_is_nearly_over_stays() -> None:
    left = LEAST_STEPS_LEFT * BATCH
    chooser = PolicyChooser(world_size=2)
    [decision] = exact(chooser, Measured(1.0, (1.0, 1.0)), left=left - 1, steps=5)
    assert decision.reason.endswith("but the run is nearly over")
    assert exact(chooser, Measured(1.0, (1.0, 1.0)), left=left)[0].value == "local"


def test_one_rank_has_nothing_to_choose() -> None:
    chooser = PolicyChooser(world_size=1)
    assert exact(chooser, Measured(1.0, (1.0,)), steps=9, rates=(1.0,)) == []


# Back to exact steps


def test_local_steps_that_keep_their_promise_stay() -> None:
    chooser = gone_local()
    assert local(chooser, windows=5 * ENOUGH, rates=(1.0, 1.0)) == []
    assert not chooser.is_exact


def test_local_steps_that_are_slower_than_promised_are_given_up() -> None:
    chooser = gone_local()
    [decision] = local(chooser, windows=ENOUGH, rates=(0.7, 0.4))
    assert (decision.value, chooser.is_exact, chooser.changed_at) == ("exact", True, 100 + ENOUGH - 1)
    assert decision.reason.startswith("local steps have 1.10x the samples per second, each worth 0.")


@pytest.mark.parametrize("paused_at", [ENOUGH - 2, ENOUGH - WINDOWS_JUDGED - 1])
def test_waits_for_an_evaluation_on_one_rank_do_not_end_local_steps(paused_at: int) -> None:
    """Rank 0 evaluates for 5 s inside its loop; rank 1 waits for it in the next average."""
    chooser = gone_local()
    for window in range(ENOUGH):
        told = report(100 + window, rates=(1.0, 1.0))
        if window == paused_at:
            told = replace(told, ranks=(replace(told.ranks[0], paused_ms=5000.0), told.ranks[1]))
        if window == paused_at + 1:
            told = replace(told, ranks=(told.ranks[0], replace(told.ranks[1], exposed_ms=4900.0)))
        assert chooser.learn_local(told, Plans()) == []  # type: ignore[arg-type]
    assert not chooser.is_exact


@pytest.mark.parametrize(("lone", "stay"), [(None, False), (0, True)])
def test_local_steps_are_compared_with_what_would_follow_them(lone: int | None, stay: bool) -> None:
    """In a user's own loop that is rank 0 alone, with two thirds of the rate of shared steps."""
    chooser = PolicyChooser(world_size=4)
    [decision] = exact(chooser, Measured(1.4, (1.0,) * 4, lone_after_local=lone), steps=2)
    assert decision.value == "local"
    restored = PolicyChooser(world_size=4)
    restored.restore(chooser.state())
    for one in (chooser, restored):
        given_up = local(one, windows=ENOUGH, rates=(0.7,) * 4)
        assert (given_up == []) == stay


def test_they_are_tried_again_only_after_long_and_then_later_still() -> None:
    measured, steps = Measured(1.0, (1.0, 1.0), lone=0), []
    chooser = gone_local()
    for _ in range(3):
        local(chooser, windows=ENOUGH, rates=(0.7, 0.4))
        assert chooser.is_exact
        count = 0
        while chooser.is_exact:
            exact(chooser, measured, rates=(1.0, 1.0))
            count += 1
        steps.append(count)
    assert steps[0] > 500
    assert steps[1] == pytest.approx(4 * steps[0], rel=0.01)
    assert steps[2] == pytest.approx(4 * steps[1], rel=0.01)


def test_replicas_that_drift_apart_go_back() -> None:
    [decision] = local(gone_local(), windows=WINDOWS_SKIPPED + 1, is_drifting=True)
    assert decision.reason == "the replicas drift apart although windows were made shorter"


def losses(chooser: PolicyChooser, *, before: list[float], after: float) -> Any:
    for number, loss in enumerate(before):
        chooser.learn_exact(report(number, loss=loss), Measured(None, None), None)  # type: ignore[arg-type]
    exact(chooser, Measured(1.0, (1.0, 1.0), lone=0))
    return local(chooser, windows=ENOUGH, rates=(1.0, 1.0), loss=after)


@pytest.mark.parametrize(("after", "goes_back"), [(0.9, False), (1.02, False), (1.3, True)])
def test_a_loss_above_that_of_exact_steps_goes_back(after: float, goes_back: bool) -> None:
    chooser = PolicyChooser(world_size=2)
    decisions = losses(chooser, before=[0.9, 1.1] * 10, after=after)
    assert chooser.is_exact == goes_back
    if goes_back:
        assert decisions[0].reason == "the loss is 1.3, exact steps had brought it to 1"


def test_a_restored_chooser_goes_on_as_the_saved_one() -> None:
    chooser = gone_local()
    local(chooser, windows=ENOUGH, rates=(0.7, 0.4))
    again = PolicyChooser(world_size=2)
    again.restore(json.loads(json.dumps(chooser.state())))
    assert again.state() == chooser.state()
    measured = Measured(1.0, (1.0, 1.0), lone=0)
    assert exact(again, measured, steps=2000) == exact(chooser, measured, steps=2000)


# In the simulator


@pytest.mark.parametrize("speeds", [(1, 0.83), (1, 0.4), (1, 0.1), (1, 0.5, 0.25)])
@pytest.mark.parametrize(("step_ms", "megabytes"), [(1, 0.4), (5, 1), (100, 100)])
def test_no_second_device_makes_it_slower(speeds: tuple[float, ...], step_ms: float, megabytes: float) -> None:
    scenario = Scenario.from_speeds(
        speeds,
        step_ms=step_ms,
        model_bytes=int(megabytes * 1e6),
        fixed_part=0.2,
        jitter=0.05,
        batches=200,
        network=Network(latency_ms=0.05),
    )
    outcome = simulate("auto", scenario)
    assert outcome.gain > 1
    assert sum(outcome.samples_by_rank) == scenario.num_samples


def test_a_rank_that_works_alone_untried_says_why_once() -> None:
    chooser = PolicyChooser(world_size=2)
    splitter = Measured(exact_rate=None, own_rates=None, lone=0, unshared_reason="the run is too short")
    told = [chooser.learn_exact(report(n), splitter, 1_000) for n in range(3)]  # type: ignore[arg-type]
    assert [[(one.kind, one.value, one.reason) for one in each] for each in told] == [
        [("policy", "exact", "the run is too short")],
        [],
        [],
    ]
