"""The ceiling of a run: found among the runs beside it, of the same work only, and shown in its view."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_run import FakeRun
from torch import nn

import outrider
from outrider.watch import ceiling
from outrider.watch.ceiling import Ceiling, CeilingSearch
from outrider.watch.run_catalog import RunCatalog

SAME: dict[str, Any] = {"parameters": 1_000, "options": {"epochs": 4, "batch_size": 32}}


@pytest.fixture
def compared(fake_run: FakeRun) -> FakeRun:
    """A run, and one beside it without averages."""
    fake_run.record("running", **SAME)
    other = FakeRun(fake_run.folder.parent / "apart")
    other.record("finished", policy="independent", **SAME, totals={"samples_per_s": 2_000.0})
    return fake_run


def found(run: FakeRun) -> Ceiling | None:
    record = json.loads((run.folder / "record.json").read_text())
    return CeilingSearch(run.folder.parent).of(run.folder.name, record)


def test_the_rate_of_the_same_work_without_averages_is_the_ceiling(compared: FakeRun) -> None:
    assert found(compared) == Ceiling(run="apart", rate=2_000.0)


@pytest.mark.parametrize(
    "difference",
    [
        {"policy": "cadence"},
        {"parameters": 2_000},
        {"num_samples": 5},
        {"devices": ["cpu", "cpu"]},
        {"options": {"epochs": 4, "batch_size": 64}},
        {"environment": {"cpu": "another"}},
        {"totals": {"samples_per_s": None}},
    ],
)
def test_a_run_of_other_work_is_none(compared: FakeRun, difference: dict[str, Any]) -> None:
    other = compared.folder.parent / "apart" / "record.json"
    other.write_text(json.dumps(json.loads(other.read_text()) | difference))
    assert found(compared) is None


def test_damaged_records_and_those_of_older_versions_are_passed_over(compared: FakeRun) -> None:
    damaged = FakeRun(compared.folder.parent / "damaged")
    (damaged.folder / "record.json").write_text('{"policy": "independent", ')
    assert found(compared) == Ceiling(run="apart", rate=2_000.0)
    compared.record("running", options=SAME["options"])
    assert found(compared) is None


@pytest.mark.parametrize("is_one", [True, False])
def test_the_view_tells_the_part_of_the_ceiling(compared: FakeRun, is_one: bool) -> None:
    folder = compared.folder if is_one else compared.folder.parent
    text = RunCatalog(folder).text("first")
    assert text is not None
    totals = json.loads(text)["totals"]
    assert totals["of_ceiling"] == pytest.approx(totals["rate"] / 2_000.0)
    assert totals["ceiling_run"] == "apart"


def test_a_search_is_not_repeated_at_every_look(compared: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Path] = []
    monkeypatch.setattr(ceiling, "read_record", lambda folder: looks.append(folder) or {})
    record = json.loads((compared.folder / "record.json").read_text())
    search = CeilingSearch(compared.folder.parent)
    assert [search.of(compared.folder.name, record) for _ in range(5)] == [None] * 5
    assert len(looks) == 1


def test_real_runs_are_compared(tmp_path: Path) -> None:
    for policy in ("independent", "async"):
        outrider.train(
            nn.Linear(4, 1),
            lambda parameters: torch.optim.SGD(parameters, lr=0.01),
            lambda model, batch: model(batch[0]).square().mean(),
            (torch.ones(512, 4),),
            batch_size=16,
            devices="cpu,cpu",
            policy=policy,
            run_dir=tmp_path / policy,
        ).join()
    record = json.loads((tmp_path / "async" / "record.json").read_text())
    assert record["parameters"] == 5
    told = json.loads((tmp_path / "independent" / "record.json").read_text())["totals"]["samples_per_s"]
    assert CeilingSearch(tmp_path).of("async", record) == Ceiling(run="independent", rate=told)
