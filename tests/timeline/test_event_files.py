"""Events on disk: one file per rank, there after a crash, merged into one timeline, and never a reason to fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.timeline.document import find_event_files, load_timeline, read_events, write_timeline
from outrider.timeline.exports import export
from outrider.timeline.recorder import Recorder

ORIGIN_S = 1_000.0


@pytest.fixture
def recorders(tmp_path: Path) -> Iterator[list[Recorder]]:
    """Of two ranks that write into one folder."""
    made = [Recorder(rank, origin_s=ORIGIN_S, world_size=2) for rank in (0, 1)]
    for recorder in made:
        recorder.write_to(tmp_path)
    yield made
    for recorder in made:
        recorder.close()


def events_of(folder: Path) -> list[dict[str, object]]:
    files = find_event_files(folder)
    assert files is not None
    return read_events(files)


def test_what_was_recorded_before_there_was_a_folder_is_in_the_file(tmp_path: Path) -> None:
    recorder = Recorder(0, origin_s=ORIGIN_S)
    recorder.event("joined")
    recorder.write_to(tmp_path)
    recorder.event("ready", device="cpu")
    recorder.close()
    assert [event["kind"] for event in events_of(tmp_path)] == ["joined", "ready"]
    assert recorder.events == []


def test_events_of_all_ranks_are_merged_in_the_order_of_time(tmp_path: Path, recorders: list[Recorder]) -> None:
    for number in range(50):
        recorders[number % 2].event("guard", value=number)
    for recorder in recorders:
        recorder.close()
    files = find_event_files(tmp_path)
    assert files is not None
    write_timeline(tmp_path / "timeline.json", files)
    document = json.loads((tmp_path / "timeline.json").read_text())
    assert [event["value"] for event in document["events"]] == list(range(50))
    assert (document["utilization"], document["missing"]) == (None, {})


def test_events_can_be_read_while_the_rank_goes_on(tmp_path: Path, recorders: list[Recorder]) -> None:
    recorders[0].event("ready", device="cpu")
    deadline_s = time.monotonic() + 30
    while not events_of(tmp_path) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert [event["kind"] for event in events_of(tmp_path)] == ["ready"]


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path, recorders: list[Recorder]) -> None:
    recorders[0].event("ready", device="cpu")
    recorders[0].close()
    with (tmp_path / "events" / "rank0.jsonl").open("ab") as file:
        file.write(b'{"t":3.0,"rank":0,"ki')
    assert [event["kind"] for event in events_of(tmp_path)] == ["ready"]


def test_a_rank_without_a_file_is_named(tmp_path: Path) -> None:
    recorder = Recorder(0, origin_s=ORIGIN_S, world_size=3)
    recorder.write_to(tmp_path)
    recorder.close()
    files = find_event_files(tmp_path)
    assert files is not None
    assert files.missing == {1: "no event file in this folder", 2: "no event file in this folder"}


def test_a_file_of_an_earlier_start_is_not_taken_but_kept(tmp_path: Path, recorders: list[Recorder]) -> None:
    recorders[0].event("ready", device="before")
    for recorder in recorders:
        recorder.close()
    later = Recorder(0, origin_s=ORIGIN_S + 1, world_size=1)
    later.write_to(tmp_path)
    later.event("ready", device="later")
    later.close()
    assert [event["device"] for event in events_of(tmp_path)] == ["later"]
    assert "before" in (tmp_path / "events" / "rank0.previous.jsonl").read_text()


def test_numbers_that_json_does_not_know_become_null(tmp_path: Path, recorders: list[Recorder]) -> None:
    recorders[0].event("guard", value=float("nan"), parts=[1.5, float("inf")], path=Path("x"))
    recorders[0].close()
    (event,) = events_of(tmp_path)
    assert (event["value"], event["parts"], event["path"]) == (None, [1.5, None], "x")


def test_a_full_disk_ends_recording_with_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "events").mkdir()
    path = tmp_path / "events" / "rank0.jsonl"
    path.symlink_to("/dev/full")
    recorder = Recorder(0, origin_s=ORIGIN_S)
    recorder.write_to(tmp_path)
    for _ in range(5_000):
        recorder.event("guard", value=1)
    recorder.close()
    problem = f"cannot write {path}: no space left on device"
    assert recorder.problem == problem
    assert capfd.readouterr().err == f"outrider: {problem}; training goes on without recording events\n"


def test_a_folder_that_cannot_be_written_ends_recording_with_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "events").write_text("in the way")
    recorder = Recorder(0, origin_s=ORIGIN_S)
    recorder.write_to(tmp_path)
    recorder.event("ready", device="cpu")
    recorder.close()
    assert capfd.readouterr().err.count("outrider: cannot write") == 1


KILLED = """
import sys, time
from pathlib import Path
from outrider.timeline.recorder import Recorder
recorder = Recorder(0, origin_s=time.time())
recorder.write_to(Path(sys.argv[1]))
recorder.event("ready", device="cpu")
recorder.event("epoch start", epoch=0)
recorder.event("window", start=0.1, batches=3, samples=24, compute_ms=1.0)
time.sleep(600)
"""


def test_a_killed_process_leaves_its_events_and_they_can_be_exported(tmp_path: Path) -> None:
    path = tmp_path / "events" / "rank0.jsonl"
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)]) as process:
        while not path.is_file() or path.read_text().count("\n") < 4:
            assert process.poll() is None
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
    timeline = load_timeline(tmp_path)
    assert [event["kind"] for event in timeline.events] == ["ready", "epoch start", "window"]
    files = export(timeline, tmp_path, ("json", "csv", "html", "perfetto"))
    assert all(file.is_file() for file in files)
    assert "The run had not ended when this page was written" in (tmp_path / "timeline.html").read_text()
    assert load_timeline(tmp_path).events == timeline.events


def test_a_timeline_of_an_earlier_start_is_not_shown_for_a_run_that_goes_on(
    tmp_path: Path, recorders: list[Recorder]
) -> None:
    (tmp_path / "timeline.json").write_text('{"schema_version": 1, "origin_s": 900.0, "events": []}')
    recorders[0].event("ready", device="cpu")
    recorders[0].close()
    assert len(load_timeline(tmp_path).events) == 1
