"""A run that was stopped and resumed is the run that was never stopped, to the bit."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import outrider
from outrider.record.run_folder import RunFolder
from outrider.record.run_folder_lock import FolderLock

Trainer = Callable[..., outrider.Run]
Events = Callable[[Path, str], list[dict[str, Any]]]
ReadJson = Callable[[Path], Any]


def model_with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))


def make_data(num_samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(num_samples, 4, generator=torch.Generator().manual_seed(7))
    return inputs, inputs.sum(dim=1, keepdim=True)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def stop_after_epoch_1(context: outrider.EpochContext) -> None:
    if context.epoch == 1:
        context.stop()


def same(left: outrider.Trained, right: outrider.Trained) -> bool:
    a, b = left.state_dict, right.state_dict
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]] = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=48),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=60),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, milestones=[10, 30]),
    "function": lambda o: lr_scheduler.LambdaLR(o, lambda tick: 1 / (1 + tick)),
    "warm-up": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=5), lr_scheduler.StepLR(o, step_size=9)], milestones=[5]
    ),
}


@pytest.mark.parametrize("policy", ["auto", "sync", "balanced", "cadence", "async"])
def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(train_here: Trainer, tmp_path: Path, policy: str) -> None:
    options = {"model": model_with_dropout, "optimizer": adam, "epochs": 4, "policy": policy}
    whole = train_here(**options, run_dir=tmp_path / "whole").join()
    train_here(**options, run_dir=tmp_path / "cut", epoch_end=stop_after_epoch_1).join()
    resumed = train_here(**options, resume=tmp_path / "cut", run_dir=tmp_path / "resumed").join()
    assert same(whole, resumed)
    assert [epoch.epoch for epoch in resumed.epochs] == [2, 3]


@pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=SCHEDULERS.keys())
def test_the_schedule_goes_on(train_here: Trainer, tmp_path: Path, scheduler: Any) -> None:
    options = {"optimizer": adam, "epochs": 4, "scheduler": scheduler}
    whole = train_here(**options, run_dir=tmp_path / "whole").join()
    train_here(**options, run_dir=tmp_path / "cut", epoch_end=stop_after_epoch_1).join()
    resumed = train_here(**options, resume=tmp_path / "cut", run_dir=tmp_path / "resumed").join()
    assert [epoch.learning_rate for epoch in resumed.epochs] == [epoch.learning_rate for epoch in whole.epochs[2:]]
    assert same(whole, resumed)


def test_a_run_resumes_in_the_middle_of_an_epoch(train_here: Trainer, tmp_path: Path) -> None:
    options = {"model": model_with_dropout, "optimizer": adam, "epochs": 2, "anchor": 2, "speed_hints": [1]}
    whole = train_here(**options, checkpoint_every=0.5, run_dir=tmp_path / "whole").join()
    middle = tmp_path / "whole" / "checkpoints" / "epoch00001-000000000048"
    resumed = train_here(**options, resume=middle, run_dir=tmp_path / "resumed").join()
    assert same(whole, resumed)
    # The metrics are those of the whole epoch, its first half included.
    assert [(epoch.epoch, epoch.samples) for epoch in resumed.epochs] == [(1, 96)]
    assert resumed.epochs[0].loss == pytest.approx(whole.epochs[1].loss)


def test_a_run_goes_on_in_its_own_folder(train_here: Trainer, tmp_path: Path, read_json: ReadJson) -> None:
    train_here(epochs=4, epoch_end=stop_after_epoch_1).join()
    train_here(epochs=4, resume=tmp_path / "run").join()
    record = read_json(tmp_path / "run" / "record.json")
    assert record["status"] == "finished"
    assert [epoch["epoch"] for epoch in record["epochs"]] == [0, 1, 2, 3]
    assert record["totals"]["samples"] == 4 * 96


def test_training_time_goes_on_counting(train_here: Trainer, tmp_path: Path) -> None:
    cut = train_here(epochs=4, epoch_end=stop_after_epoch_1).join()
    resumed = train_here(epochs=4, resume=tmp_path / "run").join()
    assert resumed.epochs[0].train_s == pytest.approx(cut.epochs[-1].train_s + resumed.epochs[0].seconds)


def test_the_planner_goes_on_with_what_it_learned(train_here: Trainer, tmp_path: Path, events: Events) -> None:
    train_here(epochs=4, epoch_end=stop_after_epoch_1).join()
    resumed = train_here(epochs=4, resume=tmp_path / "run", run_dir=tmp_path / "resumed").join()
    assert not any(plan["reason"].startswith("probe") for plan in events(resumed.run_dir, "plan"))
    assert events(resumed.run_dir, "resume")[0]["path"] == "epoch00002-000000000000"


def test_a_run_stopped_by_its_handle_can_be_resumed(train_here: Trainer, tmp_path: Path) -> None:
    options = {"epochs": 3, "anchor": 3, "speed_hints": [1]}
    whole = train_here(**options, run_dir=tmp_path / "whole").join()
    run = train_here(**options, run_dir=tmp_path / "cut")
    next(iter(run))
    run.stop()
    run.join()
    resumed = train_here(**options, resume=tmp_path / "cut", run_dir=tmp_path / "resumed").join()
    assert same(whole, resumed)


def test_a_run_stopped_before_its_first_epoch_can_be_resumed(train_here: Trainer, tmp_path: Path) -> None:
    whole = train_here(run_dir=tmp_path / "whole").join()
    train_here(run_dir=tmp_path / "cut", epoch_start=lambda context: context.stop()).join()
    assert same(whole, train_here(resume=tmp_path / "cut", run_dir=tmp_path / "resumed").join())


# When checkpoints are taken


@pytest.mark.parametrize(
    ("every", "names"),
    [
        (1, ["epoch00001-000000000000", "epoch00002-000000000000", "epoch00003-000000000000"]),
        (2, ["epoch00002-000000000000"]),
        (
            0.5,
            [
                "epoch00000-000000000048",
                "epoch00001-000000000000",
                "epoch00001-000000000048",
                "epoch00002-000000000000",
                "epoch00002-000000000048",
                "epoch00003-000000000000",
            ],
        ),
    ],
)
def test_checkpoints_are_taken_as_often_as_asked(train_here: Trainer, every: float, names: list[str]) -> None:
    folder = train_here(epochs=3, checkpoint_every=every, keep=9).join().run_dir
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == names


def test_a_run_that_ends_by_itself_takes_no_checkpoint_unless_asked(train_here: Trainer) -> None:
    assert not (train_here(epochs=2).join().run_dir / "checkpoints").exists()


def test_a_checkpoint_holds_model_ranks_and_state(train_here: Trainer) -> None:
    folder = train_here(checkpoint_every=1).join().run_dir
    checkpoint = folder / "checkpoints" / "epoch00001-000000000000"
    assert sorted(path.name for path in checkpoint.iterdir()) == ["model.safetensors", "rank0.pt", "state.json"]


def test_an_epoch_that_steps_cut_is_recorded_once_when_it_goes_on(train_here: Trainer, read_json: ReadJson) -> None:
    data = make_data(100)
    for steps in (18, 30):
        options = {"checkpoint_every": 1, "resume": "auto", "dataset": data, "batch_size": 10}
        folder = train_here(steps=steps, **options).join().run_dir
    told = [(epoch["epoch"], epoch["samples"]) for epoch in read_json(folder / "record.json")["epochs"]]
    assert told == [(0, 100), (1, 100), (2, 100)]


# What is told or cannot be resumed


def test_other_settings_of_the_optimizer_are_told_and_those_of_the_checkpoint_used(
    train_here: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    def sgd(parameters: Any, rate: float, momentum: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=rate, momentum=momentum)

    options = {"checkpoint_every": 1, "resume": "auto"}
    train_here(optimizer=partial(sgd, rate=0.1, momentum=0.9), epochs=1, **options).join()
    trained = train_here(optimizer=partial(sgd, rate=0.01, momentum=0.0), epochs=2, **options).join()
    told = "outrider: the optimizer goes on with the settings of the checkpoint: lr 0.1 (given: 0.01), momentum 0.9 "
    assert told + "(given: 0.0)\n" in capsys.readouterr().err
    assert trained.epochs[-1].learning_rate == 0.1


@pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=SCHEDULERS.keys())
def test_what_a_schedule_has_changed_is_not_told(
    train_here: Trainer, scheduler: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for epochs in (1, 2):
        options = {"checkpoint_every": 1, "resume": "auto"}
        train_here(optimizer=adam, scheduler=scheduler, epochs=epochs, **options).join()
    assert "settings of the checkpoint" not in capsys.readouterr().err


def test_a_finished_run_without_a_checkpoint_is_not_trained_again(train_here: Trainer, tmp_path: Path) -> None:
    before = train_here(epochs=2).join()
    with pytest.raises(outrider.ConfigError) as caught:
        train_here(epochs=3, resume="auto").join()
    assert str(caught.value) == (
        f"the run in {tmp_path}/run is finished and has no checkpoint to go on from: it would begin again, and replace "
        "its model\nhint: pass another run_dir, or remove this one; with checkpoint_every=1 a finished run can go on"
    )
    assert (before.run_dir / "model.safetensors").exists()


def test_a_finished_run_with_a_checkpoint_goes_on(train_here: Trainer) -> None:
    train_here(epochs=2, checkpoint_every=1).join()
    assert [epoch.epoch for epoch in train_here(epochs=3, resume="auto").join().epochs] == [2]


@pytest.mark.parametrize("value", [True, 3])
def test_only_a_path_can_be_resumed(train_here: Trainer, value: Any) -> None:
    with pytest.raises(outrider.ConfigError) as caught:
        train_here(resume=value)
    assert str(caught.value) == f'resume must be "auto" or a path, got {value!r}\nhint: pass resume="runs/mine"'


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": 4}, "cannot resume: seed was 0, now 4"),
        ({"batch_size": 16}, "cannot resume: batch_size was 8, now 16"),
        ({"policy": "async"}, "cannot resume: policy was 'cadence', now 'async'"),
        ({"lr_scale": 2.0}, "cannot resume: lr_scale was 1.0, now 2.0"),
        ({"optimizer": adam}, "cannot resume: optimizer was 'SGD', now 'AdamW'"),
        ({"scheduler": SCHEDULERS["cosine"]}, "cannot resume: scheduler was None, now 'CosineAnnealingLR'"),
        ({"dataset": (torch.zeros(8, 4), torch.zeros(8, 1))}, "cannot resume: num_samples was 96, now 8"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_run_cannot_be_resumed(
    train_here: Trainer, tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    train_here(checkpoint_every=1).join()
    with pytest.raises(outrider.ConfigError) as caught:
        train_here(resume=tmp_path / "run", run_dir=tmp_path / "resumed", **changed).join()
    name = next(iter(changed)).replace("dataset", "num_samples")
    assert str(caught.value) == f"{message}\nhint: pass the same {name}, or start a new run"


def test_another_model_cannot_be_resumed(train_here: Trainer, tmp_path: Path) -> None:
    train_here(checkpoint_every=1).join()
    with pytest.raises(outrider.DataError, match=r"model\.safetensors does not fit the model: "):
        train_here(resume=tmp_path / "run", run_dir=tmp_path / "resumed", model=lambda: nn.Linear(4, 1)).join()


def test_a_folder_without_checkpoints_cannot_be_resumed(train_here: Trainer, tmp_path: Path) -> None:
    with pytest.raises(outrider.DataError) as caught:
        train_here(resume=tmp_path)
    assert str(caught.value) == (
        f"no checkpoint found in {tmp_path}\nhint: pass a run folder that was made with checkpoint_every=1"
    )


def test_a_new_run_does_not_mix_its_checkpoints_with_those_of_another(train_here: Trainer, tmp_path: Path) -> None:
    train_here(checkpoint_every=1).join()
    with pytest.raises(outrider.ConfigError) as caught:
        train_here(checkpoint_every=1).join()
    folder = tmp_path / "run"
    assert str(caught.value) == (
        f"{folder} holds the checkpoints of another run\n"
        f'hint: pass resume="{folder}" to go on with it, or another run_dir'
    )


def test_two_runs_in_one_folder_do_not_mix(train_here: Trainer, tmp_path: Path) -> None:
    first = FolderLock.take(RunFolder(tmp_path / "run"))
    with pytest.raises(outrider.ConfigError, match=rf"^{tmp_path}/run is in use by another run: pid \d+ on "):
        train_here().join()
    assert os.listdir(tmp_path / "run") == ["lock"]
    first.release()
    train_here().join()
    assert not (tmp_path / "run" / "lock").exists()
