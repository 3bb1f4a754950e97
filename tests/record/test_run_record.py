"""The record of a run: totals, surroundings, and an honest end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.errors import StepError
from outrider.record import run_record
from outrider.record.epoch_metrics import RankAccount, as_json, combine, from_json
from outrider.record.run_folder import RunFolder


def epoch(**changes: Any) -> dict[str, Any]:
    return {
        "samples": 100,
        "seconds": 2.0,
        "averages": 3,
        "exposed_average_fraction": 0.1,
        "wait_fraction": 0.0,
        "eval": 0.5,
        **changes,
    }


def account(**changes: Any) -> RankAccount:
    return RankAccount(
        **{
            "loss_sum": 10.0,
            "loss_samples": 10,
            "eval_sum": 4.0,
            "eval_samples": 8,
            "samples": 10,
            "logged": {},
            "averages": 2,
            "average_cost_s": 0.1,
            "wait_s": 0.2,
            "seconds": 1.0,
            "eval_s": 0.1,
            "wants_stop": False,
            **changes,
        }
    )


def combined(*accounts: RankAccount) -> Any:
    return combine(
        accounts,
        epoch=4,
        learning_rate=0.1,
        anchor=5,
        drift=0.0,
        train_s_before=10.0,
        wall_s=12.0,
        is_complete=True,
    )


def test_totals_are_weighted_by_time() -> None:
    totals = run_record.totals([epoch(), epoch(seconds=6.0, exposed_average_fraction=0.3, eval=0.9)])
    assert totals == {
        "samples": 200,
        "train_s": 8.0,
        "samples_per_s": 25.0,
        "averages": 6,
        "exposed_average_fraction": pytest.approx(0.25),
        "wait_fraction": 0.0,
        "eval": 0.9,
    }


def test_totals_of_nothing_are_unknown() -> None:
    totals = run_record.totals([])
    assert (totals["samples"], totals["samples_per_s"], totals["eval"]) == (0, None, None)


def test_the_environment_names_versions_and_hardware() -> None:
    names = run_record.environment()
    assert names["torch"] == torch.__version__
    assert set(names) >= {"outrider", "python", "platform", "cpu", "num_cores", "threads_per_rank", "cuda", "gpus"}


def test_there_is_no_commit_outside_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_record.commit() is None


def test_a_run_that_failed_keeps_the_epochs_it_finished(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_json("record.json", {"schema_version": 1, "status": "running", "epochs": [epoch()]})
    run_record.close_record(folder, status="failed", error=StepError("rank 1: it broke", rank=1, step=7))
    closed = folder.read_json("record.json")
    assert closed is not None
    assert (closed["status"], len(closed["epochs"])) == ("failed", 1)
    assert closed["error"] == {"type": "StepError", "message": "rank 1: it broke", "rank": 1, "step": 7}


def test_a_run_that_failed_before_its_first_record_gets_one_from_its_configuration(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_json("config.json", {"devices": ["cpu"], "backend": "cpu", "options": {"policy": "async"}})
    run_record.close_record(folder, status="closed")
    closed = folder.read_json("record.json")
    assert closed is not None
    assert (closed["status"], closed["policy"], closed["devices"]) == ("closed", "async", ["cpu"])
    assert (closed["schema_version"], closed["epochs"], closed["error"]) == (1, [], None)


def test_the_metrics_of_an_epoch_are_those_of_all_ranks() -> None:
    metrics = combined(account(), account(samples=30, loss_sum=90.0, loss_samples=30, seconds=2.0, wait_s=0.0))
    assert (metrics.samples, metrics.seconds, metrics.samples_per_s) == (40, 2.0, 20.0)
    assert metrics.loss == 2.5
    assert metrics.eval == 0.5
    assert metrics.share_by_rank == (0.25, 0.75)
    assert metrics.exposed_average_fraction == pytest.approx(0.05)
    # Of four seconds of both ranks: 0.2 in averages, and one in which rank 0 was done and rank 1 was not.
    assert metrics.wait_fraction == pytest.approx(0.30)
    assert metrics.train_s == 12.0


def test_an_epoch_without_evaluation_has_none() -> None:
    assert combined(account(eval_samples=0)).eval is None


def test_metrics_survive_the_journey_as_json() -> None:
    metrics = combined(account(logged={"a": (1.0, 2.0)}))
    assert from_json(as_json(metrics)) == metrics
