"""What a rank records: events in its own time, waits by cause, and windows instead of steps."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from outrider.timeline.bounded_file import LIVE, BoundedFile
from outrider.timeline.recorder import EVENTS, Recorder
from outrider.timeline.timeline_files import read_lines
from outrider.timeline.windows import SHARED_WINDOW_S, WindowLog


@pytest.fixture
def recorder() -> Recorder:
    return Recorder(1, origin_s=time.time())


@pytest.fixture
def log(recorder: Recorder) -> WindowLog:
    return WindowLog(recorder, slept_s=lambda: 0.0)


def test_a_short_wait_is_counted_but_gets_no_event(recorder: Recorder) -> None:
    recorder.wait("data", 0.00005)
    assert recorder.events == []
    assert recorder.wait_s["data"] == 0.00005


def test_a_window_has_its_start_its_batches_and_its_samples(recorder: Recorder, log: WindowLog) -> None:
    log.stepped(samples=64, seconds=0.25)
    log.stepped(samples=32, seconds=0.5)
    log.end(7)
    (event,) = recorder.events
    assert (event["kind"], event["rank"], event["window"]) == ("window", 1, 7)
    assert (event["batches"], event["samples"], event["compute_ms"]) == (2, 96, 750.0)
    assert event["t"] - event["start"] >= 0.25


def test_a_window_without_steps_leaves_no_event(recorder: Recorder, log: WindowLog) -> None:
    log.end(0)
    assert recorder.events == []


def test_a_window_tells_the_time_for_data_and_kernels(recorder: Recorder, log: WindowLog) -> None:
    recorder.add_wait("data", 1.0)
    log.stepped(samples=64, seconds=0.25)
    recorder.add_wait("data", 0.125)
    log.waited_for_device(0.5)
    log.end(0)
    assert recorder.events[0]["data_ms"] == 125.0
    assert recorder.events[0]["compute_ms"] == 750.0


def test_a_window_tells_the_time_that_the_throttle_slept(recorder: Recorder) -> None:
    slept_s = iter([1.0, 1.5])
    log = WindowLog(recorder, slept_s=lambda: next(slept_s))
    log.stepped(samples=64, seconds=0.25)
    log.end(0)
    assert recorder.events[0]["throttle_ms"] == 500.0


def test_shared_steps_of_a_quarter_second_are_one_event(recorder: Recorder, log: WindowLog) -> None:
    log.stepped(samples=64, seconds=0.01)
    log.averaged(0.002)
    assert recorder.events == []
    log.stepped(samples=0, seconds=0.01)
    # The first step began longer ago than a window of shared steps lasts.
    log._start_s = recorder.now_s() - SHARED_WINDOW_S
    log.averaged(0.003)
    (event,) = recorder.events
    assert (event["batches"], event["samples"], event["average_ms"]) == (1, 64, 5.0)
    assert "window" not in event


def test_a_reader_who_finds_pulses_finds_the_events_before_them_too(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    class Watched(BoundedFile):
        def open(self, header: Mapping[str, Any]) -> None:
            found.extend(read_lines(tmp_path / EVENTS / "rank1.jsonl"))
            super().open(header)

    monkeypatch.setattr("outrider.timeline.recorder.BoundedFile", Watched)
    recorder.event("ready", device="cpu")
    recorder.write_to(tmp_path, has_pulses=True)
    recorder.close()
    assert [line.get("kind") for line in found] == [None, "ready"]
    assert len(read_lines(tmp_path / LIVE / "rank1.jsonl")) > 1
