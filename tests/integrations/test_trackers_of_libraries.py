"""Trackers against the real libraries, without a network: one run on two ranks, stopped and resumed, then read back."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow.tracking import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import outrider

LIBRARIES = ("tensorboard", "wandb", "trackio", "mlflow")
STEPS = [12, 24, 36]


def make_model() -> nn.Module:
    return nn.Linear(4, 1)


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def step(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = model(batch[0]).square().mean()
    outrider.log("loss@1", loss)
    return loss


def stop_after_epoch_0(context: outrider.EpochContext) -> None:
    context.stop()


def train(folder: Path, **options: Any) -> outrider.Trained:
    return outrider.train(
        make_model,
        make_optimizer,
        step,
        (torch.randn(96, 4, generator=torch.Generator().manual_seed(3)),),
        batch_size=8,
        epochs=3,
        devices="cpu,cpu@0.4",
        policy="balanced",
        run_dir=folder / "run",
        trackers=list(LIBRARIES),
        **options,
    ).join()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where a run wrote with every library: stopped after its first epoch, then resumed to its end."""
    folder = tmp_path_factory.mktemp("tracked")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        patch.setenv("TRACKIO_DIR", str(folder / "trackio"))
        patch.setenv("MLFLOW_TRACKING_URI", (folder / "mlflow").as_uri())
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        train(folder, epoch_end=stop_after_epoch_0)
        train(folder, resume="auto")
        yield folder


@pytest.fixture(scope="module")
def epochs(folder: Path) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = json.loads((folder / "run" / "record.json").read_text())["epochs"]
    return told


def test_tensorboard_has_one_curve_of_both_parts(folder: Path, epochs: list[dict[str, Any]]) -> None:
    events = EventAccumulator(str(folder / "run" / "tensorboard"))
    events.Reload()
    losses = events.Scalars("loss")
    assert [point.step for point in losses] == STEPS
    assert [point.value for point in losses] == pytest.approx([epoch["loss"] for epoch in epochs])
    shares = [events.Scalars(f"rank{rank}/share")[-1].value for rank in (0, 1)]
    assert shares == pytest.approx(epochs[-1]["share_by_rank"])


def test_mlflow_has_one_run_with_its_options(folder: Path, epochs: list[dict[str, Any]]) -> None:
    client = MlflowClient()
    experiment = client.get_experiment_by_name("outrider")
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status, run.data.params["policy"]) == ("run", "FINISHED", "balanced")
    points = client.get_metric_history(run.info.run_id, "loss")
    assert [(point.step, point.value) for point in points] == [
        (step, pytest.approx(epoch["loss"])) for step, epoch in zip(STEPS, epochs, strict=True)
    ]
    assert run.data.metrics["rank1/share"] == pytest.approx(epochs[-1]["share_by_rank"][1])
    assert run.data.metrics["logged/loss_1"] == pytest.approx(epochs[-1]["logged"]["loss@1"])


def test_trackio_has_one_run(folder: Path, epochs: list[dict[str, Any]]) -> None:
    with sqlite3.connect(folder / "trackio" / "outrider.db") as database:
        rows = database.execute("select run_id, run_name, step, metrics from metrics order by step").fetchall()
    assert len({row[0] for row in rows}) == 1
    assert [row[1:3] for row in rows] == [("run", step) for step in STEPS]
    values = json.loads(rows[-1][3])
    assert values["loss"] == pytest.approx(epochs[-1]["loss"])
    assert values["rank1/share"] == pytest.approx(epochs[-1]["share_by_rank"][1])


def test_wandb_goes_on_under_the_same_id(folder: Path) -> None:
    files = sorted((folder / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2
    assert len({path.name for path in files}) == 1
    kept = json.loads((folder / "run" / "trackers.json").read_text())["trackers"]
    assert files[0].name == f"run-{kept['wandb']['id']}.wandb"
    for path in files:
        assert b"rank1/samples_per_s" in path.read_bytes()
