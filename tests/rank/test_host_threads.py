"""Threads of a rank: its own part of the cores, and those of ranks that rest while it works alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import outrider
from outrider.machine.devices import num_cores
from outrider.rank import device_speed
from outrider.rank.device_speed import GAIN_PART, gains_alone
from outrider.rank.host_threads import HostThreads
from outrider.replica.compiled import has_compiled_parts
from outrider.world.world import World


@pytest.fixture(autouse=True)
def own_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_rank_takes_the_cores_of_others_and_gives_them_back() -> None:
    threads, seen = HostThreads(1, 3), []
    for change in (threads.work_alone, threads.work_alone, threads.work_beside_others):
        change()
        seen.append(torch.get_num_threads())
    with threads.of(is_alone=True):
        seen.append(torch.get_num_threads())
    with threads.of(is_alone=False):
        seen.append(torch.get_num_threads())
    assert seen == [3, 3, 1, 3, 1]
    assert torch.get_num_threads() == 1


def test_threads_that_nobody_else_has_are_left_as_they_are() -> None:
    torch.set_num_threads(2)
    HostThreads(1, 1).work_alone()
    assert torch.get_num_threads() == 2


def test_a_number_that_the_users_code_has_set_stays() -> None:
    threads = HostThreads(1, 3)
    for given in (2, 3):
        torch.set_num_threads(given)
        threads.work_alone()
        assert torch.get_num_threads() == given
        threads.work_beside_others()
        assert torch.get_num_threads() == given
    torch.set_num_threads(1)
    threads.work_alone()
    torch.set_num_threads(2)
    threads.work_beside_others()
    assert torch.get_num_threads() == 2


def mean_error(model: nn.Module, batch: Any) -> Any:
    outrider.log("threads", torch.get_num_threads())
    return model(batch[0]).square().mean()


def evaluated(model: nn.Module, batch: Any) -> float:
    return float(torch.get_num_threads())


def trained(folder: Path, **options: Any) -> dict[str, Any]:
    """The record of a run in which rank 0 works alone, because it is that much faster."""
    outrider.train(
        nn.Linear(4, 1),
        lambda parameters: torch.optim.SGD(parameters, 0.1),
        mean_error,
        (torch.ones(256, 4),),
        devices="cpu,cpu@0.02",
        policy="auto",
        batch_size=16,
        epochs=2,
        run_dir=folder / "run",
        **options,
    ).join()
    record = json.loads((folder / "run" / "record.json").read_text())
    assert [epoch["share_by_rank"] for epoch in record["epochs"]] == [[1.0, 0.0]] * 2
    return dict(record)


def test_who_works_alone_has_all_cores_of_the_host(tmp_path: Path) -> None:
    record = trained(tmp_path)
    assert [epoch["logged"]["threads"] for epoch in record["epochs"]] == [float(num_cores())] * 2
    assert record["environment"]["threads_per_rank"] == max(1, num_cores() // 2)


def test_threads_that_the_user_set_stay(tmp_path: Path) -> None:
    record = trained(tmp_path, threads_per_rank=1)
    assert [epoch["logged"]["threads"] for epoch in record["epochs"]] == [1.0, 1.0]


def test_a_recorded_run_keeps_its_threads_so_that_a_replay_repeats_its_sums(tmp_path: Path) -> None:
    record = trained(tmp_path, record_schedule=True)
    assert [epoch["logged"]["threads"] for epoch in record["epochs"]] == [float(max(1, num_cores() // 2))] * 2


def test_code_compiled_for_a_number_of_threads_is_found() -> None:
    compiled = nn.Linear(2, 2)
    compiled.compile()
    assert has_compiled_parts(nn.Sequential(nn.Linear(2, 2), compiled))
    assert has_compiled_parts(nn.Sequential(torch.compile(nn.Linear(2, 2))))
    assert not has_compiled_parts(nn.Sequential(nn.Linear(2, 2)))


class ToldWorld:
    """A world in which all other ranks tell the same as this one."""

    size, device = 2, torch.device("cpu")

    def __init__(self, rank: int, *answers: list[Any]) -> None:
        self.rank, self.answers = rank, list(answers)
        self.told: list[Any] = []

    def exchange_json(self, own: Any, **_: str) -> list[Any]:
        self.told.append(own)
        return self.answers.pop(0)


def test_the_fastest_rank_measures_what_it_gains_and_half_of_it_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_speed, "measured_speed", lambda device: 10.0 * torch.get_num_threads())
    world = ToldWorld(0, [True, False], [3.0, 1.0])
    gains = gains_alone(cast(World, world), HostThreads(1, 3), fastest=0)
    assert world.told == [True, 3.0]
    assert gains == (1 + GAIN_PART * 2.0, 1.0)


def test_the_others_wait_and_expect_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_speed, "measured_speed", lambda device: pytest.fail("it is not the fastest"))
    world = ToldWorld(1, [True, True], [3.0, 1.0])
    assert gains_alone(cast(World, world), HostThreads(1, 3), fastest=0) == (2.0, 2.0)
    assert world.told == [True, 1.0]


def test_where_no_rank_leaves_cores_nothing_is_measured() -> None:
    world = ToldWorld(0, [False, False])
    assert gains_alone(cast(World, world), HostThreads(2, 2), fastest=0) == (1.0, 1.0)
