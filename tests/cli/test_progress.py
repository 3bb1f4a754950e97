"""What is shown of recorded messages, live and in lines."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from outrider.bench.modes import ModeResult
from outrider.cli.progress import (
    LiveWatcher,
    ModeView,
    PlainWatcher,
    epoch_line,
    live_lines,
    open_watcher,
    result_line,
)
from outrider.record.epoch_metrics import from_json
from outrider.world.messages import Message

EPOCH: dict[str, Any] = {
    "epoch": 0,
    "loss": 0.51234,
    "eval": 0.985,
    "samples": 3_000,
    "seconds": 2.0,
    "samples_per_s": 1_500.0,
    "share_by_rank": [0.7, 0.3],
    "logged": {},
    "learning_rate": 1e-3,
    "averages": 5,
    "anchor": 12,
    "drift": 0.01,
    "exposed_average_fraction": 0.01,
    "wait_fraction": 0.25,
    "eval_s": 0.1,
    "train_s": 2.0,
    "wall_s": 2.1,
    "is_complete": True,
}
RESULT = ModeResult(mode="cpu-cadence", epochs=(from_json(EPOCH),), run_dir=Path("runs/cpu-cadence"))


class Clock:
    """Time that passes when told."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def progress(rank: int, samples: int, *, epoch: int = 0, loss: float | None = 0.5) -> Message:
    fields = {"epoch": epoch, "samples": samples, "num_samples": 3_000, "anchor": 12, "loss": loss}
    return Message(rank=rank, kind="progress", fields=fields)


def view_of(clock: Clock) -> ModeView:
    return ModeView("cpu-cadence", devices=["cpu", "cpu@0.4"], position=5, num_modes=7, epochs=2, clock=clock)


def view_under_way() -> ModeView:
    clock = Clock()
    view = view_of(clock)
    view.saw(progress(0, 0))
    view.saw(progress(1, 0))
    clock.now_s = 0.5
    view.saw(progress(0, 700, loss=0.4))
    view.saw(progress(1, 300, loss=0.8))
    return view


def test_speed_is_samples_over_time_between_messages() -> None:
    view = view_under_way()
    assert [rank.samples_per_s for rank in view.ranks] == [1_400.0, 600.0]


def test_speed_follows_a_change_smoothly() -> None:
    clock = Clock()
    view = view_of(clock)
    view.saw(progress(0, 0))
    clock.now_s = 1.0
    view.saw(progress(0, 1_000))
    clock.now_s = 2.0
    view.saw(progress(0, 1_500))
    assert view.ranks[0].samples_per_s == 1_000 + 0.4 * (500 - 1_000)


def test_the_pause_between_epochs_does_not_count_as_slow_training() -> None:
    clock = Clock()
    view = view_of(clock)
    view.saw(progress(0, 0))
    clock.now_s = 1.0
    view.saw(progress(0, 1_000))
    view.saw(Message(rank=0, kind="epoch", fields=EPOCH))
    clock.now_s = 100.0
    view.saw(progress(0, 10, epoch=1))
    assert view.ranks[0].samples_per_s == 1_000.0


def test_shares_and_loss_are_of_the_samples_so_far() -> None:
    view = view_under_way()
    assert view.shares == [0.7, 0.3]
    assert view.loss == pytest.approx(0.4 * 0.7 + 0.8 * 0.3)


def test_the_time_left_counts_the_epochs_to_come() -> None:
    assert view_under_way().eta_s == (2 * 3_000 - 1_000) / 2_000


def test_no_time_left_is_told_before_all_ranks_have_a_speed() -> None:
    clock = Clock()
    view = view_of(clock)
    view.saw(progress(0, 0))
    clock.now_s = 1.0
    view.saw(progress(0, 1_000))
    assert view.eta_s is None


def test_a_rank_that_rests_does_not_hide_the_time_left() -> None:
    clock = Clock()
    view = view_of(clock)
    view.saw(Message(rank=0, kind="epoch", fields=EPOCH))
    view.saw(progress(0, 0, epoch=1))
    clock.now_s = 1.0
    view.saw(progress(0, 1_000, epoch=1))
    assert view.eta_s == 2.0


def test_a_mode_whose_last_epoch_ended_is_shown_as_complete() -> None:
    view = view_under_way()
    view.saw(Message(rank=0, kind="epoch", fields=EPOCH | {"epoch": 1}))
    assert live_lines(view)[0].startswith("6 of 7  cpu-cadence  epoch 2/2  100%")


def test_a_late_message_of_the_epoch_before_is_ignored() -> None:
    view = view_under_way()
    view.saw(Message(rank=0, kind="epoch", fields=EPOCH))
    view.saw(progress(1, 900, epoch=0))
    assert view.samples == 0


def test_shares_of_the_last_epoch_stand_until_the_next_has_samples() -> None:
    view = view_under_way()
    view.saw(Message(rank=0, kind="epoch", fields=EPOCH))
    assert view.shares == [0.7, 0.3]


def test_the_picture_shows_every_rank() -> None:
    assert live_lines(view_under_way()) == [
        "6 of 7  cpu-cadence  epoch 1/2  33%  loss 0.520  anchor 12  ETA 2 s",
        "  rank 0  cpu         1,400 samples/s  share 70%",
        "  rank 1  cpu@0.4       600 samples/s  share 30%",
    ]


def test_the_picture_before_the_first_message_says_that_ranks_start() -> None:
    assert live_lines(view_of(Clock())) == [
        "6 of 7  cpu-cadence  epoch 1/2",
        "  rank 0  cpu                starting",
        "  rank 1  cpu@0.4            starting",
    ]


def test_an_epoch_is_one_line() -> None:
    view = view_under_way()
    view.saw(Message(rank=0, kind="epoch", fields=EPOCH))
    assert epoch_line(view) == "  1/2  loss 0.512  eval 98.5%  1,500/s  share 70/30%  anchor 12  ETA 2 s"


def test_a_mode_that_ended_is_one_line() -> None:
    assert result_line(RESULT) == "cpu-cadence      1,500 samples/s  eval 98.5%  2.0 s"


def test_without_a_terminal_progress_is_plain_lines() -> None:
    stream = io.StringIO()
    with open_watcher(2, Console(file=stream, soft_wrap=True)) as watcher:
        assert isinstance(watcher, PlainWatcher)
        watcher.begin("cpu-cadence", devices=["cpu", "cpu@0.4"], position=5, num_modes=7)
        watcher.saw(Message(rank=0, kind="epoch", fields=EPOCH))
        watcher.end(RESULT)
    assert stream.getvalue() == (
        "6 of 7: cpu-cadence on cpu + cpu@0.4 (/s: samples per second of all ranks)\n"
        "  1/2  loss 0.512  eval 98.5%  1,500/s  share 70/30%  anchor 12\n"
        "cpu-cadence      1,500 samples/s  eval 98.5%  2.0 s\n"
    )


def test_on_a_terminal_the_picture_is_live_and_ended_modes_stay() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=80, no_color=True, _environ={"TERM": "xterm"})
    with open_watcher(2, console) as watcher:
        assert isinstance(watcher, LiveWatcher)
        watcher.begin("cpu-cadence", devices=["cpu", "cpu@0.4"], position=5, num_modes=7)
        watcher.saw(progress(0, 700))
        assert watcher.picture().plain.splitlines()[0].startswith("6 of 7  cpu-cadence  epoch 1/2  23%")
        watcher.end(RESULT)
    assert "cpu-cadence      1,500 samples/s  eval 98.5%  2.0 s" in stream.getvalue()
