"""Trackers of a run: which values they get, when they end, and that training does not depend on them."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outrider
from outrider.rank import live_values
from outrider.trackers import TrackedRun, Tracker

Trainer = Callable[..., outrider.Run]


class Noted(Tracker):
    """Keeps what it is told."""

    def __init__(self, fails_in: str = "") -> None:
        self.fails_in = fails_in
        self.run: TrackedRun | None = None
        self.steps: list[int] = []
        self.values: list[dict[str, float]] = []
        self.status: list[str] = []

    def start(self, run: TrackedRun) -> Mapping[str, str]:
        self._reach("start")
        self.run = run
        return {"id": f"of {run.name}"}

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._reach("log")
        self.values.append(dict(values))
        self.steps.append(step)

    def finish(self, status: str) -> None:
        self._reach("finish")
        self.status.append(status)

    def _reach(self, place: str) -> None:
        if place == self.fails_in:
            raise OSError("no space\nleft on device")


class OtherNoted(Noted):
    """A second one, of another name."""


def step_that_logs(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = (model(batch[0]) - batch[1]).square().mean()
    outrider.log("twice", 2 * loss)
    return loss


def mean_output(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch[0]).mean()


def stop_after_epoch_0(context: outrider.EpochContext) -> None:
    context.stop()


def raise_in_epoch_1(context: outrider.EpochContext) -> None:
    if context.epoch == 1:
        raise ValueError("on purpose")


def test_every_epoch_is_logged_at_its_step(train_here: Trainer) -> None:
    tracker = Noted()
    trained = train_here(trackers=tracker, step=step_that_logs, epochs=2).join()
    assert tracker.steps == [12, 24]
    assert [values["loss"] for values in tracker.values] == [epoch.loss for epoch in trained.epochs]
    assert [values["logged/twice"] for values in tracker.values] == [epoch.logged["twice"] for epoch in trained.epochs]
    assert tracker.values[1]["samples_seen"] == 192
    assert tracker.status == ["finished"]


def test_the_values_are_those_of_the_world_and_of_each_rank(train_here: Trainer) -> None:
    tracker = Noted()
    evaluation = {"evaluate": mean_output, "eval_dataset": (torch.ones(4, 4),)}
    train_here(trackers=[tracker], epochs=1, **evaluation).join()
    world = {"epoch", "loss", "eval", "learning_rate", "samples_per_s", "wait_fraction", "samples_seen", "train_s"}
    rank = {"rank0/loss", "rank0/samples_per_s", "rank0/share", "rank0/wait_fraction", "rank0/peak_memory_bytes"}
    assert world | rank <= tracker.values[0].keys()
    assert tracker.values[0]["rank0/share"] == 1.0
    assert None not in tracker.values[0].values()


def test_a_tracker_is_told_the_options_and_devices(train_here: Trainer, tmp_path: Path) -> None:
    tracker = Noted()
    train_here(trackers=[tracker, "csv"], epochs=1, seed=5).join()
    assert tracker.run is not None
    assert (tracker.run.name, tracker.run.folder, tracker.run.step) == ("run", tmp_path / "run", 0)
    told = {name: tracker.run.config[name] for name in ("seed", "batch_size", "policy", "devices", "trackers")}
    assert told == {"seed": 5, "batch_size": 8, "policy": "cadence", "devices": ("cpu",), "trackers": ("Noted", "csv")}


def test_long_epochs_are_logged_within(train_here: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_values, "LIVE_EVERY_S", 0.0)
    tracker = Noted()
    train_here(trackers=tracker, epochs=1, anchor=3).join()
    assert len(tracker.steps) > 3
    assert tracker.steps == sorted(tracker.steps)
    assert tracker.steps[-2:] == [12, 12]
    assert tracker.values[0].keys() == {
        "live/loss",
        "live/samples_per_s",
        "live/learning_rate",
        "rank0/live_samples_per_s",
    }
    lengths = [after - before for before, after in pairwise([0, *tracker.steps])]
    losses = [values["live/loss"] * length for values, length in zip(tracker.values[:-1], lengths, strict=False)]
    assert sum(losses) / 12 == pytest.approx(tracker.values[-1]["loss"])


@pytest.mark.parametrize(
    ("place", "what", "steps"),
    [
        ("start", "could not be started", []),
        ("log", "failed at step 12", []),
        ("finish", "could not end its run", [12, 24]),
    ],
)
def test_a_failing_tracker_is_left_out_and_training_goes_on(
    train_here: Trainer, capfd: pytest.CaptureFixture[str], place: str, what: str, steps: list[int]
) -> None:
    failing, other = Noted(fails_in=place), OtherNoted()
    trained = train_here(trackers=[failing, other], epochs=2).join()
    assert len(trained.epochs) == 2
    assert (failing.steps, other.steps, other.status) == (steps, [12, 24], ["finished"])
    lines = [line for line in capfd.readouterr().err.splitlines() if "tracker" in line]
    assert lines == [f"outrider: the tracker 'Noted' {what} (OSError: no space); training goes on without it"]


def test_the_end_of_a_run_is_told(train_here: Trainer, tmp_path: Path) -> None:
    stopped, failed = Noted(), Noted()
    train_here(trackers=stopped, epochs=3, epoch_end=stop_after_epoch_0).join()
    with pytest.raises(outrider.StepError):
        train_here(trackers=failed, epochs=3, epoch_end=raise_in_epoch_1, run_dir=tmp_path / "failed").join()
    assert (stopped.status, failed.status) == (["stopped"], ["failed"])


def test_a_resumed_run_goes_on_in_its_trackers(train_here: Trainer, tmp_path: Path) -> None:
    train_here(trackers=["csv", Noted()], epochs=3, epoch_end=stop_after_epoch_0).join()
    tracker = Noted()
    train_here(trackers=["csv", tracker], epochs=3, resume="auto").join()
    assert tracker.run is not None
    assert (tracker.run.step, tracker.run.earlier, tracker.steps) == (12, {"id": "of run"}, [24, 36])
    with (tmp_path / "run" / "metrics.csv").open(newline="") as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["12", "24", "36"]


def test_a_run_from_a_named_checkpoint_is_a_new_one_in_its_trackers(train_here: Trainer, tmp_path: Path) -> None:
    train_here(trackers=Noted(), epochs=2, checkpoint_every=1).join()
    newest = max((tmp_path / "run" / "checkpoints").iterdir())
    continued, begun = Noted(), Noted()
    train_here(trackers=continued, epochs=3, resume=tmp_path / "run", run_dir=tmp_path / "on").join()
    train_here(trackers=begun, epochs=3, resume=newest, run_dir=tmp_path / "new").join()
    assert continued.run is not None
    assert begun.run is not None
    assert (continued.run.earlier, begun.run.earlier) == ({"id": "of run"}, None)
    assert continued.steps == begun.steps == [36]


def test_a_missing_library_is_refused_before_training(train_here: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(outrider.ConfigError, match=r'pip install "outrider\[trackio\]"'):
        train_here(trackers="trackio", epochs=1).join()


def test_a_session_tells_its_trackers_too(tmp_path: Path) -> None:
    tracker = Noted()
    model = nn.Linear(4, 1)
    with outrider.Session(devices="cpu", run_dir=tmp_path / "loop", trackers=tracker) as s:
        model, optimizer = s.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        for _ in s.epochs(2):
            for (inputs,) in s.batches((torch.ones(20, 4),), batch_size=5):
                loss = model(inputs).square().mean()
                s.log("twice", 2 * loss)
                s.step(loss, optimizer=optimizer)
    assert (tracker.steps, tracker.status) == ([4, 8], ["finished"])
    assert tracker.values[1]["logged/twice"] == pytest.approx(2 * tracker.values[1]["loss"])
