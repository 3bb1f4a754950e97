"""Shared steps on a device whose time is told by events, here by a clock that says what the test wants."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from outrider.core.effects import Batch, Confer, HandOver, Lease, Merge, Report, SharedStep, Step
from outrider.data.feed import make_feed
from outrider.data.leases import LocalLeases
from outrider.replica.recipe import Recipe
from outrider.replica.replica import Replica
from outrider.runtime.averages import SoloAverages
from outrider.runtime.clock import Measured
from outrider.runtime.driver import Driver
from outrider.runtime.stepper import Stepper
from outrider.runtime.throttle import Throttle
from outrider.timeline.recorder import Recorder

CPU = torch.device("cpu")


class ToldClock:
    """Says that each step took a second more than the one before."""

    def __init__(self) -> None:
        self.num_marks: list[int] = [0]

    def restart(self) -> None: ...

    def mark(self) -> None:
        self.num_marks[-1] += 1

    def measured(self) -> Measured:
        self.num_marks.append(0)
        return Measured(compute_s=float(len(self.num_marks)), exposed_s=0.25)


@pytest.fixture
def driver() -> Driver:
    dataset = (torch.ones(12, 2),)
    recipe = Recipe(
        model=lambda: nn.Linear(2, 1),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        step=lambda model, batch: model(batch[0]).mean(),
        dataset=dataset,
        batch_size=4,
        policy="sync",
    )
    return Driver(
        replica=Replica(recipe, device=CPU, rank=0, name="cpu"),
        feed=make_feed(dataset, device=CPU, seed=0, augment=None),
        averages=SoloAverages(CPU),
        throttle=Throttle(1.0),
        recorder=Recorder(0, origin_s=0.0),
        stop_requested=lambda: False,
        on_step=lambda: None,
    )


def three_steps(reports: list[Report]) -> Iterator[SharedStep]:
    for number in range(3):
        reports.append((yield SharedStep(Batch(4 * number, 4), at=4 * number)))


def run(driver: Driver, policy: Callable[[list[Report]], Any] = three_steps) -> list[Report]:
    reports: list[Report] = []
    driver.feed.start_epoch(torch.arange(12), 0)
    assert isinstance(driver.replica, Replica)
    Stepper(driver, driver.replica).run(policy(reports), leases=LocalLeases(Lease(0, 12), batch_size=4), epoch_base=0)
    return reports


def test_a_device_tells_of_a_shared_step_with_the_next_one(driver: Driver) -> None:
    driver.shared_clock = ToldClock()
    facts = [report.ranks[0] for report in run(driver)]
    assert [one.samples for one in facts] == [0, 4, 4]
    # The first step is a warm-up whose time is not told.
    assert [one.compute_ms for one in facts] == [0.0, 0.0, 3_000.0]
    assert [one.exposed_ms for one in facts] == [0.0, 250.0, 250.0]


def test_the_samples_of_every_step_are_accounted_for_at_once(driver: Driver) -> None:
    driver.shared_clock = ToldClock()
    run(driver)
    assert (driver.reached, driver.samples, driver.replica.steps) == (12, 12, 3)


def shared_then_alone(reports: list[Report]) -> Iterator[SharedStep | Step | HandOver]:
    reports.append((yield SharedStep(Batch(0, 4), at=0)))
    yield Step(Batch(4, 4), at=4)
    yield Step(Batch(8, 4), at=8)
    reports.append((yield HandOver(source=0, samples=8, at=8)))


def test_a_shared_step_that_is_told_when_one_rank_has_worked_alone_counts_once(driver: Driver) -> None:
    driver.shared_clock = ToldClock()
    reports = run(driver, shared_then_alone)
    assert [report.ranks[0].samples for report in reports] == [0, 12]
    assert (driver.reached, driver.samples, driver.replica.steps) == (12, 12, 3)


def test_every_step_is_marked_four_times(driver: Driver) -> None:
    clock = driver.shared_clock = ToldClock()
    run(driver)
    assert clock.num_marks == [4, 4, 4, 0]


def test_on_a_host_a_step_is_told_at_once(driver: Driver) -> None:
    assert [report.ranks[0].samples for report in run(driver)] == [4, 4, 4]


def shared_then_merged(reports: list[Report]) -> Iterator[SharedStep | Merge]:
    reports.append((yield SharedStep(Batch(0, 12), at=0)))
    yield Merge(samples=12)


def test_what_the_last_average_of_a_segment_cost_is_counted_too(driver: Driver) -> None:
    run(driver, shared_then_merged)
    assert driver.account.averages == 1
    assert driver.account.cost_s > 0


def alone_with_a_word(reports: list[Report]) -> Iterator[Step | Confer | HandOver]:
    yield Step(Batch(0, 4), at=0)
    reports.append((yield Confer(source=0, samples=4)))
    yield Step(Batch(4, 8), at=4)
    reports.append((yield HandOver(source=0, samples=8, at=4)))


def test_a_word_while_one_rank_works_alone_is_no_average_but_accounts_for_its_samples(driver: Driver) -> None:
    reports = run(driver, alone_with_a_word)
    assert [report.ranks[0].samples for report in reports] == [4, 8]
    assert (driver.reached, driver.samples, driver.account.averages) == (12, 12, 0)


def test_what_was_learned_alone_is_handed_over_once_when_it_is_needed(driver: Driver) -> None:
    run(driver, alone_with_a_word)
    run(driver, alone_with_a_word)
    assert driver.lead is not None
    assert not driver.lags
    assert driver.catch_up() > 0
    assert driver.catch_up() == 0
    assert (driver.lead, driver.account.averages) == (None, 0)
    assert [event["source"] for event in driver.recorder.events if event["kind"] == "hand over"] == [0]


@pytest.mark.parametrize("is_training", [True, False])
def test_what_is_handed_over_in_training_is_charged_to_it(driver: Driver, is_training: bool) -> None:
    run(driver, alone_with_a_word)
    before_s = driver.window.exposed_s
    seconds = driver.catch_up(is_training=is_training)
    assert driver.window.exposed_s - before_s == pytest.approx(seconds if is_training else 0.0)


def alone_then_shared(reports: list[Report]) -> Iterator[Step | HandOver | SharedStep]:
    yield Step(Batch(0, 8), at=0)
    reports.append((yield HandOver(source=0, samples=8, at=0)))
    reports.append((yield SharedStep(Batch(8, 4), at=8)))


def test_a_shared_step_waits_until_all_have_caught_up(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    monkeypatch.setattr(driver.averages, "hand_over", lambda source, at: steps.append(driver.replica.steps))
    run(driver, alone_then_shared)
    assert steps == [1]
    assert (driver.lead, driver.replica.steps) == (None, 2)
