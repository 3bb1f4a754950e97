"""Recorded runs of real ranks, done again in one process."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import outrider
from outrider.api.replay_wish import ReplayWish
from outrider.errors import ConfigError, DataError, OutriderError
from outrider.record.run_events import ScheduleFile
from outrider.virtual.recorded_run import Replay

pytestmark = pytest.mark.slow

SIZE = 512
SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
from test_replaying import train
if __name__ == "__main__":
    train(sys.argv[1], run_dir=sys.argv[2]).join()
    print("the script went on")
"""


def make_model() -> torch.nn.Module:
    layers = [torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Dropout(0.1)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(16, 2))


def step(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def data() -> TensorDataset:
    inputs = torch.randn(SIZE, 8, generator=torch.Generator().manual_seed(3))
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def arguments(policy: str, **changes: Any) -> dict[str, Any]:
    return {
        "model": make_model,
        "optimizer": lambda parameters: torch.optim.Adam(parameters, 1e-2),
        "step": step,
        "dataset": data(),
        "batch_size": 16,
        "epochs": 2,
        "policy": policy,
        **({"anchor": 2} if policy in ("async", "cadence") else {}),
        **changes,
    }


def train(policy: str, **changes: Any) -> outrider.Run:
    return outrider.train(**arguments(policy, devices="cpu,cpu@0.5", record_schedule=True, quiet=True, **changes))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded") / "run"
    train("async", run_dir=folder).join()
    return folder


def assert_same_bits(result: Replay) -> None:
    """An epoch that ends within a window has no recorded bits; the run ends with an average."""
    assert {epoch.has_same_bits for epoch in result.epochs} <= {True, None}
    assert result.epochs[-1].has_same_bits


def test_a_replay_has_the_same_bits_and_the_loss_of_every_step(recorded: Path) -> None:
    result = outrider.replay(recorded, **arguments("async"))
    assert result.departure is None
    assert_same_bits(result)
    assert sum(epoch.averages for epoch in result.epochs) > 4
    assert sorted({(one.epoch, one.rank) for one in result.steps}) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for epoch in (0, 1):
        taken = [one.batch for one in result.steps if one.epoch == epoch]
        assert sorted(p for batch in taken for p in range(batch.start, batch.stop)) == list(range(SIZE))
    losses = [json.loads(line)["loss"] for line in (recorded / "epochs.jsonl").read_text().splitlines()]
    assert [epoch.loss for epoch in result.epochs] == pytest.approx(losses, rel=1e-9)


def test_another_start_in_the_folder_ends_an_older_recording(tmp_path: Path) -> None:
    """The schedule of a run that failed is merged by its replay."""
    (tmp_path / "schedule.json").write_text("{}")
    ScheduleFile(tmp_path, 1).close()
    assert (tmp_path / "schedule.json").exists()
    ScheduleFile(tmp_path, 0).close()
    assert not (tmp_path / "schedule.json").exists()


def test_a_replay_says_where_it_departs(recorded: Path) -> None:
    changed = data()
    changed.tensors[0][7] += 1e-3
    result = outrider.replay(recorded, **arguments("async", dataset=changed))
    assert result.departure is not None
    assert result.departure.startswith("epoch 0, average ")
    assert "as recorded" in result.departure
    assert not result.epochs[0].has_same_bits


def test_other_options_than_those_of_the_run_are_refused(recorded: Path) -> None:
    with pytest.raises(ConfigError, match="recorded with batch_size=16, and is replayed with 32"):
        outrider.replay(recorded, **arguments("async", batch_size=32))


@pytest.mark.parametrize("policy", ["async", "cadence"])
def test_a_run_with_checkpoints_within_an_epoch_is_replayed(tmp_path: Path, policy: str) -> None:
    train(policy, run_dir=tmp_path / "run", checkpoint_every=0.5).join()
    result = outrider.replay(tmp_path / "run", **arguments(policy))
    assert result.departure is None
    assert_same_bits(result)


def test_a_run_that_was_stopped_is_replayed_up_to_there(tmp_path: Path) -> None:
    def stop(context: Any) -> None:
        if context.epoch == 1:
            context.stop()

    train("async", epochs=5, run_dir=tmp_path / "run", epoch_end=stop).join()
    result = outrider.replay(tmp_path / "run", **arguments("async", epochs=5))
    assert len(result.epochs) == 2
    assert result.departure is None


def test_a_resumed_run_is_refused(tmp_path: Path) -> None:
    train("async", epochs=1, run_dir=tmp_path / "run", checkpoint_every=1).join()
    train("async", epochs=2, run_dir=tmp_path / "run", checkpoint_every=1, resume="auto").join()
    with pytest.raises(DataError, match="begins at epoch 1"):
        outrider.replay(tmp_path / "run", **arguments("async"))


def test_a_run_that_failed_is_replayed_to_the_step_at_fault(tmp_path: Path) -> None:
    broken = data()
    broken.tensors[0][100] = float("nan")
    with pytest.raises(OutriderError, match="not finite"):
        train("async", dataset=broken, run_dir=tmp_path / "run").join()
    result = outrider.replay(tmp_path / "run", **arguments("async", dataset=broken))
    assert result.error is not None
    assert "not finite" in result.error.message
    worst = result.highest
    assert worst is not None
    from outrider.data.order import shuffled

    order = shuffled(SIZE, seed=0, epoch=worst.epoch)
    assert 100 in order[worst.batch.start : worst.batch.stop]


def exploding(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda steps: 1e30 if steps > 105 else 1.0)


@pytest.mark.parametrize("policy", ["async", "cadence"])
def test_a_run_that_failed_after_epochs_without_a_stop_is_replayed(tmp_path: Path, policy: str) -> None:
    changes = {"epochs": 6, "scheduler": exploding, "anchor": 7}
    with pytest.raises(OutriderError, match="not finite"):
        train(policy, run_dir=tmp_path / "run", **changes).join()
    result = outrider.replay(tmp_path / "run", **arguments(policy, **changes))
    assert result.error is not None
    assert "not finite" in result.error.message
    assert result.departure is None
    assert len(result.epochs) == 3
    assert {epoch.has_same_bits for epoch in result.epochs} <= {True, None}


def exploding_soon(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda steps: 1e30 if steps > 40 else 1.0)


@pytest.mark.parametrize("policy", ["async", "cadence"])
def test_a_run_that_failed_in_an_average_is_replayed_to_it(tmp_path: Path, policy: str) -> None:
    """A step is the last one of its window here: its own loss was finite, and the model after it is not."""
    changes = {"scheduler": exploding_soon, "anchor": 1}
    with pytest.raises(OutriderError, match="not finite"):
        train(policy, run_dir=tmp_path / "run", **changes).join()
    result = outrider.replay(tmp_path / "run", **arguments(policy, **changes))
    assert result.error is not None
    assert "not finite" in result.error.message
    assert result.departure is None


def test_shared_steps_are_replayed(tmp_path: Path) -> None:
    train("auto", run_dir=tmp_path / "run").join()
    result = outrider.replay(tmp_path / "run", **arguments("auto"))
    assert [epoch.has_same_bits for epoch in result.epochs] == [True, True]


# The command


def run_command(*parts: str, folder: Path, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *parts],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    (folder / "train.py").write_text(SCRIPT.format(tests=str(Path(__file__).parent)))
    made = run_command("train.py", "async", "run", folder=folder)
    assert made.returncode == 0, made.stderr
    return folder


def test_the_command_runs_the_script_again(project: Path) -> None:
    told = run_command("-m", "outrider", "replay", "--losses", "l.csv", "run", "train.py", "async", "x", folder=project)
    assert told.returncode == 0, told.stderr
    assert "no departure from the recording" in told.stdout
    assert "the script went on" not in told.stdout
    assert not (project / "x").exists()
    with (project / "l.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sum(int(row["samples"]) for row in rows) == 2 * SIZE


def test_losses_that_cannot_be_written_do_not_cost_the_report(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = tmp_path / "gone" / "l.csv"
    wish = ReplayWish(run=str(recorded), answer=str(tmp_path / "exit_code"), losses=str(losses))
    for name, value in wish.variables().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        train("async", run_dir=tmp_path / "x")
    assert ended.value.code == 1
    told = capsys.readouterr()
    assert told.out.endswith("no departure from the recording\n")
    assert told.err.startswith(f"error: cannot write {losses}: no such file or directory\nhint: ")


def test_the_recorded_program_runs_only_when_it_is_wanted(project: Path) -> None:
    asked = run_command("-m", "outrider", "replay", "run", folder=project, stdin="")
    assert asked.returncode == 1
    assert "by: python train.py async run" in asked.stderr
    assert "pass --yes" in asked.stderr
    told = run_command("-m", "outrider", "replay", "--yes", "--json", "run", folder=project)
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout)["departure"] is None


def test_the_command_says_what_is_wrong(project: Path) -> None:
    other = run_command("-m", "outrider", "replay", "run", "train.py", "cadence", "x", folder=project)
    assert other.returncode == 1
    assert "error: the run was recorded with policy='async'" in other.stderr
    nothing = run_command("-m", "outrider", "replay", "nothing", folder=project)
    assert (nothing.returncode, "no run folder nothing" in nothing.stderr) == (1, True)
