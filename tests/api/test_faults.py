"""Fault points: what OUTRIDER_FAULTS may say, and that each fault happens where it was asked for."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import outrider
from outrider import faults
from outrider.faults import Fault, parse_faults

Trainer = Callable[..., outrider.Run]
HINT = "see docs/testing.md, or unset OUTRIDER_FAULTS"


def test_faults_are_read_in_order_with_their_defaults() -> None:
    text = "rank=1,at=step,n=20,do=kill; rank=0,at=store,do=delay,seconds=0.5,times=0,attempt=1;"
    assert parse_faults(text) == (
        Fault(rank=1, at="step", n=20, do="kill"),
        Fault(rank=0, at="store", do="delay", seconds=0.5, times=0, attempt=1),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank=1,at=step", "do missing in 'rank=1,at=step'"),
        ("at=step", "rank and do missing in 'at=step'"),
        (
            "rank=1,at=step,do=kill,when=now",
            "'when=now' is not one of rank, at, do, n, times, seconds, attempt with a value, each given once",
        ),
        (
            "rank=1,rank=2,at=step,do=kill",
            "'rank=2' is not one of rank, at, do, n, times, seconds, attempt with a value, each given once",
        ),
        ("rank=one,at=step,do=kill", "rank must be a number, got 'one'"),
        (
            "rank=1,at=stepp,do=kill",
            "at must be one of step, data, compute, average, take, begin, collect, checkpoint, checkpoint-write, "
            "model-write, record-write, epoch-end, evaluation, store, got stepp, did you mean step",
        ),
        (
            "rank=1,at=step,do=explode",
            "do must be one of kill, stop, sigterm, sigint, exception, delay, disk-full, nan, got explode",
        ),
        ("rank=1,at=step,do=delay", "seconds belongs to do=delay and to nothing else, got do=delay"),
        ("rank=1,at=step,do=kill,seconds=1", "seconds belongs to do=delay and to nothing else, got do=kill"),
        ("rank=1,at=store,do=nan", "do=nan needs at=step, got at=store"),
    ],
)
def test_a_fault_that_makes_no_sense_is_refused(text: str, message: str) -> None:
    with pytest.raises(outrider.ConfigError) as caught:
        parse_faults(text)
    assert (caught.value.message, caught.value.hint) == (f"OUTRIDER_FAULTS: {message}", HINT)


def test_a_fault_counts_from_one_in_times_of_its_point() -> None:
    fault = Fault(rank=0, at="step", do="exception", n=2, times=2)
    assert [fault.is_due(count) for count in range(1, 5)] == [False, True, True, False]


def test_a_fault_of_another_attempt_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    variables = {"OUTRIDER_FAULTS": "rank=0,at=store,do=exception,attempt=0", "TORCHELASTIC_RESTART_COUNT": "1"}
    faults.arm(0, variables)
    faults.reach("store")
    faults.disarm()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("at", "options"),
    [
        ("step", {}),
        ("step", {"policy": "sync"}),
        ("take", {"policy": "async"}),
        ("average", {}),
        ("begin", {"policy": "async"}),
        ("collect", {"policy": "async"}),
        ("checkpoint", {"checkpoint_every": 1}),
        ("checkpoint-write", {"checkpoint_every": 1}),
        ("model-write", {}),
        ("record-write", {}),
        ("epoch-end", {}),
        ("evaluation", {"evaluate": lambda model, batch: 0.0, "eval_dataset": (0.0,)}),
    ],
)
def test_an_exception_is_raised_at_every_point(
    train_here: Trainer,
    problem: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    at: str,
    options: dict[str, Any],
) -> None:
    monkeypatch.setenv("OUTRIDER_FAULTS", f"rank=0,at={at},do=exception")
    if "eval_dataset" in options:
        options = {**options, "eval_dataset": problem["dataset"]}
    with pytest.raises(outrider.StepError, match=f"InjectedFault: injected at {at}$"):
        train_here(**options).join()
    assert capsys.readouterr().err == f"outrider: fault on rank 0 at {at} 1: exception\n"


def test_an_exchange_of_the_ranks_through_the_store_is_a_point_too(
    train_here: Trainer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUTRIDER_FAULTS", "rank=0,at=store,n=12,do=exception")
    with pytest.raises(outrider.StepError, match=r"InjectedFault: injected at store$"):
        train_here().join()
    assert capsys.readouterr().err == "outrider: fault on rank 0 at store 12: exception\n"


def test_a_full_disk_is_told_as_a_real_one(train_here: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_FAULTS", "rank=0,at=model-write,do=disk-full,times=0")
    run = train_here()
    with pytest.raises(outrider.DataError) as caught:
        run.join()
    told = f"cannot write {run.run_dir}/model.safetensors: no space left on device; nor was there room for the model"
    assert caught.value.message.startswith(told)


def test_a_gradient_becomes_nan_though_the_loss_is_finite(train_here: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def step(model: nn.Module, batch: Any) -> Any:
        loss = (model(batch[0]) - batch[1]).square().mean()
        seen.append(math.isfinite(loss.item()))
        return loss

    monkeypatch.setenv("OUTRIDER_FAULTS", "rank=0,at=step,n=3,do=nan")
    with pytest.raises(outrider.StepError):
        train_here(step=step).join()
    assert seen[:3] == [True, True, True]


def test_a_rank_is_killed_at_the_step_that_was_named(
    train_two: Trainer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OUTRIDER_FAULTS", "rank=1,at=step,n=3,do=kill")
    with pytest.raises(outrider.OutriderError) as caught:
        train_two(epochs=1_000, batch_size=1, run_dir=tmp_path).join()
    assert caught.value.message == "rank 1 (cpu@0.5) died with signal 9 (SIGKILL)"
    assert (tmp_path / "rank1.log").read_text() == "outrider: fault on rank 1 at step 3: kill\n"
    assert "outrider: fault" not in (tmp_path / "rank0.log").read_text()


def test_without_the_variable_a_policy_is_left_as_it_is() -> None:
    assert "OUTRIDER_FAULTS" not in os.environ
    policy: Any = iter(())
    assert faults.watched(policy, nn.Linear(1, 1)) is policy  # type: ignore[arg-type]
