"""Shared steps on a device whose time is told by events, here by a clock that says what the test wants."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import nn

from outrider.data.feed import make_feed
from outrider.data.leases import LocalLeases
from outrider.policy.effects import AverageReport, Batch, Confer, HandOver, Lease, Merge, SharedStep, Step
from outrider.rank.device_clock import DeviceClocks, MeasuredTimes
from outrider.rank.driver import Driver, Segment
from outrider.rank.meter import Meter
from outrider.rank.solo_averages import SoloAverages
from outrider.rank.stepper import Stepper
from outrider.rank.throttle import Throttle
from outrider.replica.recipe import Recipe
from outrider.replica.replica import Replica
from outrider.timeline.recorder import Recorder

CPU = torch.device("cpu")
EXPOSED_MS = 3
"""Where a row of facts holds it."""


class ToldClock:
    """Says that each step took a second more than the one before."""

    def __init__(self) -> None:
        self.num_marks: list[int] = [0]

    def restart(self) -> None: ...

    def mark(self) -> None:
        self.num_marks[-1] += 1

    def measured(self) -> MeasuredTimes:
        self.num_marks.append(0)
        return MeasuredTimes(compute_s=float(len(self.num_marks)), exposed_s=0.25)


class NoClock:
    """For local steps on a device, which the test does not measure."""

    def restart(self) -> None: ...

    def stepped(self, *, is_steady: bool = True) -> None: ...

    def gap(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def measure(self, batches: int) -> MeasuredTimes:
        return MeasuredTimes(compute_s=0.0, exposed_s=0.0)


class ToldClocks:
    def __init__(self) -> None:
        self.local, self.shared = NoClock(), ToldClock()

    def restart(self) -> None: ...


class Rank:
    """A driver on one rank, with all that it is made of."""

    def __init__(self, clocks: ToldClocks | None = None) -> None:
        dataset = (torch.ones(12, 2),)
        recipe = Recipe(
            model=lambda: nn.Linear(2, 1),
            optimizer=partial(torch.optim.SGD, lr=0.1),
            step=lambda model, batch: model(batch[0]).mean(),
            dataset=dataset,
            batch_size=4,
            policy="sync",
        )
        self.replica = Replica(recipe, device=CPU, rank=0, name="cpu")
        self.feed = make_feed(dataset, device=CPU, seed=0, augment=None)
        self.recorder = Recorder(0, origin_s=0.0)
        self.meter = Meter(
            rank=0, throttle=Throttle(1.0), recorder=self.recorder, clocks=cast(DeviceClocks | None, clocks)
        )
        averages = SoloAverages(self.replica)
        self.driver = Driver(replica=self.replica, averages=averages, meter=self.meter, recorder=self.recorder)

    def run(self, policy: Callable[[list[AverageReport]], Any] | None = None) -> list[AverageReport]:
        reports: list[AverageReport] = []
        self.feed.start_epoch(torch.arange(12), 0)
        span = Lease(0, 12)
        leases = LocalLeases(span, batch_size=4)
        segment = Segment(
            policy=(policy or three_steps)(reports), span=span, leases=leases, feed=self.feed, seen=0, batch_size=4
        )
        Stepper(self.driver, self.replica).run(segment)
        return reports


@pytest.fixture
def rank() -> Rank:
    return Rank()


@pytest.fixture
def clocks() -> ToldClocks:
    return ToldClocks()


@pytest.fixture
def on_device(clocks: ToldClocks) -> Rank:
    return Rank(clocks)


def three_steps(reports: list[AverageReport]) -> Iterator[SharedStep]:
    for number in range(3):
        reports.append((yield SharedStep(Batch(4 * number, 4), at=4 * number)))


def test_a_device_tells_of_a_shared_step_with_the_next_one(on_device: Rank) -> None:
    facts = [report.ranks[0] for report in on_device.run()]
    assert [one.samples for one in facts] == [0, 4, 4]
    # The first step is a warm-up whose time is not told.
    assert [one.compute_ms for one in facts] == [0.0, 0.0, 3_000.0]
    assert [one.exposed_ms for one in facts] == [0.0, 250.0, 250.0]


def test_the_samples_of_every_step_are_accounted_for_at_once(on_device: Rank) -> None:
    on_device.run()
    assert (on_device.driver.reached, on_device.meter.samples, on_device.replica.steps) == (12, 12, 3)


def shared_then_alone(reports: list[AverageReport]) -> Iterator[SharedStep | Step | HandOver]:
    reports.append((yield SharedStep(Batch(0, 4), at=0)))
    yield Step(Batch(4, 4), at=4)
    yield Step(Batch(8, 4), at=8)
    reports.append((yield HandOver(source=0, samples=8, at=8)))


def test_a_shared_step_that_is_told_when_one_rank_has_worked_alone_counts_once(on_device: Rank) -> None:
    reports = on_device.run(shared_then_alone)
    assert [report.ranks[0].samples for report in reports] == [0, 12]
    assert (on_device.driver.reached, on_device.meter.samples, on_device.replica.steps) == (12, 12, 3)


def test_every_step_is_marked_four_times(on_device: Rank, clocks: ToldClocks) -> None:
    on_device.run()
    assert clocks.shared.num_marks == [4, 4, 4, 0]


def test_on_a_host_a_step_is_told_at_once(rank: Rank) -> None:
    assert [report.ranks[0].samples for report in rank.run()] == [4, 4, 4]


def shared_then_merged(reports: list[AverageReport]) -> Iterator[SharedStep | Merge]:
    reports.append((yield SharedStep(Batch(0, 12), at=0)))
    yield Merge(samples=12)


def test_what_the_last_average_of_a_segment_cost_is_counted_too(rank: Rank) -> None:
    rank.run(shared_then_merged)
    assert rank.meter.averages == 1
    assert rank.meter.average_cost_s > 0


def alone_with_a_word(reports: list[AverageReport]) -> Iterator[Step | Confer | HandOver]:
    yield Step(Batch(0, 4), at=0)
    reports.append((yield Confer(source=0, samples=4)))
    yield Step(Batch(4, 8), at=4)
    reports.append((yield HandOver(source=0, samples=8, at=4, may_wait=True)))


def test_a_word_while_one_rank_works_alone_is_no_average_but_accounts_for_its_samples(rank: Rank) -> None:
    reports = rank.run(alone_with_a_word)
    assert [report.ranks[0].samples for report in reports] == [4, 8]
    assert (rank.driver.reached, rank.meter.samples, rank.meter.averages) == (12, 12, 0)


def test_what_was_learned_alone_is_handed_over_once_when_it_is_needed(rank: Rank) -> None:
    rank.run(alone_with_a_word)
    rank.run(alone_with_a_word)
    assert rank.driver.lead is not None
    assert not rank.driver.lags
    assert rank.driver.catch_up() > 0
    assert rank.driver.catch_up() == 0
    assert (rank.driver.lead, rank.meter.averages) == (None, 0)
    assert [event["source"] for event in rank.recorder.events if event["kind"] == "hand over"] == [0]


@pytest.mark.parametrize("is_training", [True, False])
def test_what_is_handed_over_in_training_is_charged_to_it(rank: Rank, is_training: bool) -> None:
    rank.run(alone_with_a_word)
    # The first row of facts takes the counters so far along.
    rank.driver.facts()
    seconds = rank.driver.catch_up(is_training=is_training)
    exposed_ms = rank.driver.facts()[EXPOSED_MS]
    assert exposed_ms == pytest.approx(seconds * 1e3 if is_training else 0.0)


def alone_for_all(reports: list[AverageReport]) -> Iterator[Step | HandOver]:
    yield Step(Batch(0, 8), at=0)
    reports.append((yield HandOver(source=0, samples=8, at=0)))
    yield Step(Batch(8, 4), at=8)


def test_what_may_not_wait_is_handed_over_at_once(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    monkeypatch.setattr(rank.driver.averages, "hand_over", lambda source, **_: steps.append(rank.replica.steps))
    rank.run(alone_for_all)
    assert (steps, rank.driver.lead) == ([1], None)


def alone_then_shared(reports: list[AverageReport]) -> Iterator[Step | HandOver | SharedStep]:
    yield Step(Batch(0, 8), at=0)
    reports.append((yield HandOver(source=0, samples=8, at=0, may_wait=True)))
    reports.append((yield SharedStep(Batch(8, 4), at=8)))


def test_a_shared_step_waits_until_all_have_caught_up(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    monkeypatch.setattr(rank.driver.averages, "hand_over", lambda source, **_: steps.append(rank.replica.steps))
    rank.run(alone_then_shared)
    assert steps == [1]
    assert (rank.driver.lead, rank.replica.steps) == (None, 2)


def steps_alone(reports: list[AverageReport]) -> Iterator[Step | HandOver]:
    for number in range(3):
        yield Step(Batch(4 * number, 4), at=4 * number)
    reports.append((yield HandOver(source=0, samples=12, at=0)))


def test_a_step_after_a_step_changes_only_to_its_data_and_back(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[str] = []
    enter = rank.recorder.activity.enter

    def entering(phase: str, **at: float) -> float:
        entered.append(phase)
        return enter(phase, **at)

    monkeypatch.setattr(rank.recorder.activity, "enter", entering)
    rank.run(steps_alone)
    assert entered[: entered.index("average")] == ["join", *3 * ["data", "compute"], "join", "compute", "join"]
