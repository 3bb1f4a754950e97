"""Verified averages: what was not exact is an error that names rank, window and stage."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import pytest
import torch
from torch import nn

from outrider.average.checks import Verifier, checksum
from outrider.average.exchange import Exchange
from outrider.average.host_average import HostAverager
from outrider.errors import VerifyError


def mixed() -> nn.Module:
    return nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3, dtype=torch.bfloat16), nn.BatchNorm1d(4)])


def move(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))


@pytest.fixture
def pair(make_world: Callable, thread_collectives: list) -> Callable:
    def make(stack: ExitStack) -> tuple[list[nn.Module], list[HostAverager]]:
        world = make_world(mixed)
        averagers = [
            stack.enter_context(HostAverager(exchange, one, verify=Verifier(one.rank, one.gather)))
            for exchange, one in zip(world.exchanges, thread_collectives, strict=True)
        ]
        return world.models, averagers

    return make


def failures(averagers: list[HostAverager]) -> list[VerifyError]:
    errors = []
    for averager in averagers:
        with pytest.raises(VerifyError) as caught:
            averager.load()
        errors.append(caught.value)
    return errors


def window(models: list[nn.Module], averagers: list[HostAverager]) -> None:
    for model, averager in zip(models, averagers, strict=True):
        move(model)
        averager.begin(3, [0.0])
    for averager in averagers:
        averager.load()


def test_exact_averages_pass(pair: Callable) -> None:
    with ExitStack() as stack:
        models, averagers = pair(stack)
        window(models, averagers)
        for averager in averagers:
            averager.begin(3, [0.0])
        move(models[0])
        for averager in averagers:
            averager.correct()
        window(models, averagers)
    assert torch.equal(models[0][0].weight, models[1][0].weight)


class EarlyReader(Exchange):
    """Reads the snapshot while the average before is still being copied in: half of the arena is old."""

    def fetch(self) -> None:
        super().fetch()
        half = self.parts[0].snapshot.numel() // 2
        self.parts[0].snapshot[half:].copy_(self.parts[0].ref[half:])


def test_a_snapshot_that_is_read_too_early_is_caught_on_every_rank(pair: Callable) -> None:
    with ExitStack() as stack:
        models, averagers = pair(stack)
        window(models, averagers)
        averagers[1].exchange.__class__ = EarlyReader
        for model, averager in zip(models, averagers, strict=True):
            move(model)
            averager.begin(3, [0.0])
        errors = failures(averagers)
    for error in errors:
        assert error.message.startswith("rank 1, window 1: checksum mismatch at stage 'snapshot': arena ")
        assert error.hint == "memory was written while an average read it: report this with the run folder"


def test_an_arena_written_during_its_snapshot_is_caught(pair: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        models, averagers = pair(stack)
        stage = averagers[0].exchange.stage
        monkeypatch.setattr(averagers[0].exchange, "stage", lambda: (move(models[0]), stage()))
        for averager in averagers:
            averager.begin(3, [0.0])
        errors = failures(averagers)
    assert errors[0].message.startswith("rank 0, window 0: checksum mismatch at stage 'snapshot'")


def test_sums_that_differ_between_ranks_are_caught(
    pair: Callable, thread_collectives: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        _, averagers = pair(stack)
        summed = thread_collectives[1].sum_
        monkeypatch.setattr(
            thread_collectives[1], "sum_", lambda tensors: (summed(tensors), tensors[0].view(-1)[0].add_(1))
        )
        for averager in averagers:
            averager.begin(3, [0.0])
        errors = failures(averagers)
    assert errors[0].message.startswith("rank 1, window 0: checksum mismatch at stage 'sum': rank_0 ")


def test_a_load_that_is_not_the_mean_is_caught(pair: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        models, averagers = pair(stack)
        load = averagers[0].exchange.load
        monkeypatch.setattr(averagers[0].exchange, "load", lambda: (load(), move(models[0])))
        for averager in averagers:
            averager.begin(3, [0.0])
        averagers[1].load()
        with pytest.raises(VerifyError, match="rank 0, window 0: checksum mismatch at stage 'load': mean "):
            averagers[0].load()


def test_a_correction_that_changed_since_it_was_prepared_is_caught(pair: Callable) -> None:
    with ExitStack() as stack:
        _, averagers = pair(stack)
        for averager in averagers:
            averager.begin(3, [0.0])
        averagers[1].correct()
        averagers[0]._pending.result(20)
        averagers[0].exchange.parts[0].snapshot[0] += 1.0
        with pytest.raises(VerifyError, match="rank 0, window 0: checksum mismatch at stage 'load': correction"):
            averagers[0].correct()


def test_a_checksum_sees_two_elements_change_places() -> None:
    assert checksum(torch.tensor([1.0, 2.0, 3.0])) != checksum(torch.tensor([2.0, 1.0, 3.0]))


def test_a_checksum_tells_the_zeros_apart() -> None:
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))


def test_checksums_of_pieces_add_up() -> None:
    values = torch.randn(9)
    assert checksum(values) == checksum(values[:4]) + checksum(values[4:], start=4)
