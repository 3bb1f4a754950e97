"""Plans, rounds, what is skipped, what is left when something fails, and how long the rest takes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.bench.datasets.source import DataSource
from outrider.bench.modes import Mode, ModeResult
from outrider.bench.suite.run_case import Planned, run_case
from outrider.bench.suite.runs import Case, read_run
from outrider.bench.suite.suite_plan import (
    PRESETS,
    SuiteRequest,
    default_devices,
    plan,
    plan_again,
    preset_named,
    runnable_modes,
)
from outrider.bench.suite.sweep import Eta, duration, run_sweep
from outrider.bench.tasks import Task
from outrider.errors import ConfigError, StepError
from outrider.machine.devices import parse_devices

Sweep = Callable[..., list[str]]
OFFLINE = DataSource(may_download=False, max_samples=64)
REQUEST = SuiteRequest(
    models=("logistic",),
    modes=("solo-0", "cpu-async"),
    devices=parse_devices("cpu,cpu@0.5"),
    data=OFFLINE,
    num_seeds=2,
    epochs=2,
    batch_size=16,
)
EPOCH = {
    "epoch": 0,
    "loss": 0.5,
    "eval": 0.9,
    "samples": 64,
    "seconds": 1.0,
    "train_s": 1.0,
    "wall_s": 1.1,
    "share_by_rank": [0.7, 0.3],
    "averages": 3,
    "anchor": 20,
    "drift": 0.1,
    "exposed_average_fraction": 0.01,
    "wait_fraction": 0.02,
}


def tell_run(mode: Mode, task: Task, *, run_dir: Path, on_start: Callable[[], None], **_: Any) -> ModeResult:
    """A run that ended at once, with the files that a run leaves."""
    run_dir.mkdir(parents=True)
    (run_dir / "config.json").write_text(json.dumps({"options": {"run_dir": str(run_dir)}}))
    on_start()
    record = {"status": "finished", "epochs": [EPOCH], "options": {"run_dir": str(run_dir)}}
    (run_dir / "record.json").write_text(json.dumps(record))
    return ModeResult(mode=mode.name, epochs=(), run_dir=run_dir)


def fail_async(mode: Mode, task: Task, **options: Any) -> ModeResult:
    if mode.name == "cpu-async":
        raise StepError("rank 1 (cpu@0.5), step 7: ValueError: no", rank=1, step=7)
    return tell_run(mode, task, **options)


def interrupt_second_round(mode: Mode, task: Task, **options: Any) -> ModeResult:
    if task.seed == 1:
        raise KeyboardInterrupt
    return tell_run(mode, task, **options)


@pytest.fixture
def told_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.bench.suite.run_case.run_mode", tell_run)


@pytest.fixture
def sweep(make_log: Callable[[], Any]) -> Sweep:
    """Runs what was asked for, and returns what the watcher was told."""

    def run(output: Path, request: SuiteRequest = REQUEST) -> list[str]:
        log = make_log()
        run_sweep(plan(request), output=output, watcher=log)
        lines: list[str] = log.lines
        return lines

    return run


# Plans


def test_seeds_are_outermost_and_modes_innermost(sweep: Sweep, told_runs: None, tmp_path: Path) -> None:
    begun = [line for line in sweep(tmp_path) if line.startswith("begin")]
    assert begun == ["begin solo-0 0", "begin cpu-async 0", "begin solo-0 1", "begin cpu-async 1"]


def test_a_case_says_everything_that_decides_the_run() -> None:
    case = plan(REQUEST)[-1].case
    assert case == Case(
        model="logistic",
        mode="cpu-async",
        seed=1,
        epochs=2,
        batch_size=16,
        devices=("cpu", "cpu@0.5"),
        data_name="glyphs (stand-in), first 64",
        max_samples=64,
    )


def test_the_task_of_a_case_has_its_seed() -> None:
    assert [one.make_task().seed for one in plan(REQUEST)] == [0, 0, 1, 1]


def test_a_stand_in_has_no_published_figure() -> None:
    subject = plan(REQUEST)[0].subject
    assert (subject.is_stand_in, subject.published) == (True, None)


def test_a_run_does_not_look_for_a_network_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("outrider.bench.datasets.source.find_data", lambda name, folder: None)
    monkeypatch.setattr("outrider.bench.datasets.source._download_once", lambda name: refused(name, asked))
    planned = plan(replace(REQUEST, data=DataSource(max_samples=64)))[0]
    assert (planned.make_task().data_name, asked) == ("glyphs (stand-in), first 64", ["mnist"])


def refused(name: str, asked: list[str]) -> Any:
    from outrider.bench.datasets.source import _Downloaded

    asked.append(name)
    return _Downloaded(folder=None, trouble="no network")


def test_the_depth_counts_for_resnets_only() -> None:
    request = replace(REQUEST, models=("logistic", "resnet20"), depth=32)
    assert {one.case.title for one in plan(request)} == {"logistic", "resnet32"}


def test_full_trains_every_model_as_the_reference_does() -> None:
    full = PRESETS["full"]
    request = replace(REQUEST, models=full.models, modes=("solo-0",), epochs=full.epochs, batch_size=None)
    assert {one.case.model: (one.case.epochs, one.case.batch_size) for one in plan(request)} == {
        "logistic": (5, 64),
        "mlp": (5, 64),
        "lenet": (5, 64),
        "conv-ae": (5, 64),
        "char-rnn": (5, 64),
        "gpt-nano": (5, 64),
        "resnet20": (200, 128),
        "resnet20-graph": (200, 128),
    }


def test_every_mode_that_can_run_is_found() -> None:
    found = runnable_modes(parse_devices("cpu,cpu@0.5"))
    assert {"solo-0", "solo-1", "independent", "ddp", "cpu-async", "post-local-sgd-tuned"} <= set(found)
    assert {"nccl-async", "dp"}.isdisjoint(found)


@pytest.mark.parametrize(
    ("found", "expected"), [((), "cpu,cpu@0.4"), (("cuda:0",), "cpu,cpu@0.4"), (("cuda:0", "cuda:1"), "cuda:0,cuda:1")]
)
def test_without_devices_named_there_is_always_a_pair(found: tuple[str, ...], expected: str) -> None:
    assert default_devices(found) == expected


@pytest.mark.parametrize(
    ("change", "message", "hint"),
    [
        (
            {"models": ("lenett",)},
            "no model is called 'lenett', known are: logistic, mlp, lenet, conv-ae, char-rnn, gpt-nano, resnet20, "
            "resnet20-graph",
            "did you mean 'lenet'?",
        ),
        ({"modes": ("cpu-asink",)}, "no mode is called 'cpu-asink' for 2 devices", "did you mean 'cpu-async'?"),
        (
            {"modes": ("nccl-async",)},
            "mode nccl-async cannot run on cpu,cpu@0.5: rank 0 is on cpu, and nccl joins CUDA devices only",
            "`outrider bench list` shows which modes can",
        ),
        (
            {"modes": ("graph-sync",)},
            "mode graph-sync trains models written as a flow, got logistic",
            "such models are resnet20-graph",
        ),
    ],
    ids=["model", "mode", "obstacle", "flow"],
)
def test_a_plan_that_cannot_work_is_told_before_it_starts(change: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(replace(REQUEST, **change))
    assert (caught.value.message, caught.value.hint) == (message, hint)


@pytest.mark.parametrize(
    ("name", "hint"), [("quik", "did you mean 'quick'?"), ("everything", "presets are quick, full")]
)
def test_an_unknown_preset_is_told_with_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        preset_named(name)
    assert (caught.value.message, caught.value.hint) == (f"no preset is called {name!r}", hint)


# Resuming


def test_what_is_done_is_skipped(sweep: Sweep, told_runs: None, tmp_path: Path) -> None:
    sweep(tmp_path)
    assert sweep(tmp_path) == ["skipped solo-0 0", "skipped cpu-async 0", "skipped solo-0 1", "skipped cpu-async 1"]


def test_other_options_are_other_runs(sweep: Sweep, told_runs: None, tmp_path: Path) -> None:
    sweep(tmp_path)
    begun = sweep(tmp_path, replace(REQUEST, settings={"overhead_target": 0.05}))
    assert begun[:2] == ["begin solo-0 0", "ended solo-0 0"]


def test_an_interrupt_keeps_what_is_finished(sweep: Sweep, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("outrider.bench.suite.run_case.run_mode", interrupt_second_round)
    with pytest.raises(KeyboardInterrupt):
        sweep(tmp_path)
    monkeypatch.setattr("outrider.bench.suite.run_case.run_mode", tell_run)
    assert sweep(tmp_path)[:3] == ["skipped solo-0 0", "skipped cpu-async 0", "begin solo-0 1"]


def test_a_run_that_was_cut_short_is_run_again(sweep: Sweep, told_runs: None, tmp_path: Path) -> None:
    sweep(tmp_path)
    folder = tmp_path / plan(REQUEST)[0].case.folder
    record = json.loads((folder / "record.json").read_text())
    (folder / "record.json").write_text(json.dumps(record | {"status": "closed"}))
    assert sweep(tmp_path)[:2] == ["begin solo-0 0", "ended solo-0 0"]


def test_a_damaged_record_is_run_again(sweep: Sweep, told_runs: None, tmp_path: Path) -> None:
    sweep(tmp_path)
    (tmp_path / plan(REQUEST)[0].case.folder / "record.json").write_text("{")
    assert sweep(tmp_path)[:2] == ["begin solo-0 0", "ended solo-0 0"]


def test_a_run_that_ended_just_before_its_record_was_completed_is_completed(
    sweep: Sweep, told_runs: None, tmp_path: Path
) -> None:
    sweep(tmp_path)
    folder = tmp_path / plan(REQUEST)[0].case.folder
    record = json.loads((folder / "record.json").read_text())
    del record["benchmark"]
    (folder / "record.json").write_text(json.dumps(record))
    assert sweep(tmp_path)[0] == "skipped solo-0 0"
    run = read_run(folder)
    assert run is not None
    assert run.measured is not None


# Failures


def test_a_run_that_fails_is_told_and_the_rest_goes_on(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("outrider.bench.suite.run_case.run_mode", fail_async)
    assert sweep(tmp_path) == [
        "begin solo-0 0",
        "ended solo-0 0",
        "begin cpu-async 0",
        "failed cpu-async 0: rank 1 (cpu@0.5), step 7: ValueError: no",
        "begin solo-0 1",
        "ended solo-0 1",
        "begin cpu-async 1",
        "failed cpu-async 1: rank 1 (cpu@0.5), step 7: ValueError: no",
    ]


def test_a_failure_is_kept_with_its_reason(sweep: Sweep, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("outrider.bench.suite.run_case.run_mode", fail_async)
    sweep(tmp_path)
    run = read_run(tmp_path / plan(REQUEST)[1].case.folder)
    assert run is not None
    assert (run.status, run.error) == ("failed", "rank 1 (cpu@0.5), step 7: ValueError: no")


# A run, really made


@pytest.mark.slow
def test_a_run_is_reproduced_from_its_configuration(tmp_path: Path) -> None:
    planned = plan(replace(REQUEST, modes=("solo-0",), num_seeds=1))[0]
    before = run_case(planned, tmp_path / "runs" / planned.case.folder)
    assert before.is_finished
    again = plan_again(before.case, data=OFFLINE)
    now = run_case(again, tmp_path / "again")
    assert [(epoch.loss, epoch.eval) for epoch in now.epochs] == [(epoch.loss, epoch.eval) for epoch in before.epochs]
    assert now.case == before.case


def test_a_run_of_two_ranks_leaves_a_whole_record(tmp_path: Path) -> None:
    planned = plan(replace(REQUEST, modes=("cpu-cadence",), num_seeds=1))[0]
    run = run_case(planned, tmp_path / "run")
    assert run.measured is not None
    assert run.measured.idle_s_by_rank[1]["average"] >= 0.0
    assert len(run.epochs[-1].peak_memory_bytes_by_rank) == 2
    assert str(tmp_path) not in (tmp_path / "run" / "record.json").read_text()


@pytest.mark.slow
def test_a_flow_in_a_users_own_loop_leaves_the_record_of_a_run(tmp_path: Path) -> None:
    request = replace(REQUEST, models=("resnet20-graph",), modes=("graph-sync",), num_seeds=1, epochs=1, depth=8)
    run = run_case(plan(request)[0], tmp_path / "run")
    assert (run.is_finished, run.case.title, len(run.epochs)) == (True, "resnet8-graph", 1)
    assert run.epochs[0].eval is not None
    assert run.epochs[0].share_by_rank == (0.5, 0.5)
    assert (tmp_path / "run" / "model.safetensors").is_file()


@pytest.mark.slow
def test_a_flow_in_a_users_own_loop_has_the_precision_that_was_set(tmp_path: Path) -> None:
    request = replace(REQUEST, models=("resnet20-graph",), modes=("graph-sync",), num_seeds=1, epochs=1, depth=8)
    full = run_case(plan(request)[0], tmp_path / "full")
    half = run_case(plan(replace(request, settings={"precision": "bf16"}))[0], tmp_path / "half")
    assert full.epochs[0].loss == pytest.approx(half.epochs[0].loss, rel=0.02)
    assert full.epochs[0].loss != half.epochs[0].loss


def test_a_repetition_on_other_data_is_refused() -> None:
    case = replace(plan(REQUEST)[0].case, data_name="MNIST")
    with pytest.raises(ConfigError) as caught:
        plan_again(case, data=OFFLINE)
    assert caught.value.message == "the run used MNIST, found here is glyphs (stand-in), first 64"
    assert caught.value.hint == "name the folder of the data with --data"


# The time left


@pytest.fixture
def cases(a_case: Case) -> list[Case]:
    return [replace(a_case, mode=mode, seed=seed) for seed in (0, 1) for mode in ("solo-0", "ddp")]


def test_nothing_is_known_before_the_first_run_ended(cases: list[Case]) -> None:
    assert Eta(cases).left_s() is None


def test_runs_of_the_same_mode_are_expected_to_take_as_long(cases: list[Case]) -> None:
    eta = Eta(cases)
    eta.ended(cases[0], 10.0)
    eta.ended(cases[1], 30.0)
    assert eta.left_s() == 40.0


def test_a_mode_that_has_not_run_yet_takes_as_long_as_others_of_its_model(cases: list[Case]) -> None:
    eta = Eta(cases)
    eta.ended(cases[0], 10.0)
    assert eta.left_s() == 30.0


def test_what_is_skipped_takes_no_time(cases: list[Case]) -> None:
    eta = Eta(cases)
    eta.ended(cases[0], 10.0)
    eta.skipped(cases[1])
    assert eta.left_s(elapsed_s=4.0) == 16.0


def test_several_at_a_time_take_as_much_less(cases: list[Case]) -> None:
    eta = Eta(cases, num_jobs=2)
    eta.ended(cases[0], 10.0)
    eta.ended(cases[1], 30.0)
    assert eta.left_s(elapsed_s=4.0) == 18.0


def test_the_last_run_takes_its_own_time_however_many_could_run(cases: list[Case]) -> None:
    eta = Eta(cases, num_jobs=4)
    for case in cases[:3]:
        eta.ended(case, 10.0)
    assert eta.left_s() == 10.0


@pytest.mark.parametrize(("seconds", "words"), [(45, "45 s"), (400, "7 min"), (12_000, "3 h 20 min")])
def test_durations_are_for_people(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_every_planned_case_can_be_told_apart() -> None:
    planned: list[Planned] = plan(REQUEST)
    assert len({one.case.key for one in planned}) == len(planned)
