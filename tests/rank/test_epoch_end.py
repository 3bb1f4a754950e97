"""The end of an epoch where one rank worked alone: who catches up, when, and who evaluates."""

from __future__ import annotations

from typing import Any, cast

import pytest

from outrider.rank.driver import Driver
from outrider.rank.epoch_end import TRIED_TIMES, EpochEnd
from outrider.rank.host_threads import HostThreads
from outrider.rank.shared_evaluation import Evaluation, EvaluationSums
from outrider.record.epoch_metrics import RankAccount
from outrider.timeline.activity import Activity
from outrider.world.world import World


class ToldWorld:
    """Of two ranks, the other of which says what the test wants."""

    timeout_s = 100.0

    def __init__(self, other: list[bool]) -> None:
        self._other = other

    def exchange_json(self, value: Any, *, name: str) -> list[Any]:
        return [value, self._other]


class BehindDriver:
    """Somebody is ahead of this rank until it catches up, which takes a second."""

    lags = True
    lead: str | None = "rank 1"
    activity = Activity()
    threads = HostThreads()

    def catch_up(self, *, is_training: bool = True) -> float:
        self.lags, self.lead = False, None
        self.was_training = is_training
        return 1.0


class Said:
    """An evaluation that says how it was asked."""

    def run(self, key: str, *, catch_up_s: float, is_alone: bool) -> EvaluationSums:
        return EvaluationSums(total=float(is_alone), samples=1, seconds=catch_up_s, catch_up_s=catch_up_s)


def epoch_end(
    driver: BehindDriver,
    *,
    has_callbacks: bool = False,
    evaluates: bool = True,
    other: tuple[bool, bool],
    is_shown: bool = False,
    is_shown_by_other: bool = False,
) -> EpochEnd:
    return EpochEnd(
        cast(Driver, driver),
        cast(Evaluation, Said()) if evaluates else None,
        world=cast(World, ToldWorld([*other, is_shown_by_other])),
        has_callbacks=has_callbacks,
        is_shown=is_shown,
    )


@pytest.mark.parametrize("shown", [(False, False), (True, False), (False, True)])
def test_code_of_the_user_between_two_epochs_of_any_rank_sees_the_model(shown: tuple[bool, bool]) -> None:
    end = epoch_end(
        BehindDriver(), evaluates=False, other=(False, False), is_shown=shown[0], is_shown_by_other=shown[1]
    )
    assert end.is_watched == any(shown)


@pytest.mark.parametrize(
    ("own", "other", "is_saving", "catches_up"),
    [
        pytest.param((False, True), (False, True), False, False, id="nobody asks for all"),
        pytest.param((True, True), (True, True), False, True, id="callbacks"),
        pytest.param((False, True), (True, True), False, True, id="a callback that only the other rank has"),
        pytest.param((False, False), (False, True), False, True, id="an evaluation that only the other rank has"),
        pytest.param((False, True), (False, True), True, True, id="a checkpoint"),
    ],
)
def test_who_lags_catches_up_as_a_part_of_training_where_that_is_needed_anyway(
    own: tuple[bool, bool], other: tuple[bool, bool], is_saving: bool, catches_up: bool
) -> None:
    driver = BehindDriver()
    epoch_end(driver, has_callbacks=own[0], evaluates=own[1], other=other).catch_up(is_saving=is_saving)
    assert driver.lags != catches_up
    if catches_up:
        assert driver.was_training


def test_what_catching_up_for_an_evaluation_takes_is_a_part_of_the_evaluation() -> None:
    driver = BehindDriver()
    evaluated = epoch_end(driver, other=(False, True)).evaluate("eval/0")
    assert evaluated == EvaluationSums(total=0.0, samples=1, seconds=1.0, catch_up_s=1.0)
    assert not driver.was_training


def test_who_lags_in_an_evaluation_that_is_not_worth_sharing_takes_no_part() -> None:
    end = epoch_end(BehindDriver(), other=(False, True))
    end.is_worth_sharing = False
    assert end.evaluate("eval/0") == EvaluationSums()


def test_who_is_ahead_then_evaluates_alone() -> None:
    driver = BehindDriver()
    driver.lags = False
    end = epoch_end(driver, other=(False, True))
    end.is_worth_sharing = False
    assert end.evaluate("eval/0").total == 1.0


def account(samples: int, seconds: float, *, catch_up_s: float) -> RankAccount:
    return RankAccount(
        loss_sum=0.0,
        loss_samples=0,
        eval_sum=0.0,
        eval_samples=samples,
        samples=0,
        logged={},
        averages=0,
        average_cost_s=0.0,
        wait_s=0.0,
        seconds=1.0,
        eval_s=seconds,
        wants_stop=False,
        catch_up_s=catch_up_s,
    )


def judged(*rounds: tuple[float, float], catch_up_s: float, samples: tuple[int, int] = (800, 200)) -> bool:
    """Whether it is worth sharing after evaluations that took the two ranks so long."""
    end = epoch_end(BehindDriver(), other=(False, True))
    for seconds in rounds:
        assert end.is_worth_sharing
        end.judge([account(samples[rank], seconds[rank], catch_up_s=catch_up_s) for rank in range(2)], lone=0)
    return end.is_worth_sharing


@pytest.mark.parametrize(
    ("seconds", "catch_up_s", "is_worth_it"),
    [
        pytest.param((0.9, 0.9), 0.1, True, id="the other saves more than it takes to bring it up to date"),
        pytest.param((1.1, 1.1), 0.3, False, id="bringing it up to date takes longer"),
        pytest.param((0.9, 1.1), 0.1, False, id="the other is so slow that all wait for it"),
        pytest.param((0.8, 1.1), 0.0, True, id="it was up to date, so that nothing is told of what that takes"),
        pytest.param((40.0, 60.0), 8.0, True, id="alone it takes so long that who waits would take the other for lost"),
    ],
)
def test_an_evaluation_is_shared_where_that_is_quicker(
    seconds: tuple[float, float], catch_up_s: float, is_worth_it: bool
) -> None:
    assert judged(*[seconds] * TRIED_TIMES, catch_up_s=catch_up_s) == is_worth_it


def test_an_evaluation_in_which_who_works_alone_had_no_part_tells_nothing() -> None:
    assert judged(*[(1.0, 1.1)] * TRIED_TIMES, catch_up_s=1.0, samples=(0, 1_000))


def test_one_evaluation_that_was_disturbed_decides_nothing() -> None:
    assert judged((0.9, 1.9), (0.9, 0.9), (0.9, 0.9), catch_up_s=0.1)
