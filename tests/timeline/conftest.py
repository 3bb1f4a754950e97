"""A run of two ranks as its folder holds it, written by hand: every kind of event once or twice, at round times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.timeline.document import Timeline, load_timeline

Event = dict[str, Any]
WAITS_MS = {"startup": 100.0, "epoch boundary": 0.0, "average": 700.0, "rest": 0.0, "data": 50.0, "evaluation": 0.0}


def rank_events(rank: int, device: str) -> list[Event]:
    """Set-up until 1.0, epoch 0 from 2.0 to 6.0 with two windows, evaluation to 7.0, epoch 1 from 8.0 to 9.0."""
    return [
        {"t": 1.0, "rank": rank, "kind": "ready", "device": device, "gpu": None},
        {"t": 2.0, "rank": rank, "kind": "wait", "cause": "startup", "ms": 100.0},
        {"t": 2.0, "rank": rank, "kind": "epoch start", "epoch": 0},
        {"t": 3.0, "rank": rank, "kind": "window", "window": 0, "start": 2.0, "batches": 4, "samples": 256,
         "compute_ms": 900.0, "data_ms": 50.0},
        {"t": 3.0, "rank": rank, "kind": "average start", "window": 0},
        {"t": 4.0, "rank": rank, "kind": "average end", "window": 0, "ms": 1000.0, "drift": 0.02},
        {"t": 5.0, "rank": rank, "kind": "window", "window": 1, "start": 4.0, "batches": 6, "samples": 384,
         "compute_ms": 950.0},
        {"t": 5.0, "rank": rank, "kind": "average start", "window": 1},
        {"t": 5.5, "rank": rank, "kind": "wait", "cause": "average", "window": 0, "ms": 700.0},
        {"t": 5.5, "rank": rank, "kind": "average end", "window": 1, "ms": 500.0, "drift": 0.03},
        {"t": 7.0, "rank": rank, "kind": "evaluation", "epoch": 0, "ms": 1000.0},
        {"t": 7.0, "rank": rank, "kind": "epoch end", "epoch": 0, "loss": 0.5, "eval": 0.9, "waits_ms": WAITS_MS},
        {"t": 8.0, "rank": rank, "kind": "epoch start", "epoch": 1},
        {"t": 9.0, "rank": rank, "kind": "epoch end", "epoch": 1, "loss": 0.4, "eval": 0.95, "waits_ms": WAITS_MS},
    ]  # fmt: skip


DECISIONS: list[Event] = [
    {"t": 2.0, "rank": 0, "kind": "plan", "value": [4, 4], "reason": "probe", "anchor": 20},
    {
        "t": 3.9,
        "rank": 0,
        "kind": "anchor",
        "value": 24,
        "reason": "20 -> 24: costly",
        "from": 20,
        "to": 24,
    },
    {"t": 4.0, "rank": 0, "kind": "plan", "value": [6, 6], "reason": "paces", "anchor": 24},
    {"t": 5.5, "rank": 0, "kind": "guard", "value": "rising", "reason": "drift 0.03 is above 0.02"},
]
EPOCH = {"samples": 1280, "seconds": 4.0, "averages": 2, "share_by_rank": [0.5, 0.5]}
RECORD = {
    "schema_version": 1,
    "status": "finished",
    "started_at": "2025-01-01T12:00:00+00:00",
    "policy": "cadence",
    "backend": "cpu",
    "epochs": [
        {**EPOCH, "epoch": 0, "loss": 0.5, "eval": 0.9, "wall_s": 5.0},
        {**EPOCH, "epoch": 1, "loss": 0.4, "eval": 0.95, "wall_s": 7.0},
    ],
    "totals": {"samples_per_s": 320.0, "eval": 0.95, "averages": 2, "exposed_average_fraction": 0.1,
               "wait_fraction": 0.05},
}  # fmt: skip


def make_utilization(*percents: list[float | None]) -> dict[str, Any]:
    """Samples every 100 ms from 0.1 s on; one list per rank."""
    times_s = [round(0.1 * (i + 1), 3) for i in range(len(percents[0]))]
    devices = [
        {"rank": rank, "device": "cpu", "source": "psutil", "percent": percent} for rank, percent in enumerate(percents)
    ]
    return {"period_ms": 100, "t": times_s, "devices": devices}


def busy_except(start_s: float, stop_s: float, *, until_s: float = 9.0) -> list[float | None]:
    """90 % busy, and 0 in the samples after `start_s` up to `stop_s`."""
    return [0.0 if start_s < (i + 1) / 10 <= stop_s else 90.0 for i in range(round(until_s * 10))]


@pytest.fixture
def run_events() -> list[Event]:
    events = rank_events(0, "cpu") + rank_events(1, "cpu@0.4") + DECISIONS
    return sorted(events, key=lambda event: (event["t"], event["rank"]))


@pytest.fixture
def run_folder(tmp_path: Path, run_events: list[Event]) -> Path:
    """Rank 0 was idle from 3.1 to 3.9 s, within its first average; rank 1 never."""
    folder = tmp_path / "run"
    folder.mkdir()
    utilization = make_utilization(busy_except(3.1, 3.9), busy_except(0.0, 0.0))
    document = {"schema_version": 1, "utilization": utilization, "events": run_events}
    (folder / "timeline.json").write_text(json.dumps(document))
    (folder / "record.json").write_text(json.dumps(RECORD))
    return folder


@pytest.fixture
def timeline(run_folder: Path) -> Timeline:
    return load_timeline(run_folder)
