"""`outrider demo` from the command line to its last line, with runs that are told, not trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.bench.modes import Mode, ModeResult
from outrider.bench.tasks import Task, demo_task
from outrider.cli.main import app
from outrider.errors import ConfigError
from outrider.policy.policies import DEFAULT_POLICY, TRAINING_POLICIES
from outrider.record.epoch_metrics import EpochMetrics, as_json
from outrider.world.messages import Message

EPOCH = EpochMetrics(
    epoch=0,
    loss=0.5,
    eval=0.985,
    samples=20,
    seconds=2.0,
    samples_per_s=10.0,
    share_by_rank=(1.0,),
    learning_rate=1e-3,
    averages=5,
    anchor=None,
    drift=None,
    exposed_average_fraction=0.01,
    wait_fraction=0.0,
    eval_s=0.1,
    train_s=2.0,
    wall_s=2.1,
    is_complete=True,
)


def tell_run(
    mode: Mode, task: Task, *, run_dir: Path, on_message: Callable[[Message], None], as_published: bool, **_: Any
) -> ModeResult:
    """A run that ended at once, with the defaults that users have."""
    assert not as_published
    epoch = replace(EPOCH, share_by_rank=(0.75, 0.25)) if mode.solo_rank is None else EPOCH
    on_message(Message(rank=0, kind="epoch", fields=as_json(epoch)))
    run_dir.mkdir(parents=True)
    (run_dir / "model.safetensors").touch()
    return ModeResult(mode=mode.name, epochs=(epoch,), run_dir=run_dir)


def tell_until_ddp(mode: Mode, task: Task, **options: Any) -> ModeResult:
    if mode.name == "ddp":
        raise KeyboardInterrupt
    return tell_run(mode, task, **options)


def interrupt(mode: Mode, task: Task, **_: Any) -> ModeResult:
    raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def told_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.bench.demo_tasks.run_mode", tell_run)
    monkeypatch.setattr("outrider.cli.demo._used_by_others", lambda: 0.0)
    monkeypatch.setattr(
        "outrider.bench.tasks.demo_task", lambda epochs: demo_task(epochs=epochs, num_train=20, num_test=10)
    )


def run_demo(folder: Path, *options: str) -> Any:
    return CliRunner().invoke(app, ["demo", "--epochs", "1", "--output", str(folder), *options])


def test_the_last_line_of_stdout_is_the_document(tmp_path: Path) -> None:
    ended = run_demo(tmp_path)
    assert ended.exit_code == 0
    told = json.loads(ended.stdout.splitlines()[-1])
    assert told["devices"] == ["cpu", "cpu@0.4"]
    assert list(told["modes"]) == ["solo-0", "ddp", *(f"cpu-{policy}" for policy in TRAINING_POLICIES)]


@pytest.mark.parametrize(("options", "has_json"), [((), False), (("--json",), True)])
def test_a_terminal_gets_the_document_only_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], has_json: bool
) -> None:
    monkeypatch.setattr("outrider.cli.demo._is_terminal", lambda: True)
    ended = run_demo(tmp_path, *options)
    assert ended.stdout.splitlines()[-1].startswith("{") == has_json


def test_a_busy_machine_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.cli.demo._used_by_others", lambda: 0.4)
    told = "other programs use 40% of the processors: expect lower and less regular numbers"
    assert told in run_demo(tmp_path).stderr.splitlines()


def test_a_quiet_machine_is_no_news(tmp_path: Path) -> None:
    assert "other programs" not in run_demo(tmp_path).stderr


def test_the_last_lines_say_what_to_try_next(tmp_path: Path) -> None:
    lines = run_demo(tmp_path).stderr.splitlines()[-3:]
    assert [line.split("  (")[0] for line in lines] == [
        f"next: outrider timeline {tmp_path}/cpu-{DEFAULT_POLICY}",
        "next: outrider diagnose",
        "next: outrider init my-project",
    ]


def test_stdout_has_the_table_and_where_the_runs_are(tmp_path: Path) -> None:
    lines = run_demo(tmp_path).stdout.splitlines()
    assert lines[1].startswith("mode          samples/s  efficiency  speed-up  accuracy")
    assert f"runs: {tmp_path}/<mode>" in lines


def test_progress_goes_to_stderr_only(tmp_path: Path) -> None:
    ended = run_demo(tmp_path)
    assert "glyphs (stand-in)" in ended.stderr
    assert "  1/1  loss 0.500  eval 98.5%  10/s  share 100%" in ended.stderr.splitlines()
    assert "loss 0.500" not in ended.stdout


def test_nothing_is_coloured_in_a_pipe(tmp_path: Path) -> None:
    ended = run_demo(tmp_path)
    assert "\x1b" not in ended.stdout + ended.stderr


def test_an_interrupt_says_where_finished_runs_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.bench.demo_tasks.run_mode", tell_until_ddp)
    ended = run_demo(tmp_path)
    assert ended.exit_code == 130
    assert ended.stderr.splitlines()[-1] == f"interrupted; finished runs (solo-0, solo-1) are in {tmp_path}"


def test_an_interrupt_before_the_first_run_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.bench.demo_tasks.run_mode", interrupt)
    ended = run_demo(tmp_path)
    assert ended.exit_code == 130
    assert ended.stderr.splitlines()[-1] == "interrupted before the first run was finished"
    assert ended.stdout == ""


def test_an_unknown_device_is_an_error_of_ours() -> None:
    ended = CliRunner().invoke(app, ["demo", "--devices", "cup"])
    assert isinstance(ended.exception, ConfigError)
    assert ended.exception.message == "unknown device kind 'cup'"
