"""Reading a run's folder: what is there, and what is said where something is not."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from outrider.errors import DataError
from outrider.timeline.document import Timeline, load_timeline
from outrider.timeline.spans import Span
from outrider.timeline.timeline_summary import anchor_history, summarize


def message_for(folder: Path) -> str:
    with pytest.raises(DataError) as raised:
        load_timeline(folder)
    return str(raised.value)


def is_one_lane(one: Span, other: Span) -> bool:
    return (one.rank, one.lane) == (other.rank, other.lane)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert message_for(tmp_path / "none") == (
        f"no folder {tmp_path / 'none'}\nhint: pass the folder of a run, such as runs/<time>-<policy>"
    )


def test_a_folder_of_runs_points_at_its_last(run_folder: Path) -> None:
    folder = run_folder.parent
    assert message_for(folder) == (
        f"no timeline.json in {folder}\nhint: pass one of the runs in it, such as {run_folder}"
    )


def test_a_run_that_failed_says_so(run_folder: Path) -> None:
    (run_folder / "timeline.json").unlink()
    (run_folder / "record.json").write_text('{"status": "failed"}')
    assert message_for(run_folder) == (
        f"no timeline.json in {run_folder}\n"
        "hint: its record says 'failed': a run writes its timeline when it ends"
    )  # fmt: skip


def test_damaged_json_names_the_file_and_the_place(run_folder: Path) -> None:
    (run_folder / "timeline.json").write_text('{"events": [')
    assert message_for(run_folder) == (
        f"{run_folder / 'timeline.json'} is damaged: Expecting value: line 1 column 13 (char 12)\n"
        "hint: the run has to be made again"
    )


@pytest.mark.parametrize("text", ["[]", '{"schema_version": 1, "events": [1]}', '{"schema_version": 1}'])
def test_json_that_is_no_timeline_is_damaged(run_folder: Path, text: str) -> None:
    (run_folder / "timeline.json").write_text(text)
    assert "timeline.json is damaged: " in message_for(run_folder)


def test_a_timeline_of_another_version_is_refused(run_folder: Path) -> None:
    (run_folder / "timeline.json").write_text('{"schema_version": 7, "events": []}')
    assert "has schema_version 7, this outrider reads 1" in message_for(run_folder)


def test_spans_of_a_lane_do_not_overlap(timeline: Timeline) -> None:
    neighbours = [pair for pair in pairwise(timeline.spans) if is_one_lane(*pair)]
    assert len(neighbours) == 10
    assert all(one.end_s <= other.start_s for one, other in neighbours)


def test_a_wait_that_was_known_late_lies_at_the_start_of_its_average(timeline: Timeline) -> None:
    (wait,) = [span for span in timeline.spans if span.rank == 0 and span.name == "average" and span.lane == "wait"]
    assert (wait.start_s, wait.end_s) == (3.0, 3.7)


def test_the_summary_counts_batches_samples_and_averages(timeline: Timeline) -> None:
    first, second = summarize(timeline)
    assert (first.device, first.batches, first.samples, first.share) == ("cpu", 10, 640, 0.5)
    assert (first.averages, first.average_ms) == (2, 750.0)
    assert first.compute_s == pytest.approx(1.85)
    assert second.device == "cpu@0.4"


def test_the_summary_has_recorded_waits_beside_sampled_gaps(timeline: Timeline) -> None:
    first = summarize(timeline)[0]
    assert first.waits_s["average"] == pytest.approx(1.4)
    assert first.gaps_s is not None
    assert first.gaps_s["average"] == pytest.approx(0.8)


def test_the_anchor_history_has_values_and_reasons(timeline: Timeline) -> None:
    changes = [(change.at_s, change.before, change.after, change.reason) for change in anchor_history(timeline)]
    assert changes == [(2.0, None, 20, "probe"), (4.0, 20, 24, "20 -> 24: costly")]
