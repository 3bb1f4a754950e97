"""What is shown of a sweep while it runs: lines in a pipe, a picture on a terminal, one run or several at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from outrider.bench.suite.runs import Case
from outrider.cli.bench_progress import EPOCH_LINE_EVERY_S, LiveSweep, PlainSweep, open_sweep_watcher
from outrider.errors import ConfigError
from outrider.world.messages import Message


@pytest.fixture
def cases() -> list[Case]:
    return [
        Case(
            model="lenet",
            mode=mode,
            seed=0,
            epochs=200,
            batch_size=64,
            devices=("cpu", "cpu@0.4"),
            data_name="MNIST",
        )
        for mode in ("solo-1", "cpu-async")
    ]


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def ended_epoch(number: int) -> Message:
    fields = {"epoch": number, "samples": 64, "anchor": None, "loss": 0.25, "eval": 0.9, "share_by_rank": [1.0]}
    return Message(rank=0, kind="epoch", fields=fields)


def test_a_long_run_shows_that_it_lives_but_not_with_every_epoch(cases: list[Case]) -> None:
    console, clock = Console(file=None, record=True, width=80, quiet=False, stderr=True), Clock()
    progress = PlainSweep(cases, console, clock=clock)
    progress.begin(cases[0])
    for number in range(7):
        clock.now_s += EPOCH_LINE_EVERY_S / 3
        progress.saw(cases[0], ended_epoch(number))
    assert console.export_text().splitlines() == [
        "[1/2] lenet solo-1 seed 0: epoch 3/200, loss 0.250",
        "[1/2] lenet solo-1 seed 0: epoch 6/200, loss 0.250",
    ]


def test_a_failure_stands_in_its_line(cases: list[Case]) -> None:
    console, clock = Console(record=True, width=80, stderr=True), Clock()
    progress = PlainSweep(cases, console, clock=clock)
    progress.begin(cases[0])
    clock.now_s = 60.0
    progress.failed(cases[0], ConfigError("no room"))
    assert console.export_text() == "[1/2] lenet solo-1 seed 0: failed: no room, ETA 60 s\n"


def test_on_a_terminal_the_picture_has_ranks_and_the_sweep(cases: list[Case]) -> None:
    progress = LiveSweep(cases, Console(record=True, width=80, stderr=True), clock=Clock())
    progress.begin(cases[1])
    assert progress.picture().plain.splitlines() == [
        "1 of 2  lenet cpu-async seed 0  epoch 1/200",
        "  rank 0  cpu                starting",
        "  rank 1  cpu@0.4            starting",
        "  sweep: 0 of 2 runs done",
    ]


def test_runs_beside_each_other_are_a_line_each_in_the_picture(cases: list[Case]) -> None:
    progress = LiveSweep(cases, Console(record=True, width=80, stderr=True), num_jobs=2, clock=Clock())
    progress.begin(cases[0])
    progress.begin(cases[1])
    progress.saw(cases[1], ended_epoch(2))
    assert progress.picture().plain.splitlines() == [
        "[1/2] lenet solo-1 seed 0: epoch 0/200",
        "[2/2] lenet cpu-async seed 0: epoch 3/200, loss 0.250",
        "  sweep: 0 of 2 runs done",
    ]


def test_the_time_left_counts_the_runs_beside_each_other(cases: list[Case]) -> None:
    console, clock = Console(record=True, width=80, stderr=True), Clock()
    progress = PlainSweep([*cases, replace(cases[0], seed=1)], console, num_jobs=2, clock=clock)
    progress.begin(cases[0])
    progress.begin(cases[1])
    clock.now_s = 60.0
    progress.failed(cases[0], ConfigError("no room"))
    # Two runs of a minute are left, side by side, and one of them has had its minute.
    assert console.export_text() == "[1/3] lenet solo-1 seed 0: failed: no room, ETA 30 s\n"


def test_a_terminal_gets_a_picture_and_a_pipe_gets_lines(cases: list[Case]) -> None:
    with open_sweep_watcher(cases, Console(force_terminal=True, stderr=True)) as watcher:
        assert isinstance(watcher, LiveSweep)
    with open_sweep_watcher(cases, Console(force_terminal=False, stderr=True)) as watcher:
        assert isinstance(watcher, PlainSweep)
