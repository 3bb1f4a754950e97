"""What is read of a run that goes on: complete lines only, the newest start only, never more than a bound."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from fake_run import FakeRun

from outrider.timeline.pulses import as_line
from outrider.watch.run_catalog import RunCatalog
from outrider.watch.run_reader import RunReader
from outrider.watch.run_series import MAX_NUMBERS, series
from outrider.watch.run_view import view


def read(run: FakeRun) -> RunReader:
    reader = RunReader(run.folder)
    reader.refresh()
    return reader


def test_pulses_devices_and_record_are_read(fake_run: FakeRun) -> None:
    reader = read(fake_run)
    assert [len(reader.pulses[rank]) for rank in (0, 1)] == [40, 40]
    assert reader.devices == {0: "cpu", 1: "cpu@0.5"}
    assert reader.condition(1)["percent"] == 79.0
    assert (reader.status, reader.is_over) == ("running", False)


def test_a_line_that_is_being_written_is_read_when_it_is_complete(fake_run: FakeRun) -> None:
    reader = read(fake_run)
    text = json.dumps(as_line(fake_run.pulse(0))) + "\n"
    with (fake_run.folder / "live" / "rank0.jsonl").open("a") as file:
        file.write(text[:30])
        file.flush()
        reader.refresh()
        assert len(reader.pulses[0]) == 40
        file.write(text[30:])
    reader.refresh()
    assert len(reader.pulses[0]) == 41


def test_damaged_lines_are_left_out(fake_run: FakeRun) -> None:
    with (fake_run.folder / "live" / "rank0.jsonl").open("ab") as file:
        file.write(b"\xff\xfe\n{}\n[]\nnull\n")
    with (fake_run.folder / "live" / "devices.jsonl").open("ab") as file:
        file.write(b'{"t":1}\n{"t":1,"devices":3}\n')
    assert len(read(fake_run).pulses[0]) == 40
    view(read(fake_run))


def test_a_file_that_was_rewritten_is_read_anew(fake_run: FakeRun) -> None:
    """As the rank does when its file reaches its bound."""
    reader = read(fake_run)
    path = fake_run.folder / "live" / "rank0.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.with_suffix(".new").write_text("".join(lines[:1] + lines[-10:]))
    os.replace(path.with_suffix(".new"), path)
    reader.refresh()
    assert len(reader.pulses[0]) == 10


def test_a_resumed_run_shows_its_newest_start(fake_run: FakeRun) -> None:
    reader = read(fake_run)
    shutil.rmtree(fake_run.folder)
    again = FakeRun(fake_run.folder, ranks=1)
    again.run_for(2.0)
    reader.refresh()
    assert {rank: len(known) for rank, known in reader.pulses.items()} == {0: 4}
    assert reader.origin_s == again.origin_s


def test_files_of_an_earlier_start_are_ignored(fake_run: FakeRun) -> None:
    old = {"schema_version": 1, "rank": 2, "world_size": 3, "origin_s": fake_run.origin_s - 100}
    fake_run.append("live/rank2.jsonl", old)
    fake_run.append("live/rank2.jsonl", as_line(fake_run.pulse(1)))
    assert sorted(read(fake_run).pulses) == [0, 1]


def test_a_long_run_is_kept_within_a_bound_and_its_samples_are_exact(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "long", ranks=1)
    lines = "".join(json.dumps(as_line(run.pulse(0))) + "\n" for _ in range(10_000))
    with (run.folder / "live" / "rank0.jsonl").open("a") as file:
        file.write(lines)
    reader = read(run)
    assert len(reader.pulses[0]) <= 900
    assert view(reader)["run"]["samples"] == 10_000 * 320


@pytest.mark.parametrize("ranks", [1, 2, 4, 16, 64])
@pytest.mark.parametrize("seconds", [0.4, 30.0, 3_000.0, 400_000.0])
def test_charts_have_a_bounded_number_of_points(tmp_path: Path, ranks: int, seconds: float) -> None:
    run = FakeRun(tmp_path / "run", ranks=ranks)
    step = seconds / 20
    pulses = {
        rank: [run.pulse(rank, end_s=(i + 1) * step, seconds=step, spent_s={"compute": step}) for i in range(20)]
        for rank in range(ranks)
    }
    columns = series(pulses, end_s=seconds, percents={})
    numbers = len(columns["t"]) * (3 + 4 * ranks)
    assert numbers <= max(MAX_NUMBERS, 20 * (3 + 4 * ranks))
    lengths = {len(columns[name]) for name in ("t", "seen", "loss", "rate")}
    assert len(lengths) == 1


def test_the_samples_of_a_chart_are_those_of_the_pulses(fake_run: FakeRun) -> None:
    columns = view(read(fake_run))["series"]
    assert columns["seen"][-1] == 20 * 2 * 480
    assert set(columns["rate"]) == {960.0}
    assert [one["share"][-1] for one in columns["ranks"]] == [66.7, 33.3]
    assert columns["loss"] == sorted(columns["loss"], reverse=True)


def test_a_run_that_ends_while_it_is_watched_says_so(fake_run: FakeRun) -> None:
    reader = read(fake_run)
    assert view(reader)["verdict"]["kind"] == "fine"
    epoch = {"epoch": 0, "loss": 0.5, "eval": 0.91, "samples": 19_200, "seconds": 20.0, "averages": 9}
    fake_run.record("finished", epochs=[epoch], totals={"samples_per_s": 960.0, "eval": 0.91})
    reader.refresh()
    shown = view(reader)
    assert shown["verdict"]["sentence"] == "The run is finished: 1 epoch, 960 samples/s, eval 0.91."
    assert (shown["run"]["is_over"], shown["run"]["seconds"]) == (True, 20.0)


def test_a_failure_is_told_with_its_words(fake_run: FakeRun) -> None:
    fake_run.record("failed", error={"type": "StepError", "message": "rank 1 (cpu), step 3: no", "rank": 1, "step": 3})
    verdict = view(read(fake_run))["verdict"]
    assert (verdict["level"], verdict["rank"]) == ("problem", 1)
    assert verdict["sentence"] == "The run failed: rank 1 (cpu), step 3: no"


def test_a_folder_that_vanishes_leaves_what_was_seen(fake_run: FakeRun) -> None:
    reader = read(fake_run)
    shutil.rmtree(fake_run.folder)
    reader.refresh()
    shown = view(reader)
    assert (shown["verdict"]["kind"], shown["run"]["status"]) == ("gone", "gone")
    assert shown["series"]["seen"][-1] == 19_200


def test_an_empty_folder_is_a_run_that_is_starting(tmp_path: Path) -> None:
    (tmp_path / "live").mkdir()
    reader = RunReader(tmp_path)
    reader.refresh()
    assert view(reader)["verdict"]["kind"] == "starting"


def test_decisions_are_told_in_words(fake_run: FakeRun) -> None:
    fake_run.event(0, kind="plan", value=[4, 2], reason="rank 1 sets the pace", anchor=2)
    fake_run.event(0, kind="transport", value="shared memory", bytes=4_000_000)
    fake_run.event(0, kind="epoch end", epoch=0, loss=0.5, eval=None, waits_ms={})
    fake_run.event(0, kind="average end", window=3, ms=4.0, drift=0.01)
    fake_run.event(1, kind="plan", value=[9, 9], reason="another rank", anchor=9)
    shown = view(read(fake_run))
    assert shown["plan"] == {
        "kind": "plan",
        "value": [4, 2],
        "reason": "rank 1 sets the pace",
        "policy": None,
        "policy_reason": None,
    }
    assert (shown["totals"]["anchor"], shown["totals"]["drift"], shown["totals"]["average_bytes"]) == (
        2,
        0.01,
        4_000_000,
    )
    assert [note["words"] for note in shown["notes"]] == ["epoch 1: loss 0.5", "averages go over shared memory"]


@pytest.mark.parametrize(
    ("fields", "progress"),
    [
        ({}, 0.048),
        ({"options": {"epochs": 1, "steps": 1_000, "batch_size": [64, 32]}}, 0.4),
        ({"options": {"epochs": 1, "samples": 38_400}}, 0.5),
        ({"resumed_from": "epoch-1", "epochs": [{}, {}]}, 0.5),
    ],
)
def test_progress_is_that_of_the_whole_run(fake_run: FakeRun, fields: dict[str, Any], progress: float) -> None:
    fake_run.record("running", **fields)
    shown = view(read(fake_run))["run"]
    assert shown["progress"] == progress
    assert shown["num_epochs"] == (4 if "options" not in fields else None)


def test_what_was_planned_before_a_change_of_policy_is_over(fake_run: FakeRun) -> None:
    fake_run.event(0, kind="plan", value=[4, 2], reason="rank 1 sets the pace", anchor=2)
    fake_run.event(0, kind="policy", value="exact", reason="local steps learned worse")
    shown = view(read(fake_run))
    assert (shown["plan"]["kind"], shown["plan"]["policy"], shown["totals"]["anchor"]) == (None, "exact", None)
    fake_run.event(0, kind="split", t=2.0, value=[3, 1], reason="the slowest rank takes 5 ms")
    for number in range(100):
        fake_run.event(0, kind="checkpoint", t=3.0, epoch=number, path="here")
    shown = view(read(fake_run))
    assert (shown["plan"]["kind"], shown["plan"]["policy"]) == ("split", "exact")


def test_of_a_run_on_several_hosts_a_part_is_not_shown_as_the_whole(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", ranks=4)
    run.run_for(2.0)
    for rank in (2, 3):
        (run.folder / "live" / f"rank{rank}.jsonl").unlink()
    shown = view(read(run))
    assert (shown["run"]["unseen"], shown["run"]["progress"], shown["totals"]["gain"]) == (2, None, None)


@pytest.mark.parametrize("content", ["[]", "{}", '{"devices": 3}', "no json"])
def test_a_project_with_a_configuration_of_its_own_is_no_run(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    (tmp_path / "live").mkdir()
    FakeRun(tmp_path / "mine").run_for(1.0)
    assert RunCatalog(tmp_path).names() == ["mine"]
    reader = RunReader(tmp_path)
    reader.refresh()
    assert view(reader)["verdict"]["kind"] == "starting"


def test_a_folder_that_becomes_a_run_is_shown_as_one(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    catalog = RunCatalog(folder)
    assert catalog.text(None) is None
    FakeRun(folder).run_for(1.0)
    assert catalog.names() == ["mine"]
    assert json.loads(catalog.text(None) or "")["run"]["samples"] == 960


def test_the_newest_of_several_runs_is_shown_first(fake_run: FakeRun) -> None:
    second = FakeRun(fake_run.folder.parent / "second")
    os.utime(second.folder / "record.json", (2e9, 2e9))
    catalog = RunCatalog(fake_run.folder.parent)
    assert catalog.names() == ["second", "first"]
    assert json.loads(catalog.text(None) or "")["run"]["name"] == "second"
    assert json.loads(catalog.text("first") or "")["run"]["name"] == "first"
    assert catalog.text("../second") is None
    assert catalog.text("") is None
