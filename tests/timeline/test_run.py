"""What real runs leave of their time: sampled where this program started the ranks, recorded everywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ports import free_port
from torch import nn

import outrider
from outrider.timeline.document import load_timeline
from outrider.timeline.timeline_summary import summarize

NUM_SAMPLES = 256
PROBLEM: dict[str, Any] = {
    "model": lambda: nn.Linear(4, 1),
    "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "step": lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    "dataset": (torch.zeros(NUM_SAMPLES, 4), torch.zeros(NUM_SAMPLES, 1)),
    "batch_size": 8,
    "epochs": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two ranks of unequal speed."""
    path = tmp_path_factory.mktemp("runs") / "pair"
    options = {"evaluate": lambda model, batch: 0.5, "eval_dataset": torch.zeros(8, 4)}
    outrider.train(**PROBLEM, **options, devices="cpu,cpu@0.5", policy="cadence", anchor=4, run_dir=path).join()
    return path


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")


def test_both_ranks_are_sampled(folder: Path) -> None:
    utilization = json.loads((folder / "timeline.json").read_text())["utilization"]
    assert [(device["rank"], device["device"]) for device in utilization["devices"]] == [(0, "cpu"), (1, "cpu@0.5")]
    assert all(len(device["percent"]) == len(utilization["t"]) > 0 for device in utilization["devices"])
    assert any(device["percent"][i] for device in utilization["devices"] for i in range(len(utilization["t"])))


def test_every_sample_is_in_a_window(folder: Path) -> None:
    assert sum(rank.samples for rank in summarize(load_timeline(folder))) == 2 * NUM_SAMPLES


def test_the_events_of_a_run_are_those_that_the_guide_names(folder: Path) -> None:
    kinds = {event["kind"] for event in load_timeline(folder).events}
    assert {"ready", "epoch start", "epoch end", "window", "average start", "average end", "plan"} <= kinds
    assert {"evaluation", "throttle", "wait"} <= kinds


def test_a_run_leaves_table_trace_page_and_idle_time(folder: Path) -> None:
    assert {"timeline.csv", "timeline.html", "trace.json"} <= {path.name for path in folder.iterdir()}
    assert len(json.loads((folder / "record.json").read_text())["idle"]["gaps_s"]) == 2


def test_sampling_can_be_switched_off(tmp_path: Path) -> None:
    outrider.train(**PROBLEM, devices="cpu", sample_utilization=False, run_dir=tmp_path).join()
    assert json.loads((tmp_path / "timeline.json").read_text())["utilization"] is None


def test_ranks_that_others_started_are_not_sampled(one_rank: None, tmp_path: Path) -> None:
    outrider.train(**PROBLEM, devices="cpu", run_dir=tmp_path).join()
    assert json.loads((tmp_path / "timeline.json").read_text())["utilization"] is None
    assert (tmp_path / "trace.json").is_file()


def test_a_switch_that_is_no_switch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(outrider.ConfigError, match="sample_utilization"):
        outrider.train(**PROBLEM, sample_utilization="yes", run_dir=tmp_path)
