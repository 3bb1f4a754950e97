"""What real runs leave of their events and epochs, whatever their number, and however the runs end."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import outrider
from outrider.policy import schedule
from outrider.record.run_events import RunEvents
from outrider.record.run_folder import RunFolder
from outrider.timeline.document import load_timeline
from outrider.timeline.recorder import Recorder
from outrider.timeline.timeline_files import read_record
from outrider.timeline.timeline_summary import summarize
from outrider.world.messages import Inbox, Message

STORE_LIMIT_BYTES = 8 * 2**20
NUM_SAMPLES = 64
PROBLEM: dict[str, Any] = {
    "model": lambda: nn.Linear(4, 1),
    "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "step": lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    "dataset": (torch.zeros(NUM_SAMPLES, 4), torch.zeros(NUM_SAMPLES, 1)),
    "batch_size": 4,
    "epochs": 2,
    "devices": "cpu,cpu",
    "policy": "cadence",
    "anchor": 1,
}


def large_events() -> nn.Module:
    """Runs in every rank before its first step: each event and each entry of the schedule becomes a large one."""
    event, entry = Recorder.event, schedule._entry
    padding = "x" * 400_000

    def padded_event(self: Recorder, kind: str, **fields: Any) -> None:
        event(self, kind, padding=padding, **fields)

    def padded_entry(effect: Any, result: object) -> Any:
        found = entry(effect, result)
        return found and [*found, padding]

    Recorder.event, schedule._entry = padded_event, padded_entry  # type: ignore[method-assign]
    return nn.Linear(4, 1)


def size_of(folder: Path, name: str) -> int:
    return sum(path.stat().st_size for path in (folder / name).iterdir())


@pytest.mark.slow
def test_a_run_with_more_events_than_a_store_takes_ends_with_its_model(tmp_path: Path) -> None:
    options = PROBLEM | {"model": large_events, "record_schedule": True, "run_dir": tmp_path / "run"}
    trained = outrider.train(**options).join()
    assert set(trained.state_dict) == {"weight", "bias"}
    assert size_of(trained.run_dir, "events") > 2 * STORE_LIMIT_BYTES
    assert size_of(trained.run_dir, "schedules") > STORE_LIMIT_BYTES
    assert sum(rank.samples for rank in summarize(load_timeline(trained.run_dir))) == 2 * NUM_SAMPLES
    segments = json.loads((trained.run_dir / "schedule.json").read_text())["segments"]
    steps = [entry for ranks in segments for entries in ranks for entry in entries if entry[0] == "step"]
    assert sum(entry[2] for entry in steps) == 2 * NUM_SAMPLES


@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_that_takes_no_events_does_not_end_training(tmp_path: Path, rank: int) -> None:
    path = tmp_path / "events" / f"rank{rank}.jsonl"
    path.parent.mkdir()
    path.symlink_to("/dev/full")
    trained = outrider.train(**PROBLEM, run_dir=tmp_path).join()
    assert len(trained.epochs) == 2
    assert set(trained.state_dict) == {"weight", "bias"}
    timeline = load_timeline(tmp_path)
    assert timeline.missing == {rank: f"cannot write {path}: no space left on device"}
    assert list(timeline.devices) == [1 - rank]
    told = (tmp_path / f"rank{rank}.log").read_text()
    assert told.count("no space left on device; training goes on without recording events") == 1
    assert f"Events of rank {rank} are missing" in (tmp_path / "timeline.html").read_text()


def test_without_event_files_there_is_still_a_model(tmp_path: Path) -> None:
    (tmp_path / "events").write_text("in the way")
    trained = outrider.train(**PROBLEM, run_dir=tmp_path).join()
    assert set(trained.state_dict) == {"weight", "bias"}
    assert json.loads((tmp_path / "record.json").read_text())["status"] == "finished"


class OtherHost:
    """A world of two hosts without a shared disk, as its rank 0 sees it at the end of a run."""

    rank, size, hosts = 0, 2, ("here", "there")

    def exchange_json(self, value: object, *, name: str, what: str) -> list[object]:
        return [value, None]


def test_events_on_another_host_are_told_as_missing(tmp_path: Path) -> None:
    events = RunEvents(RunFolder(tmp_path), OtherHost(), origin_s=time.time())  # type: ignore[arg-type]
    events.open()
    events.recorder.event("ready", device="cpu")
    events.merge()
    assert load_timeline(tmp_path).missing == {1: "they are on there, in the same folder there"}
    shown = subprocess.run(
        [sys.executable, "-m", "outrider", "timeline", str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "events of rank 1 are missing: they are on there, in the same folder there\n" in shown.stdout


ENDLESS = """
import sys, torch, outrider
from torch import nn
outrider.train(
    model=lambda: nn.Linear(4, 1),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    step=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    dataset=(torch.zeros(64, 4), torch.zeros(64, 1)),
    batch_size=4, epochs=1_000_000, devices="cpu,cpu", policy="cadence", anchor=1, run_dir=sys.argv[1],
).join()
"""


def wait_until(is_so: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + 120
    while not is_so():
        assert process.poll() is None, "the run ended by itself"
        assert time.monotonic() < deadline_s, "it did not come to that within 120 s"
        time.sleep(0.05)


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """The starter and its ranks at once, as a machine that loses power would."""
    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for member in family:
        with contextlib.suppress(ProcessLookupError):
            os.kill(member.pid, signal.SIGKILL)
    process.wait(60)
    psutil.wait_procs(family, timeout=60)
    for folder in Path(tempfile.gettempdir()).glob(f"outrider-{process.pid}-*"):
        shutil.rmtree(folder)


@pytest.mark.slow
def test_a_run_that_is_killed_leaves_its_events_and_its_epochs(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ENDLESS, str(tmp_path)]) as process:
        try:
            wait_until(lambda: num_lines(tmp_path / "epochs.jsonl") >= 20, process)
            wait_until(lambda: num_lines(tmp_path / "events" / "rank1.jsonl") >= 200, process)
        finally:
            kill_all(process)
    assert not (tmp_path / "timeline.json").exists()
    record = read_record(tmp_path)
    assert record is not None
    assert [epoch["epoch"] for epoch in record["epochs"]] == list(range(len(record["epochs"])))
    assert len(record["epochs"]) >= 20
    command = [sys.executable, "-m", "outrider", "timeline", str(tmp_path), "--export", "json,csv,html,perfetto"]
    files = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout.split()
    assert [Path(file).name for file in files] == ["timeline.json", "timeline.csv", "timeline.html", "trace.json"]
    assert all(rank.samples > 0 and rank.averages > 0 for rank in summarize(load_timeline(tmp_path)))


def test_a_run_that_fails_has_all_its_epochs_in_its_record(tmp_path: Path) -> None:
    def fail(context: outrider.EpochContext) -> None:
        if context.epoch == 7:
            raise RuntimeError("as planned")

    with pytest.raises(outrider.StepError):
        outrider.train(**PROBLEM | {"epochs": 20}, epoch_start=fail, run_dir=tmp_path).join()
    record = json.loads((tmp_path / "record.json").read_text())
    assert (record["status"], len(record["epochs"])) == ("failed", 7)
    assert record["totals"]["samples"] == 7 * NUM_SAMPLES


def test_many_short_epochs_write_few_records(tmp_path: Path) -> None:
    times = 40
    written: list[int] = []

    def look(context: outrider.EpochContext) -> None:
        if context.is_main:
            written.append((tmp_path / "record.json").stat().st_ino)
        if context.is_main and context.epoch == times - 1:
            (tmp_path / "seen").write_text(str(len(set(written))))

    options = PROBLEM | {"devices": "cpu", "epochs": times}
    outrider.train(**options, epoch_start=look, run_dir=tmp_path).join()
    assert int((tmp_path / "seen").read_text()) < times / 2
    assert len(json.loads((tmp_path / "record.json").read_text())["epochs"]) == times


def test_progress_that_nobody_reads_does_not_pile_up() -> None:
    inbox = Inbox()
    for number in range(1_000):
        for rank in (0, 1):
            inbox.put(Message(rank=rank, kind="progress", fields={"samples": number}))
        if number % 100 == 0:
            inbox.put(Message(rank=0, kind="epoch", fields={"epoch": number // 100}))
    inbox.put(None)
    read = list(iter(inbox.get, None))
    assert [message.fields["epoch"] for message in read if message.kind == "epoch"] == list(range(10))
    progress = [(message.rank, message.fields["samples"]) for message in read if message.kind == "progress"]
    assert sorted(progress) == [(0, 999), (1, 999)]


def test_progress_that_is_read_is_followed_by_newer_progress() -> None:
    inbox = Inbox()
    for number in range(3):
        inbox.put(Message(rank=0, kind="progress", fields={"samples": number}))
        message = inbox.get()
        assert message is not None
        assert message.fields["samples"] == number
