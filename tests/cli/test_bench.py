"""`outrider bench` from the command line to its last line, with runs that are told, not trained."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.bench.modes import Mode, ModeResult
from outrider.bench.suite.run_case import Planned
from outrider.bench.suite.sweep import SweepWatcher, Swept, run_sweep
from outrider.bench.tasks import Task
from outrider.cli.main import app
from outrider.errors import DataError, OutriderError, StepError
from outrider.world.messages import Message

SPEEDS = {"solo-0": 1000.0, "solo-1": 400.0, "cpu-async": 1330.0}
ENVIRONMENT = {"outrider": "0.1.0", "torch": "2.13.0", "python": "3.11.7", "cpu": "slow", "num_cores": 2, "gpus": []}
SMALL = ["--devices", "cpu,cpu@0.4", "--samples", "64", "--epochs", "2"]


def epoch(number: int, mode: Mode, task: Task) -> dict[str, Any]:
    seconds = 64 / SPEEDS.get(mode.name, 800.0)
    return {
        "epoch": number,
        "loss": 0.5,
        "eval": 0.9 + 0.04 * number + 0.001 * task.seed,
        "samples": 64,
        "seconds": seconds,
        "train_s": seconds * (number + 1),
        "wall_s": seconds * (number + 1),
        "share_by_rank": [0.7, 0.3],
        "averages": 3,
        "anchor": 20,
        "drift": 0.1,
        "exposed_average_fraction": 0.01,
        "wait_fraction": 0.02,
        "samples_per_s": 64 / seconds,
    }


def tell_run(
    mode: Mode,
    task: Task,
    *,
    run_dir: Path,
    on_start: Callable[[], None],
    on_message: Callable[[Message], None],
    **_: Any,
) -> ModeResult:
    """A run that ended at once, with the files that a run leaves."""
    epochs = [epoch(number, mode, task) for number in range(task.epochs)]
    run_dir.mkdir(parents=True)
    (run_dir / "config.json").write_text(json.dumps({"options": {}}))
    on_start()
    for fields in epochs:
        on_message(Message(rank=0, kind="epoch", fields=fields))
    record = {"status": "finished", "epochs": epochs, "options": {}, "environment": ENVIRONMENT}
    (run_dir / "record.json").write_text(json.dumps(record))
    return ModeResult(mode=mode.name, epochs=(), run_dir=run_dir)


def fail_async(mode: Mode, task: Task, **options: Any) -> ModeResult:
    if mode.name == "cpu-async":
        raise StepError("rank 1 (cpu@0.4), step 7: ValueError: no")
    return tell_run(mode, task, **options)


def interrupt_async(mode: Mode, task: Task, **options: Any) -> ModeResult:
    if mode.name == "cpu-async":
        raise KeyboardInterrupt
    return tell_run(mode, task, **options)


@pytest.fixture(autouse=True)
def told_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.bench.suite.run_case.run_mode", tell_run)
    # No network is asked for data: stand-ins will do.
    monkeypatch.setattr("outrider.bench.datasets.source.find_data", lambda name, folder: None)
    monkeypatch.setattr("outrider.bench.datasets.source.download", refuse)


def refuse(name: str) -> Path:
    raise DataError(f"no network for {name}")


def bench(*words: str) -> Any:
    return CliRunner().invoke(app, ["bench", *words])


def sweep(output: Path, *words: str) -> Any:
    modes = ["--models", "lenet", "--modes", "solo-0,solo-1,cpu-async", "--seeds", "2"]
    return bench("sweep", *modes, *SMALL, "--output", str(output), *words)


def error_of(ended: Any) -> tuple[str, str | None]:
    assert isinstance(ended.exception, OutriderError), ended.output
    return ended.exception.message, ended.exception.hint


# sweep and run


def test_the_last_line_of_a_sweep_is_the_document(tmp_path: Path) -> None:
    ended = sweep(tmp_path)
    assert ended.exit_code == 0, ended.output
    told = json.loads(ended.stdout.splitlines()[-1])
    assert told["failures"] == []
    assert list(told["models"]["lenet"]["modes"]) == ["solo-0", "solo-1", "cpu-async"]
    one = told["models"]["lenet"]["modes"]["cpu-async"]
    assert one["eval"]["values"] == [0.94, 0.941]
    assert (one["samples_per_s"], one["efficiency"], one["speedup"]) == (1330.0, 0.95, 1.33)
    assert one["seeds"] == [0, 1]


def test_stdout_has_a_table_that_fits_80_columns(tmp_path: Path) -> None:
    lines = sweep(tmp_path).stdout.splitlines()
    assert lines[0] == "lenet on glyphs (stand-in), first 64: 2 epochs, batch 64"
    assert lines[1] == "mode         accuracy %  samples/s  effic.  speed-up  to target"
    assert lines[5] == "cpu-async  94.05 ± 0.64      1,330    0.95     1.33x     0 of 2"
    assert max(map(len, lines[:-1])) <= 80


def test_progress_goes_to_stderr_with_the_time_of_the_whole_sweep(tmp_path: Path) -> None:
    ended = sweep(tmp_path)
    lines = ended.stderr.splitlines()
    assert lines[0].startswith("[1/6] lenet solo-0 seed 0: 1,000 samples/s, accuracy 0.94, 0.1 s, ETA ")
    assert lines[-1] == "[6/6] lenet cpu-async seed 1: 1,330 samples/s, accuracy 0.941, 0.1 s"


def test_a_second_sweep_says_what_it_skipped(tmp_path: Path) -> None:
    first, second = sweep(tmp_path), sweep(tmp_path)
    assert second.stderr == "6 runs are finished already, skipped\n"
    assert second.stdout == first.stdout


def test_one_run_is_a_sweep_of_one(tmp_path: Path) -> None:
    ended = bench("run", "--model", "lenet", "--mode", "cpu-async", *SMALL, "--output", str(tmp_path))
    told = json.loads(ended.stdout.splitlines()[-1])
    assert told["models"]["lenet"]["modes"]["cpu-async"]["epochs"] == 2
    assert told["models"]["lenet"]["modes"]["cpu-async"]["efficiency"] is None


def test_a_failed_run_ends_the_sweep_with_exit_code_1_after_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.bench.suite.run_case.run_mode", fail_async)
    ended = sweep(tmp_path)
    assert ended.exit_code == 1
    told = json.loads(ended.stdout.splitlines()[-1])
    assert told["failures"] == [
        "lenet cpu-async seed 0: rank 1 (cpu@0.4), step 7: ValueError: no",
        "lenet cpu-async seed 1: rank 1 (cpu@0.4), step 7: ValueError: no",
    ]
    assert list(told["models"]["lenet"]["modes"]) == ["solo-0", "solo-1"]


def test_an_interrupt_says_what_is_finished_and_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.bench.suite.run_case.run_mode", interrupt_async)
    ended = sweep(tmp_path)
    assert (ended.exit_code, ended.stdout) == (130, "")
    assert ended.stderr.splitlines()[-1] == (
        f"interrupted; 2 of 6 runs are finished and in {tmp_path}, the same command goes on from there"
    )


def run_one_by_one(planned: list[Planned], *, output: Path, watcher: SweepWatcher, num_jobs: int) -> Swept:
    """What jobs come to, without their processes: those have tests of their own."""
    assert num_jobs == 2
    return run_sweep(planned, output=output, watcher=watcher)


@pytest.fixture
def told_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.bench.suite.sweep.run_sweep_beside", run_one_by_one)


def test_with_jobs_no_run_is_timed(told_jobs: None, tmp_path: Path) -> None:
    ended = sweep(tmp_path, "--jobs", "2")
    told = json.loads(ended.stdout.splitlines()[-1])["models"]["lenet"]["modes"]["cpu-async"]
    assert (told["eval"]["values"], told["samples_per_s"], told["num_timed"]) == ([0.94, 0.941], None, 0)
    assert ended.stdout.splitlines()[-2] == "these runs trained beside each other and were not timed"


def test_progress_of_untimed_runs_says_nothing_of_their_speed(told_jobs: None, tmp_path: Path) -> None:
    lines = sweep(tmp_path, "--jobs", "2").stderr.splitlines()
    assert lines[0].startswith("[1/6] lenet solo-0 seed 0: accuracy 0.94, ETA ")
    assert lines[-1] == "[6/6] lenet cpu-async seed 1: accuracy 0.941"


def test_what_ran_with_jobs_is_run_again_to_be_timed(told_jobs: None, tmp_path: Path) -> None:
    sweep(tmp_path, "--jobs", "2")
    assert sweep(tmp_path, "--jobs", "2").stderr == "6 runs are finished already, skipped\n"
    assert sweep(tmp_path).stderr.splitlines()[0].startswith("[1/6] lenet solo-0 seed 0: 1,000 samples/s")
    ended = bench("report", str(tmp_path))
    assert "| cpu-async | 94.05 ± 0.64 % | 1,330 | 0.95 (0.95 to 0.95) | - | 1.33x |" in ended.stdout


def test_options_of_the_core_reach_the_run(tmp_path: Path) -> None:
    sweep(tmp_path, "--set", "overhead_target=0.05")
    [path] = tmp_path.glob("lenet/solo-0/seed-0-*/config.json")
    assert json.loads(path.read_text())["benchmark"]["case"]["settings"] == {"overhead_target": 0.05}


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (["--preset", "quik"], "no preset is called 'quik'", "did you mean 'quick'?"),
        (["--modes", "cpu-asink"], "no mode is called 'cpu-asink' for 2 devices", "did you mean 'cpu-async'?"),
        (["--set", "overhed_target=1"], "unknown option 'overhed_target'", "did you mean 'overhead_target'?"),
        (["--data", "nowhere"], "the data folder nowhere is not there", "name a folder, or leave it out"),
        (["--devices", "cup"], "unknown device kind 'cup'", "did you mean cpu? kinds are cuda, cpu, xpu, mps"),
    ],
)
def test_bad_input_to_a_sweep_is_told(tmp_path: Path, words: list[str], message: str, hint: str) -> None:
    assert error_of(sweep(tmp_path, *words)) == (message, hint)


def test_an_unknown_model_is_told_with_the_nearest() -> None:
    message, hint = error_of(bench("run", "--model", "lenett", "--mode", "solo-0"))
    assert message.startswith("no model is called 'lenett', known are: logistic, mlp, lenet")
    assert hint == "did you mean 'lenet'?"


# list


def test_the_list_has_models_devices_and_why_modes_cannot_run() -> None:
    shown = bench("list", "--devices", "cpu,cpu@0.4").stdout
    assert "resnet20-graph  CIFAR-10          accuracy     269,722    128     200     0.9125" in shown
    assert "  nccl-sync                   cannot run here: rank 0 is on cpu, and nccl joins\n" in shown
    assert max(map(len, shown.splitlines())) <= 80


# report, validate, rerun


def test_a_report_is_printed_and_written(tmp_path: Path) -> None:
    sweep(tmp_path)
    ended = bench("report", str(tmp_path))
    assert ended.stdout.startswith("# Benchmark report\n")
    assert (tmp_path / "report.md").read_text() == ended.stdout
    assert ended.stderr == f"report: {tmp_path / 'report.md'}\n"


def test_a_page_is_written_where_it_is_asked_for(tmp_path: Path) -> None:
    sweep(tmp_path / "runs")
    ended = bench("report", str(tmp_path / "runs"), "--html", "--output", str(tmp_path / "page"))
    assert ended.stderr.splitlines()[-1] == f"page: {tmp_path / 'page' / 'report.html'}"
    assert sorted(path.name for path in (tmp_path / "page").iterdir()) == ["plotly.min.js", "report.html", "report.md"]


def test_who_reads_only_the_first_lines_of_a_report_has_all_of_its_files(tmp_path: Path) -> None:
    sweep(tmp_path)
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    with os.fdopen(write_fd, "w") as closed_early:
        command = [sys.executable, "-m", "outrider", "bench", "report", str(tmp_path), "--html"]
        ended = subprocess.run(command, stdout=closed_early, stderr=subprocess.PIPE, text=True, check=False)
    assert "Traceback" not in ended.stderr
    assert [(tmp_path / name).is_file() for name in ("report.md", "report.html")] == [True, True]


def test_a_report_of_nothing_is_an_error(tmp_path: Path) -> None:
    assert (
        error_of(bench("report", str(tmp_path)))[0]
        == f"nothing is finished in {tmp_path}: no run of the suite is there"
    )
    assert error_of(bench("report", str(tmp_path / "no")))[0] == f"there is no folder {tmp_path / 'no'}"


def test_a_baseline_is_saved_and_met(tmp_path: Path) -> None:
    sweep(tmp_path / "runs")
    baseline = str(tmp_path / "baseline.json")
    saved = bench("validate", str(tmp_path / "runs"), "--baseline", baseline, "--save")
    assert saved.stderr == f"saved 3 modes of 1 models in {baseline}\n"
    ended = bench("validate", str(tmp_path / "runs"), "--baseline", baseline)
    assert ended.exit_code == 0
    assert ended.stdout.splitlines()[-1] == "6 compared, 0 regressions"


def test_a_regression_is_exit_code_1_and_an_improvement_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    baseline = str(tmp_path / "baseline.json")
    sweep(tmp_path / "before")
    bench("validate", str(tmp_path / "before"), "--baseline", baseline, "--save")
    monkeypatch.setitem(SPEEDS, "cpu-async", 700.0)
    sweep(tmp_path / "slower")
    monkeypatch.setitem(SPEEDS, "cpu-async", 2000.0)
    sweep(tmp_path / "faster")
    assert bench("validate", str(tmp_path / "slower"), "--baseline", baseline).exit_code == 1
    assert bench("validate", str(tmp_path / "faster"), "--baseline", baseline).exit_code == 0


def test_a_missing_baseline_is_told(tmp_path: Path) -> None:
    sweep(tmp_path)
    message, hint = error_of(bench("validate", str(tmp_path), "--baseline", str(tmp_path / "none.json")))
    assert message == f"there is no baseline {tmp_path / 'none.json'}"
    assert hint == "make these runs the baseline with --save"


def test_a_rerun_puts_both_side_by_side(tmp_path: Path) -> None:
    sweep(tmp_path)
    [folder] = tmp_path.glob("lenet/cpu-async/seed-1-*")
    ended = bench("rerun", str(folder))
    assert ended.exit_code == 0, ended.output
    assert ended.stdout.splitlines()[2:5] == [
        "before  0.941000  0.500000      1,330",
        "now     0.941000  0.500000      1,330",
        "every epoch's loss and evaluation are the same to the bit",
    ]
    assert (folder.parent / f"{folder.name}-rerun" / "record.json").is_file()


def test_a_second_rerun_has_a_folder_of_its_own(tmp_path: Path) -> None:
    sweep(tmp_path)
    [folder] = tmp_path.glob("lenet/cpu-async/seed-1-*")
    bench("rerun", str(folder))
    bench("rerun", str(folder))
    assert (folder.parent / f"{folder.name}-rerun-2" / "record.json").is_file()


def test_a_rerun_never_touches_a_folder_that_is_there(tmp_path: Path) -> None:
    sweep(tmp_path)
    [folder] = tmp_path.glob("lenet/cpu-async/seed-1-*")
    message, hint = error_of(bench("rerun", str(folder), "--output", str(tmp_path)))
    assert (message, hint) == (f"{tmp_path} is there already", "name a folder that is not")
    assert (folder / "record.json").is_file()


def test_a_folder_without_a_run_cannot_be_run_again(tmp_path: Path) -> None:
    message, hint = error_of(bench("rerun", str(tmp_path)))
    assert message == f"{tmp_path} holds no run of the suite"
    assert hint == "pass a folder such as runs/lenet/cpu-async/seed-0-…"
