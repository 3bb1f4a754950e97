"""Runs of the suite that are told, not trained: folders as a sweep leaves them; and what a sweep tells its watcher."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.bench.suite.runs import Case, Subject, SuiteRun, as_block
from outrider.errors import OutriderError
from outrider.world.messages import Message

CASE = Case(
    model="lenet",
    mode="solo-0",
    seed=0,
    epochs=3,
    batch_size=64,
    devices=("cpu", "cpu@0.4"),
    data_name="glyphs (stand-in), first 2,000",
    max_samples=2000,
)
SUBJECT = Subject(metric="accuracy", larger_is_better=True, is_stand_in=True, target=0.97)
ENVIRONMENT = {
    "outrider": "0.1.0",
    "torch": "2.13.0",
    "python": "3.11.7",
    "platform": "Linux",
    "cpu": "two slow cores",
    "num_cores": 2,
    "cuda": None,
    "gpus": [],
}
NUM_SAMPLES = 1000

TellRun = Callable[..., Path]


class SweepLog:
    """A watcher that writes down what it was told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def skipped(self, case: Case) -> None:
        self.lines.append(f"skipped {case.mode} {case.seed}")

    def begin(self, case: Case) -> None:
        self.lines.append(f"begin {case.mode} {case.seed}")

    def saw(self, case: Case, message: Message) -> None:
        self.lines.append(f"{message.kind} of {case.mode} {case.seed}")

    def ended(self, run: SuiteRun) -> None:
        self.lines.append(f"ended {run.case.mode} {run.case.seed}")

    def failed(self, case: Case, error: OutriderError) -> None:
        self.lines.append(f"failed {case.mode} {case.seed}: {error.message}")


@pytest.fixture(scope="session")
def make_log() -> type[SweepLog]:
    """A new log of a sweep; tests of files that cannot import each other share it."""
    return SweepLog


@pytest.fixture
def a_case() -> Case:
    return CASE


@pytest.fixture
def tell_run(tmp_path: Path) -> TellRun:
    """Writes a run folder under `tmp_path / "runs"`."""

    def write(
        mode: str = "solo-0",
        seed: int = 0,
        *,
        speed: float = 1000.0,
        evals: Sequence[float | None] = (0.90, 0.96, 0.98),
        status: str = "finished",
        root: Path = tmp_path / "runs",
        subject: Subject = SUBJECT,
        environment: dict[str, Any] = ENVIRONMENT,
        record_fields: dict[str, Any] | None = None,
        **case_fields: Any,
    ) -> Path:
        case = replace(CASE, mode=mode, seed=seed, **case_fields)
        folder = root / case.folder
        folder.mkdir(parents=True)
        block = as_block(case, subject)
        record = {
            "status": status,
            "environment": environment,
            "commit": "0123456789ab",
            "epochs": [_epoch(number, speed, value, mode) for number, value in enumerate(evals)],
            "benchmark": block | {"measured": _measured(mode)},
        }
        (folder / "config.json").write_text(json.dumps({"benchmark": block}))
        (folder / "record.json").write_text(json.dumps(record | (record_fields or {})))
        return folder

    return write


def _epoch(number: int, speed: float, value: float | None, mode: str) -> dict[str, Any]:
    # The first epoch is warm-up: twice as slow, and to be left out of every speed.
    seconds = NUM_SAMPLES / speed * (2 if number == 0 else 1)
    train_s = NUM_SAMPLES / speed * (number + 2)
    return {
        "epoch": number,
        "loss": 1.0 / (number + 1),
        "eval": value,
        "samples": NUM_SAMPLES,
        "seconds": seconds,
        "train_s": train_s,
        "wall_s": train_s + 0.1,
        "share_by_rank": [1.0] if mode.startswith("solo-") else [0.7, 0.3],
        "averages": 0 if mode.startswith("solo-") else 10,
        "anchor": 20,
        "drift": 0.01,
        "exposed_average_fraction": 0.02,
        "wait_fraction": 0.03,
        "peak_memory_bytes_by_rank": [2**29] if mode.startswith("solo-") else [2**29, 2**30],
    }


def _measured(mode: str) -> dict[str, Any]:
    if mode.startswith("solo-"):
        return {"idle_s_by_rank": [{"data": 0.1}], "sampled_idle_s_by_rank": [], "average_ms": None, "anchors": []}
    return {
        "idle_s_by_rank": [{"average": 0.5, "data": 0.1}, {"average": 0.25, "data": 0.05}],
        "sampled_idle_s_by_rank": [{"startup": 3.0, "average": 0.0}, {"startup": 3.5, "average": 0.0}],
        "average_ms": 12.5,
        "anchors": [20, 24, 31],
    }
