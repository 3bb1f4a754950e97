"""Averages in the background on the host."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor, nn

from outrider.average.averager import BackgroundWorker
from outrider.average.host_average import HostAverager
from outrider.errors import PeerLostError, WaitError


def linear() -> nn.Module:
    return nn.Linear(5, 3, dtype=torch.float64)


class LostCollective:
    """A collective whose peer is gone."""

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        raise PeerLostError("rank 0 of 2 lost a peer")

    max_ = broadcast_ = sum_

    def check_peers(self) -> None:
        raise PeerLostError("rank 0 of 2 lost a peer")


class DeafCollective(LostCollective):
    """A collective whose peer is gone, and whose sum does not notice: as NCCL's."""

    def __init__(self) -> None:
        self.is_over = threading.Event()

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        self.is_over.wait(20)

    max_ = broadcast_ = sum_


class SlowCollective:
    """A collective that waits until it is told to go on."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        self.goes_on.wait(20)

    max_ = broadcast_ = sum_

    def check_peers(self) -> None:
        pass


@pytest.fixture
def pair(make_world: Callable, thread_collectives: list) -> Callable:
    def make(stack: ExitStack) -> tuple[list[nn.Module], list[HostAverager]]:
        world = make_world(linear)
        averagers = [
            stack.enter_context(HostAverager(exchange, collective))
            for exchange, collective in zip(world.exchanges, thread_collectives, strict=True)
        ]
        return world.models, averagers

    return make


def test_load_brings_the_mean_to_both_ranks(pair: Callable) -> None:
    with ExitStack() as stack:
        models, averagers = pair(stack)
        nn.init.constant_(models[0].weight, 1.0)
        nn.init.constant_(models[1].weight, 3.0)
        for averager in averagers:
            averager.begin(5, [0.0])
        settled = [averager.load() for averager in averagers]
    torch.testing.assert_close(models[0].weight.detach(), torch.full((3, 5), 2.0, dtype=torch.float64))
    assert torch.equal(models[0].weight, models[1].weight)
    assert settled[0].facts == settled[1].facts
    assert settled[0].drift == settled[1].drift


def test_steps_between_begin_and_correct_stay_in(pair: Callable) -> None:
    with ExitStack() as stack:
        models, averagers = pair(stack)
        nn.init.constant_(models[0].weight, 1.0)
        nn.init.constant_(models[1].weight, 3.0)
        for averager in averagers:
            averager.begin(5, [0.0])
        with torch.no_grad():
            models[0].weight.add_(10.0)
        for averager in averagers:
            averager.correct()
    torch.testing.assert_close(models[0].weight.detach(), torch.full((3, 5), 12.0, dtype=torch.float64))
    torch.testing.assert_close(models[1].weight.detach(), torch.full((3, 5), 2.0, dtype=torch.float64))


def test_timings_are_reported(pair: Callable) -> None:
    with ExitStack() as stack:
        _, averagers = pair(stack)
        for averager in averagers:
            averager.begin(5, [0.0])
        settled, _ = [averager.load() for averager in averagers]
    assert 0.0 < settled.snapshot_ms < settled.total_ms
    assert 0.0 < settled.transfer_ms < settled.total_ms


def test_a_second_begin_before_the_first_is_taken_in_is_a_bug(pair: Callable) -> None:
    with ExitStack() as stack:
        _, averagers = pair(stack)
        for averager in averagers:
            averager.begin(1, [0.0])
        with pytest.raises(AssertionError, match="an average is in flight"):
            averagers[0].begin(1, [0.0])


def test_closing_leaves_no_thread(pair: Callable) -> None:
    before = threading.active_count()
    with ExitStack() as stack:
        _, averagers = pair(stack)
        for averager in averagers:
            averager.begin(1, [0.0])
        assert threading.active_count() == before + 2
    assert threading.active_count() == before


def test_no_thread_is_started_for_blocking_averages(make_world: Callable) -> None:
    before = threading.active_count()
    collective = SlowCollective()
    collective.goes_on.set()
    with HostAverager(make_world(linear).exchanges[0], collective) as averager:
        averager.average(1, [0.0])
        assert threading.active_count() == before


def test_readiness_follows_the_background(make_world: Callable) -> None:
    collective = SlowCollective()
    with HostAverager(make_world(linear).exchanges[0], collective) as averager:
        assert not averager.is_ready()
        averager.begin(1, [0.0])
        assert not averager.is_ready()
        collective.goes_on.set()
        averager.load()
        assert not averager.is_ready()


def test_a_wait_that_takes_too_long_says_what_for(make_world: Callable) -> None:
    collective = SlowCollective()
    with HostAverager(make_world(linear).exchanges[0], collective, timeout_s=0.01) as averager:
        averager.begin(1, [0.0])
        with pytest.raises(WaitError) as caught:
            averager.correct()
        collective.goes_on.set()
    assert str(caught.value) == (
        "rank 0 waited 0.01 s for average 1 to be summed by all 2 ranks\n"
        "hint: a rank may be stuck or far slower than the others: look at the rank logs"
    )


def test_an_error_in_the_background_reaches_the_caller(make_world: Callable) -> None:
    with HostAverager(make_world(linear).exchanges[0], LostCollective()) as averager:
        averager.begin(1, [0.0])
        with pytest.raises(PeerLostError, match="rank 0 of 2 lost a peer"):
            averager.load()


def test_a_lost_peer_ends_the_wait_for_a_sum_that_never_ends(make_world: Callable) -> None:
    collective = DeafCollective()
    with HostAverager(make_world(linear).exchanges[0], collective) as averager:
        averager.begin(1, [0.0])
        with pytest.raises(PeerLostError, match="rank 0 of 2 lost a peer"):
            averager.correct()
        collective.is_over.set()


def test_the_worker_computes_on_one_thread_and_the_caller_on_as_many_as_before() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    worker: BackgroundWorker[int] = BackgroundWorker("test")
    inside = worker.submit(torch.get_num_threads).result(20)
    outside = torch.get_num_threads()
    worker.close(timeout_s=20)
    torch.set_num_threads(before)
    assert (inside, outside) == (1, 2)


def test_a_worker_that_does_not_end_is_named() -> None:
    worker: BackgroundWorker[bool] = BackgroundWorker("averager of rank 3")
    goes_on = threading.Event()
    worker.submit(lambda: goes_on.wait(20))
    with pytest.raises(WaitError) as caught:
        worker.close(timeout_s=0.01)
    goes_on.set()
    worker.close(timeout_s=20)
    assert caught.value.message == "waited 0.01 s for averager of rank 3 to end its last job"
