"""The files that other tools read: columns of the table, validity of the trace, and which are written when."""

from __future__ import annotations

import csv
import io
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import ConfigError, DataError
from outrider.timeline.document import Timeline, load_timeline
from outrider.timeline.exports import COLUMNS, as_csv, as_trace, complete_run, export, parse_formats


@pytest.fixture
def rows(timeline: Timeline) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(as_csv(timeline))))


@pytest.fixture
def trace(timeline: Timeline) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(as_trace(timeline))["traceEvents"]
    return events


def named(trace: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in trace if event["name"] == name]


# CSV


def test_the_table_has_its_columns_and_is_in_the_order_of_time(rows: list[dict[str, str]]) -> None:
    assert tuple(rows[0]) == COLUMNS
    starts = [float(row["start_s"]) for row in rows]
    assert starts == sorted(starts)


def test_every_event_sample_and_gap_is_a_row(rows: list[dict[str, str]], timeline: Timeline) -> None:
    assert len(rows) == len(timeline.events) + 2 * 90 + 1


def test_a_gap_has_its_milliseconds_and_its_cause(rows: list[dict[str, str]]) -> None:
    (gap,) = [row for row in rows if row["kind"] == "idle gap"]
    assert (gap["rank"], gap["device"], float(gap["value"]), gap["cause"]) == ("0", "cpu", 800.0, "average")


def test_what_belongs_to_one_kind_is_json(rows: list[dict[str, str]]) -> None:
    (change,) = [row for row in rows if row["kind"] == "anchor"]
    assert (change["value"], change["reason"]) == ("24", "20 -> 24: costly")
    assert json.loads(change["details"]) == {"from": 20, "to": 24}


# Perfetto


def test_every_trace_event_has_what_the_format_wants(trace: list[dict[str, Any]]) -> None:
    assert {event["ph"] for event in trace} == {"M", "X", "C", "i"}
    assert all({"ph", "ts", "pid", "tid", "name"} <= set(event) for event in trace)
    assert all(isinstance(event["ts"], int) and event["ts"] >= 0 for event in trace)
    assert all(isinstance(event["dur"], int) and event["dur"] >= 0 for event in trace if event["ph"] == "X")
    assert all(event["s"] in ("g", "p", "t") for event in trace if event["ph"] == "i")


def test_slices_of_a_thread_do_not_overlap(trace: list[dict[str, Any]]) -> None:
    slices = sorted((event["pid"], event["tid"], event["ts"], event["dur"]) for event in trace if event["ph"] == "X")
    neighbours = [(one, other) for one, other in pairwise(slices) if one[:2] == other[:2]]
    assert len(neighbours) == 11
    assert all(start + length <= following for (_, _, start, length), (_, _, following, _) in neighbours)


def test_ranks_are_processes_with_their_device_in_the_name(trace: list[dict[str, Any]]) -> None:
    names = {event["pid"]: event["args"]["name"] for event in named(trace, "process_name")}
    assert names == {0: "run run", 1: "rank 0 (cpu)", 2: "rank 1 (cpu@0.4)"}


def test_times_are_microseconds(trace: list[dict[str, Any]]) -> None:
    first = named(trace, "window")[0]
    assert (first["ts"], first["dur"], first["args"]["batches"]) == (2_000_000, 1_000_000, 4)


def test_utilization_and_anchor_are_counters(trace: list[dict[str, Any]]) -> None:
    assert [event["args"] for event in named(trace, "anchor") if event["ph"] == "C"] == [{"anchor": 20}, {"anchor": 24}]
    assert len(named(trace, "utilization %")) == 2 * 90


def test_decisions_are_instants_with_their_reason(trace: list[dict[str, Any]]) -> None:
    (verdict,) = named(trace, "guard")
    assert (verdict["ph"], verdict["args"]["reason"]) == ("i", "drift 0.03 is above 0.02")


# Which files


def test_each_format_has_its_file(timeline: Timeline, run_folder: Path) -> None:
    files = export(timeline, run_folder, ("json", "csv", "html", "perfetto"))
    assert [path.name for path in files] == ["timeline.json", "timeline.csv", "timeline.html", "trace.json"]
    assert all(path.is_file() for path in files)


def test_formats_are_separated_by_commas() -> None:
    assert parse_formats("html, csv,html") == ("html", "csv")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("htm", "unknown format 'htm'\nhint: did you mean html? formats are json, csv, html, perfetto"),
        (",", "no format given\nhint: formats are json, csv, html, perfetto"),
    ],
)
def test_an_unknown_format_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_formats(text)
    assert str(raised.value) == message


def test_a_run_that_ends_gets_table_trace_and_page(run_folder: Path) -> None:
    complete_run(run_folder)
    assert {"timeline.csv", "trace.json", "timeline.html"} <= {path.name for path in run_folder.iterdir()}


def test_without_plotly_a_run_that_ends_gets_no_page(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.timeline.exports.has_plotly", lambda: False)
    complete_run(run_folder)
    assert not (run_folder / "timeline.html").exists()
    assert (run_folder / "trace.json").is_file()


def test_a_folder_without_a_timeline_is_left_alone(tmp_path: Path) -> None:
    complete_run(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_record_gets_idle_time_by_rank_and_cause(run_folder: Path) -> None:
    complete_run(run_folder)
    record = json.loads((run_folder / "record.json").read_text())
    assert record["status"] == "finished"
    assert [rank["average"] for rank in record["idle"]["waits_s"]] == [pytest.approx(1.4)] * 2
    assert [rank["average"] for rank in record["idle"]["gaps_s"]] == [pytest.approx(0.8), 0.0]


def test_a_folder_that_cannot_be_written_is_an_error(timeline: Timeline, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^cannot write .*timeline\.csv: no such file or directory"):
        export(timeline, tmp_path / "gone", ["csv"])


def test_a_timeline_without_ranks_can_be_exported(run_folder: Path) -> None:
    (run_folder / "timeline.json").write_text('{"schema_version": 1, "utilization": null, "events": []}')
    files = export(load_timeline(run_folder), run_folder, ("csv", "html", "perfetto"))
    assert all(path.is_file() for path in files)
