"""A loop of the user's own that was interrupted and resumed is the loop that never was, to the bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import lr_scheduler

import outrider
from outrider.record.run_folder import RunFolder
from outrider.record.run_folder_lock import FolderLock

pytestmark = pytest.mark.slow

Train = Callable[..., outrider.Session]


def epochs_of(folder: Path) -> list[dict[str, Any]]:
    epochs: list[dict[str, Any]] = json.loads((folder / "run" / "record.json").read_text())["epochs"]
    return epochs


@pytest.mark.parametrize(("devices", "policy"), [("cpu", "sync"), ("cpu,cpu", "cadence")], ids=lambda value: value)
def test_an_interrupted_loop_goes_on_as_if_it_had_not_been(
    script_runner: Any, tmp_path: Path, devices: str, policy: str
) -> None:
    assert "the power is gone" in script_runner(tmp_path, f"cut:{policy}", devices=devices).stderr
    ended = script_runner(tmp_path, f"resumed:{policy}", f"whole:{policy}", devices=devices)
    assert ended.code == 0, ended.stderr
    whole, resumed = ended.folder, tmp_path / f"resumed-{policy}"
    for rank in range(len(devices.split(","))):
        expected, reached = (load_file(folder / f"sittings{rank}.safetensors") for folder in (whole, resumed))
        assert all(torch.equal(reached[name], expected[name]) for name in expected)
    for name in ("epoch", "loss", "eval", "learning_rate", "samples", "averages"):
        assert [epoch[name] for epoch in epochs_of(resumed)] == [epoch[name] for epoch in epochs_of(whole)]


# One rank, here


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """A few epochs in `tmp_path / "run"`, or in another folder; the session, which has ended."""
    monkeypatch.delenv("OUTRIDER_DEVICES", raising=False)

    def run(epochs: int, *, batch_sizes: tuple[int, ...] = (4,), adam: bool = False, **more: Any) -> outrider.Session:
        model = nn.Linear(2, 1)
        optimizer: Any = (torch.optim.Adam if adam else torch.optim.SGD)(model.parameters(), 0.1)
        schedule = lr_scheduler.LambdaLR(optimizer, lambda tick: 1 / (1 + tick))
        with outrider.Session(**{"devices": "cpu", "run_dir": tmp_path / "run", **more}) as s:
            s.prepare(model, optimizer, schedule)
            for _ in s.epochs(epochs):
                for batch_size in batch_sizes:
                    for batch in s.batches(data(), batch_size=batch_size):
                        s.step(model(batch).square().mean())
        return s

    return run


def data() -> Tensor:
    return torch.arange(24.0).reshape(12, 2) / 24


def record_of(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / "record.json").read_text())
    return record


def test_a_schedule_goes_on_where_passes_have_batches_of_several_sizes(train: Train, tmp_path: Path) -> None:
    train(4, batch_sizes=(4, 3), run_dir=tmp_path / "whole")
    train(3, batch_sizes=(4, 3), checkpoint_every=3)
    train(4, batch_sizes=(4, 3), resume=tmp_path / "run")
    rates = [[epoch["learning_rate"] for epoch in record_of(tmp_path / name)["epochs"]] for name in ("whole", "run")]
    assert rates[0] == rates[1]


def test_a_run_goes_on_in_its_own_folder_and_its_clocks_with_it(train: Train, tmp_path: Path) -> None:
    train(2, checkpoint_every=1)
    train(4, checkpoint_every=1, resume=tmp_path / "run")
    record = record_of(tmp_path / "run")
    assert [epoch["epoch"] for epoch in record["epochs"]] == [0, 1, 2, 3]
    for clock in ("train_s", "wall_s"):
        told = [epoch[clock] for epoch in record["epochs"]]
        assert told == sorted(told)
    assert [path.name[:10] for path in sorted((tmp_path / "run" / "checkpoints").iterdir())] == [
        f"epoch0000{number}" for number in (3, 4)
    ]


def test_a_finished_loop_that_is_started_again_has_its_metrics(train: Train, tmp_path: Path) -> None:
    before = train(2, checkpoint_every=1).metrics
    after = train(2, checkpoint_every=1, resume=tmp_path / "run").metrics
    assert before is not None
    assert after is not None
    assert (after.epoch, after.loss) == (1, before.loss)


def test_a_run_that_was_cut_off_at_its_very_end_comes_to_it(train: Train, tmp_path: Path) -> None:
    train(2, checkpoint_every=2)
    record = record_of(tmp_path / "run")
    (tmp_path / "run" / "record.json").write_text(json.dumps({**record, "status": "closed"}))
    train(2, resume=tmp_path / "run")
    went_on = record_of(tmp_path / "run")
    assert (went_on["status"], went_on["num_samples"]) == ("finished", 12)
    assert went_on["epochs"] == record["epochs"]


def test_passes_without_epochs_are_counted_on(train: Train, tmp_path: Path) -> None:
    train(2, checkpoint_every=1)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = lr_scheduler.LambdaLR(optimizer, lambda tick: 1 / (1 + tick))
    with outrider.Session(devices="cpu", run_dir=tmp_path / "other", resume=tmp_path / "run") as s:
        s.prepare(model, optimizer, schedule)
        for batch in s.batches(data(), batch_size=4):
            s.step(model(batch).square().mean())
    assert [epoch["epoch"] for epoch in record_of(tmp_path / "other")["epochs"]] == [0, 1, 2]


# What goes wrong


def words_of(call: Callable[[], object]) -> str:
    with pytest.raises(outrider.OutriderError) as caught:
        call()
    return str(caught.value)


def test_fewer_epochs_than_the_checkpoint_has(train: Train, tmp_path: Path) -> None:
    train(2, checkpoint_every=1)
    assert words_of(lambda: train(1, resume=tmp_path / "run")) == (
        "epochs(1) ends before the checkpoint, which stands at epoch 2\n"
        "hint: pass 2 or more, or leave resume out to begin anew"
    )


def test_two_loops_over_epochs_and_one_place_to_keep(tmp_path: Path) -> None:
    with outrider.Session(devices="cpu", run_dir=tmp_path, checkpoint_every=1) as s:
        list(s.epochs(1))
        assert words_of(lambda: list(s.epochs(1))) == (
            "epochs() was called before, and a checkpoint keeps the place in one loop over epochs\n"
            "hint: make it one loop, or leave checkpoint_every and resume out"
        )


def test_epochs_that_go_on_before_prepare(train: Train, tmp_path: Path) -> None:
    train(2, checkpoint_every=1)
    with outrider.Session(devices="cpu", run_dir=tmp_path / "other", resume=tmp_path / "run") as s:
        assert words_of(lambda: list(s.epochs(2))) == (
            "epochs() was called before prepare()\nhint: call model, optimizer = s.prepare(model, optimizer) first"
        )


def test_a_checkpoint_in_the_middle_of_an_epoch() -> None:
    assert words_of(lambda: outrider.Session(checkpoint_every=0.5)) == (
        "checkpoint_every must be a whole number of epochs in a loop of your own, got 0.5\n"
        'hint: pass checkpoint_every=1, or a time such as "10min"'
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": 4}, "cannot resume: seed was 0, now 4"),
        ({"policy": "sync"}, "cannot resume: policy was 'auto', now 'sync'"),
        ({"lr_scale": 2.0}, "cannot resume: lr_scale was 1.0, now 2.0"),
        ({"adam": True}, "cannot resume: optimizers was ['SGD'], now ['Adam']"),
    ],
    ids=["seed", "policy", "lr_scale", "optimizer"],
)
def test_another_run_cannot_be_resumed(train: Train, tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    train(2, checkpoint_every=1)
    assert words_of(lambda: train(4, resume=tmp_path / "run", **changed)).startswith(f"{message}\nhint: ")


def test_a_new_run_does_not_mix_its_checkpoints_with_those_of_another(train: Train, tmp_path: Path) -> None:
    train(2, checkpoint_every=1)
    assert words_of(lambda: train(2, checkpoint_every=1)) == (
        f"{tmp_path / 'run'} holds the checkpoints of another run\n"
        f'hint: pass resume="{tmp_path / "run"}" to go on with it, or another run_dir'
    )


def test_two_sessions_in_one_folder_do_not_mix(train: Train, tmp_path: Path) -> None:
    first = FolderLock.take(RunFolder(tmp_path / "run"))
    assert words_of(lambda: train(1)).startswith(f"{tmp_path / 'run'} is in use by another run: pid ")
    first.release()
    train(1)
    assert not (tmp_path / "run" / "lock").exists()
