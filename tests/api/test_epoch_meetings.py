"""How often the ranks meet between two epochs: every meeting waits for the slowest rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import outrider
from outrider.world.world import World

Trainer = Callable[..., outrider.Run]
EPOCHS = 4


def do_nothing(context: outrider.EpochContext) -> None:
    pass


@pytest.fixture
def meetings(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What the ranks met for, as often as they did."""
    met = Counter[str]()
    exchange, barrier = World.exchange_json, World.barrier

    def counted_exchange(world: World, value: Any, *, name: str = "values", **options: Any) -> list[Any]:
        met[name] += 1
        return exchange(world, value, name=name, **options)

    def counted_barrier(world: World, what: str, **options: Any) -> None:
        met[what.rstrip("0123456789")] += 1
        barrier(world, what, **options)

    monkeypatch.setattr(World, "exchange_json", counted_exchange)
    monkeypatch.setattr(World, "barrier", counted_barrier)
    return met


def of_each_epoch(meetings: Counter[str]) -> dict[str, int]:
    """Those that come with every epoch, and how often in each."""
    return {name: times // EPOCHS for name, times in meetings.items() if times >= EPOCHS}


BEGIN = {"wishes to stop": 1, "the start of epoch ": 1}


def test_ranks_without_callbacks_meet_once_to_end_an_epoch(train_here: Trainer, meetings: Counter[str]) -> None:
    train_here(epochs=EPOCHS).join()
    assert of_each_epoch(meetings) == BEGIN | {"accounts": 1}


def test_a_callback_may_stop_the_run_so_ranks_meet_after_it_too(train_here: Trainer, meetings: Counter[str]) -> None:
    train_here(epochs=EPOCHS, epoch_end=do_nothing).join()
    assert of_each_epoch(meetings) == BEGIN | {"accounts": 1, "wishes to stop": 2}


def test_a_handle_that_is_told_to_stop_between_two_epochs_begins_no_other(train_here: Trainer) -> None:
    run = train_here(epochs=EPOCHS)
    for epoch in run:
        if epoch.epoch == 1:
            run.stop()
    assert [(epoch.epoch, epoch.is_complete) for epoch in run.epochs] == [(0, True), (1, True)]
