"""The handle of a run: iterate, poll, join, stop, close; and what a run leaves behind, seen on one rank."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outrider
from outrider.record.epoch_metrics import from_json

Trainer = Callable[..., outrider.Run]
Events = Callable[[Path, str], list[dict[str, Any]]]
ReadJson = Callable[[Path], Any]


def test_nothing_is_trained_before_somebody_waits(train_here: Trainer) -> None:
    run = train_here()
    assert run.is_running
    assert run.epochs == []
    run.close()


def test_iterating_gives_each_epoch_once(train_here: Trainer) -> None:
    run = train_here(epochs=3)
    assert [epoch.epoch for epoch in run] == [0, 1, 2]
    assert not run.is_running


def test_iterating_again_gives_the_epochs_again(train_here: Trainer) -> None:
    run = train_here(epochs=2)
    assert [epoch.epoch for epoch in run] == [epoch.epoch for epoch in run]


def test_poll_gives_what_is_new(train_here: Trainer) -> None:
    run = train_here(epochs=2)
    polled = [[epoch.epoch for epoch in run.poll()] for _ in range(4)]
    assert polled == [[0], [1], [], []]


def test_join_after_iterating_has_all_epochs(train_here: Trainer) -> None:
    run = train_here(epochs=2)
    next(iter(run))
    assert [epoch.epoch for epoch in run.join().epochs] == [0, 1]


def test_join_may_be_called_twice(train_here: Trainer) -> None:
    run = train_here()
    assert run.join() == run.join()


def test_load_into_returns_the_model_with_the_trained_parameters(train_here: Trainer, problem: dict[str, Any]) -> None:
    trained = train_here().join()
    model = trained.load_into(problem["model"]())
    assert all(torch.equal(model.state_dict()[name], value) for name, value in trained.state_dict.items())


def test_load_into_another_model_is_an_error(train_here: Trainer) -> None:
    trained = train_here().join()
    with pytest.raises(outrider.DataError) as caught:
        trained.load_into(nn.Linear(2, 2))
    assert caught.value.message.startswith(f"{trained.run_dir}/model.safetensors does not fit the model: ")
    assert caught.value.hint == "pass a model made the same way as the one that was trained"


def test_stop_between_epochs_ends_the_run_there(train_here: Trainer, read_json: ReadJson) -> None:
    run = train_here(epochs=5)
    next(iter(run))
    run.stop()
    trained = run.join()
    assert [epoch.epoch for epoch in trained.epochs] == [0]
    assert trained.state_dict
    assert read_json(run.run_dir / "record.json")["status"] == "stopped"


def test_stop_within_an_epoch_ends_it_after_the_window(train_here: Trainer) -> None:
    handle: list[outrider.Run] = []

    def step(model: nn.Module, batch: Any) -> Any:
        handle[0].stop()
        return (model(batch[0]) - batch[1]).square().mean()

    handle.append(train_here(step=step, epochs=5, anchor=2, speed_hints=[1]))
    epochs = handle[0].join().epochs
    assert [(epoch.samples, epoch.is_complete) for epoch in epochs] == [(16, False)]


def test_join_after_close_is_an_error(train_here: Trainer, read_json: ReadJson) -> None:
    run = train_here(epochs=2)
    next(iter(run))
    run.close()
    with pytest.raises(outrider.OutriderError) as caught:
        run.join()
    assert str(caught.value) == (
        "the run was closed before it was done\nhint: call join() first, or stop() to end it early and keep the model"
    )
    assert read_json(run.run_dir / "record.json")["status"] == "closed"


def test_close_after_the_end_changes_nothing(train_here: Trainer, read_json: ReadJson) -> None:
    with train_here() as run:
        trained = run.join()
    assert run.join() == trained
    assert read_json(run.run_dir / "record.json")["status"] == "finished"


def test_what_made_a_run_fail_is_raised_by_every_join(train_here: Trainer) -> None:
    run = train_here(step=lambda model, batch: None)
    with pytest.raises(outrider.StepError) as first:
        run.join()
    with pytest.raises(outrider.StepError) as second:
        run.join()
    assert first.value is second.value


def test_a_failed_run_is_recorded_as_failed(train_here: Trainer, read_json: ReadJson) -> None:
    run = train_here(step=lambda model, batch: None)
    with pytest.raises(outrider.StepError):
        run.join()
    record = read_json(run.run_dir / "record.json")
    assert record["status"] == "failed"
    assert record["error"] == {
        "type": "StepError",
        "message": "rank 0 (cpu), step 0: the step function must return a scalar loss, got NoneType",
        "rank": 0,
        "step": 0,
    }


def test_the_fluent_form_does_the_same_as_train(train_here: Trainer, problem: dict[str, Any], tmp_path: Path) -> None:
    wanted = train_here(epochs=2, policy="async", max_grad_norm=5.0).join().state_dict
    got = (
        outrider.Ddp.builder(problem["model"], problem["optimizer"], problem["step"])
        .dataset(problem["dataset"])
        .batch_size(8)
        .num_epochs(2)
        .max_grad_norm(5.0)
        .policy("async")
        .backend("cpu")
        .devices("cpu")
        .run_dir(tmp_path / "fluent")
        .run()
        .join()
        .state_dict
    )
    assert all(torch.equal(got[name], value) for name, value in wanted.items())


# What a run leaves behind


def test_a_run_without_a_folder_gets_one_below_runs(
    train_here: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = train_here(run_dir=None), train_here(run_dir=None)
    folders = [run.join().run_dir for run in (first, second)]
    assert [folder.parent for folder in folders] == [tmp_path / "runs"] * 2
    assert all("-cadence" in folder.name for folder in folders)
    assert folders[0] != folders[1]


def test_the_folder_holds_what_it_should_and_no_temporary_file(train_here: Trainer) -> None:
    folder = train_here().join().run_dir
    drawn = {"plotly.min.js", "timeline.html"}
    assert sorted({path.name for path in folder.iterdir()} - drawn) == [
        "config.json",
        "epochs.jsonl",
        "events",
        "live",
        "model.safetensors",
        "record.json",
        "timeline.csv",
        "timeline.json",
        "trace.json",
    ]


def test_the_config_names_options_devices_and_reasons(train_here: Trainer, read_json: ReadJson) -> None:
    config = read_json(train_here(seed=3, outer="nesterov", epoch_end=print).join().run_dir / "config.json")
    assert config["schema_version"] == 1
    assert config["devices"] == ["cpu"]
    assert config["backend"] == "cpu"
    assert config["options"]["seed"] == 3
    assert config["options"]["outer"]["kind"] == "nesterov"
    assert config["objects"]["model"] == "make_model"
    assert config["objects"]["epoch_end"] == "print"
    assert config["reasons"]["backend"] == "auto: rank 0 is on cpu, and nccl joins CUDA devices only"


def test_the_record_says_what_ran_where_and_how_it_ended(train_here: Trainer, read_json: ReadJson) -> None:
    record = read_json(train_here(epochs=2).join().run_dir / "record.json")
    assert (record["schema_version"], record["status"], record["policy"]) == (1, "finished", "cadence")
    assert (record["devices"], record["backend"], record["num_samples"]) == (["cpu"], "cpu", 96)
    assert record["environment"]["torch"] == torch.__version__
    assert record["environment"]["outrider"] == outrider.__version__
    assert set(record) >= {"commit", "started_at", "options", "epochs", "totals"}


def test_the_totals_are_those_of_the_epochs(train_here: Trainer, read_json: ReadJson) -> None:
    run = train_here(epochs=2, evaluate=lambda model, batch: 0.25, eval_dataset=torch.zeros(4, 4))
    epochs = run.join().epochs
    totals = read_json(run.run_dir / "record.json")["totals"]
    assert totals["samples"] == 192
    assert totals["eval"] == 0.25
    assert totals["train_s"] == pytest.approx(sum(epoch.seconds for epoch in epochs))
    assert totals["samples_per_s"] == pytest.approx(192 / totals["train_s"])
    assert totals["averages"] == sum(epoch.averages for epoch in epochs)


def test_the_epochs_of_the_record_are_those_of_the_handle(train_here: Trainer, read_json: ReadJson) -> None:
    run = train_here(epochs=2)
    epochs = run.join().epochs
    recorded = read_json(run.run_dir / "record.json")["epochs"]
    assert [from_json(one) for one in recorded] == [*epochs]


def test_the_timeline_is_in_the_order_of_time(train_here: Trainer, read_json: ReadJson) -> None:
    timeline = read_json(train_here(epochs=2).join().run_dir / "timeline.json")
    times = [event["t"] for event in timeline["events"]]
    assert timeline["schema_version"] == 1
    assert times == sorted(times)


def test_the_timeline_has_epochs_with_the_waits_by_cause(train_here: Trainer, events: Events) -> None:
    folder = train_here(epochs=2).join().run_dir
    assert [event["epoch"] for event in events(folder, "epoch start")] == [0, 1]
    assert [event["epoch"] for event in events(folder, "epoch end")] == [0, 1]
    waits_ms = events(folder, "epoch end")[0]["waits_ms"]
    assert set(waits_ms) == {"startup", "epoch boundary", "average", "rest", "data", "evaluation"}


def test_record_schedule_writes_the_schedule(train_here: Trainer, read_json: ReadJson) -> None:
    folder = train_here(record_schedule=True, anchor=6, speed_hints=[1]).join().run_dir
    schedule = read_json(folder / "schedule.json")
    assert [entry[0] for entry in schedule["segments"][0][0]] == [*(["step"] * 6 + ["average"]) * 2, "ended"]


# A program that does not wait


PROGRAM = """
import sys, torch, outrider

def step(model, batch):
    {step}
    return model(batch).square().mean()

run = outrider.train(
    model=lambda: torch.nn.Linear(2, 1), optimizer=lambda p: torch.optim.SGD(p, 0.1), step=step,
    dataset=torch.zeros(64, 2), batch_size=1, epochs=1_000_000, devices="cpu", run_dir=sys.argv[1],
)
{after}
"""


def run_program(folder: Path, *, step: str, after: str) -> str:
    """What a program that forgets to wait says on stderr."""
    source = PROGRAM.format(step=step, after=after)
    ended = subprocess.run(
        [sys.executable, "-c", source, str(folder)], capture_output=True, text=True, timeout=120, check=True
    )
    return ended.stderr


@pytest.mark.slow
def test_a_program_that_ends_before_its_run_is_told_how_to_wait(tmp_path: Path, read_json: ReadJson) -> None:
    told = run_program(tmp_path / "run", step="pass", after="next(iter(run))")
    assert told == (
        "outrider: the program ended before its run, so the run was ended too; "
        f"what it left is in {tmp_path}/run\n"
        "hint: call join() on the handle to wait for the run, or stop() and join() to end it early and keep the model\n"
    )
    assert read_json(tmp_path / "run" / "record.json")["status"] == "closed"
    shutil.rmtree(tmp_path / "run")


@pytest.mark.slow
def test_a_program_that_never_looks_is_told_that_its_run_failed(tmp_path: Path, read_json: ReadJson) -> None:
    told = run_program(tmp_path / "run", step="1 / 0", after="import time\nwhile run.is_running: time.sleep(0.1)")
    assert told.startswith(
        f"outrider: the run in {tmp_path}/run failed, and the program did not look: "
        "rank 0 (cpu), step 0: ZeroDivisionError: division by zero\n"
    )
    assert told.endswith("hint: call join() on the handle, which raises what made a run fail\n")
    assert read_json(tmp_path / "run" / "record.json")["status"] == "failed"
