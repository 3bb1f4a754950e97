"""Long runs that are not timed: what is left of one that was stopped, and how it goes on from there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.bench.datasets.source import DataSource
from outrider.bench.suite.run_case import CHECKPOINT_EVERY, can_go_on
from outrider.bench.suite.runs import Case
from outrider.bench.suite.suite_plan import SuiteRequest, plan
from outrider.bench.suite.sweep import make_way, run_sweep
from outrider.machine.devices import parse_devices
from outrider.record import checkpoint_files
from outrider.world.messages import Message

pytestmark = pytest.mark.slow

MakeLog = Callable[[], Any]
LONG = SuiteRequest(
    models=("logistic",),
    modes=("cpu-sync",),
    devices=parse_devices("cpu,cpu@0.5"),
    data=DataSource(may_download=False, max_samples=64),
    epochs=CHECKPOINT_EVERY + 2,
    batch_size=16,
    is_timed=False,
)
# Many more epochs, or the run may be at its end before the interruption reaches it.
LONGER = replace(LONG, epochs=CHECKPOINT_EVERY + 200)
[PLANNED] = plan(LONGER)
QUICK: dict[str, Any] = {
    "devices": parse_devices("cpu,cpu"),
    "data": DataSource(may_download=False, max_samples=16),
    "batch_size": 8,
}


def stop_after(epoch: int) -> Callable[[Case, Message], None]:
    def saw(case: Case, message: Message) -> None:
        if message.kind == "epoch" and message.fields["epoch"] == epoch:
            raise KeyboardInterrupt

    return saw


@pytest.fixture(scope="module")
def left_behind(make_log: MakeLog, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a sweep that was interrupted after its first checkpoint."""
    output = tmp_path_factory.mktemp("stopped")
    log = make_log()
    log.saw = stop_after(CHECKPOINT_EVERY)
    with pytest.raises(KeyboardInterrupt):
        run_sweep([PLANNED], output=output, watcher=log)
    return output


@pytest.fixture
def stopped(left_behind: Path, tmp_path: Path) -> Path:
    """The same, to change at will."""
    return shutil.copytree(left_behind, tmp_path / "stopped")


@pytest.fixture
def folder(stopped: Path) -> Path:
    """Where the run lies in it."""
    return stopped / PLANNED.case.folder


def test_an_interrupted_run_goes_on_from_its_checkpoint_and_ends_as_if_it_had_not_been(
    stopped: Path, make_log: MakeLog, tmp_path: Path
) -> None:
    [went_on] = run_sweep([PLANNED], output=stopped, watcher=make_log()).runs
    [whole] = run_sweep([PLANNED], output=tmp_path / "whole", watcher=make_log()).runs
    events = json.loads((went_on.folder / "timeline.json").read_text())["events"]
    [resumed] = [event["epoch"] for event in events if event["kind"] == "resume"]
    assert CHECKPOINT_EVERY <= resumed < LONGER.epochs
    assert [(epoch.loss, epoch.eval) for epoch in went_on.epochs] == [(e.loss, e.eval) for e in whole.epochs]
    walls = [epoch.wall_s for epoch in went_on.epochs]
    assert walls == sorted(walls)
    assert not (went_on.folder / "checkpoints").exists()
    assert str(stopped) not in (went_on.folder / "record.json").read_text()


def test_a_users_own_loop_goes_on_too(make_log: MakeLog, tmp_path: Path) -> None:
    planned = plan(replace(LONG, models=("resnet20-graph",), modes=("graph-sync",), depth=8, **QUICK))
    log, stop = make_log(), stop_after(CHECKPOINT_EVERY)

    def saw(case: Case, message: Message) -> None:
        try:
            stop(case, message)
        except KeyboardInterrupt:
            # A sweep that is killed has no time to put its things in order.
            shutil.copytree(tmp_path / "stopped", tmp_path / "killed")
            raise

    log.saw = saw
    with pytest.raises(KeyboardInterrupt):
        run_sweep(planned, output=tmp_path / "stopped", watcher=log)
    assert can_go_on(tmp_path / "killed" / planned[0].case.folder, planned[0].case)
    [went_on] = run_sweep(planned, output=tmp_path / "stopped", watcher=make_log()).runs
    [whole] = run_sweep(planned, output=tmp_path / "whole", watcher=make_log()).runs
    assert went_on.went_on
    assert [(epoch.epoch, epoch.loss, epoch.eval) for epoch in went_on.epochs] == [
        (epoch.epoch, epoch.loss, epoch.eval) for epoch in whole.epochs
    ]
    walls = [epoch.wall_s for epoch in went_on.epochs]
    assert walls == sorted(walls)
    models = [(run.folder / "model.safetensors").read_bytes() for run in (went_on, whole)]
    assert models[0] == models[1]
    assert not (went_on.folder / "checkpoints").exists()
    assert str(tmp_path) not in (went_on.folder / "record.json").read_text()


def test_checkpoints_that_a_user_asks_for_are_all_kept(make_log: MakeLog, tmp_path: Path) -> None:
    asked = plan(replace(LONG, settings={"checkpoint_every": 5.0}))
    [run] = run_sweep(asked, output=tmp_path, watcher=make_log()).runs
    assert [path.name[:10] for path in sorted((run.folder / "checkpoints").iterdir())] == ["epoch00005", "epoch00010"]
    assert not can_go_on(run.folder, asked[0].case)


def test_a_run_that_failed_goes_on_once(folder: Path) -> None:
    record = json.loads((folder / "record.json").read_text())
    record |= {"status": "failed", "error": {"message": "no"}}
    (folder / "record.json").write_text(json.dumps(record))
    assert can_go_on(folder, PLANNED.case)
    record["options"] = {"resume": folder.name}
    (folder / "record.json").write_text(json.dumps(record))
    assert not can_go_on(folder, PLANNED.case)
    make_way(folder, PLANNED.case)
    assert not folder.exists()


def test_a_checkpoint_that_cannot_be_read_is_none(folder: Path) -> None:
    assert can_go_on(folder, PLANNED.case)
    (checkpoint_files.find(folder)[0] / "state.json").write_text("{")
    assert not can_go_on(folder, PLANNED.case)


@pytest.mark.parametrize(
    "changes",
    [{"is_timed": True}, {"epochs": CHECKPOINT_EVERY}, {"mode": "ddp"}],
    ids=["timed", "short", "peer"],
)
def test_other_runs_never_go_on(left_behind: Path, changes: dict[str, Any]) -> None:
    assert not can_go_on(left_behind / PLANNED.case.folder, replace(PLANNED.case, **changes))
