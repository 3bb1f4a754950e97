"""Outrider as a strategy of Lightning's Trainer and of Fabric, against the real library."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from outrider.errors import ConfigError
from outrider.integrations.lightning import OutriderFabricStrategy, OutriderStrategy
from outrider.integrations.lightning_trainer import _refuse_per_step

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("lightning_script.py")
Told = Callable[[str], list[dict[str, Any]]]
ALONE = ("plain", "epochs", "manual", "whole", "resumed", "steps")
TOGETHER = (*ALONE, "joined", "local", "limited", "stopped")
NUM_TRAIN, NUM_VALID = 330, 70


def run(folder: Path, *command: str, devices: str | None, is_well: bool = True) -> str:
    variables = {name: value for name, value in os.environ.items() if name != "OUTRIDER_DEVICES"}
    chosen = {} if devices is None else {"OUTRIDER_DEVICES": devices}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        cwd=folder,
        env={**variables, **chosen, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert (done.returncode == 0) == is_well, done.stderr
    return done.stdout + done.stderr


def read(folder: Path, case: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{case}-[0-9].json"))]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Told:
    folder = tmp_path_factory.mktemp("alone")
    run(folder, str(SCRIPT), str(folder), *ALONE, devices="cpu")
    return lambda case: read(folder, case)


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Told:
    folder = tmp_path_factory.mktemp("together")
    run(folder, str(SCRIPT), str(folder), *TOGETHER, devices="cpu,cpu@0.4")
    return lambda case: read(folder, case)


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["weights"] == pytest.approx(other["weights"], abs=2e-5)
    for name in ("global_step", "epoch", "num_batches"):
        assert one[name] == other[name], name
    assert one["metrics"] == pytest.approx(other["metrics"], abs=1e-4)
    assert one["rate"] == pytest.approx(other["rate"])


@pytest.mark.parametrize("case", ["plain", "epochs", "manual", "whole"])
def test_balanced_ranks_learn_what_one_device_learns(alone: Told, together: Told, case: str) -> None:
    (one,), (first, second) = alone(case), together(case)
    assert_same(first, one)
    assert second["weights"] == first["weights"]
    assert second["global_step"] == first["global_step"]


def test_a_run_that_resumes_from_ckpt_path_ends_like_one_that_was_not_interrupted(alone: Told, together: Told) -> None:
    for told in (alone, together):
        assert_same(told("resumed")[0], told("whole")[0])


def test_every_sample_is_trained_and_validated_once(together: Told) -> None:
    for case in ("plain", "local"):
        first, second = together(case)
        epochs = [sorted(a + b) for a, b in zip(first["trained"], second["trained"], strict=True)]
        # The first validation is Lightning's sanity check of two batches per rank.
        validations = [sorted(a + b) for a, b in zip(first["validated"], second["validated"], strict=True)][1:]
        assert epochs == [list(range(NUM_TRAIN))] * 2
        assert validations
        assert validations == [list(range(NUM_VALID))] * len(validations)


def test_local_steps_are_counted_and_scheduled_over_all_ranks(together: Told) -> None:
    first, second = together("local")
    assert len(first["validated"]) == len(second["validated"]) == 1 + 2 * 2
    assert first["global_step"] == second["global_step"] == 2 * 11
    assert first["rate"] == second["rate"] == pytest.approx(4e-7)
    assert first["weights"] == second["weights"]
    assert first["metrics"] == second["metrics"]
    assert len(first["rates"]) + len(second["rates"]) == 2 * 11


def test_limits_count_the_batches_of_all_ranks(alone: Told, together: Told) -> None:
    first, second = together("limited")
    assert [len(a) + len(b) for a, b in zip(first["trained"], second["trained"], strict=True)] == [8 * 32] * 3
    (one,), (first, second) = alone("steps"), together("steps")
    assert first["global_step"] == second["global_step"] == one["global_step"] == 15
    assert sum(map(len, first["trained"])) + sum(map(len, second["trained"])) == sum(map(len, one["trained"]))
    assert first["rate"] == one["rate"]


def test_a_stop_on_one_rank_stops_all(together: Told) -> None:
    first, second = together("stopped")
    assert first["epoch"] == second["epoch"] == 1
    assert first["global_step"] == second["global_step"] < 11
    assert first["weights"] == second["weights"]


def test_sync_learns_what_lightnings_ddp_learns(tmp_path: Path, together: Told) -> None:
    run(tmp_path, str(SCRIPT), str(tmp_path), "ddp", devices=None)
    assert_same(together("joined")[0], read(tmp_path, "ddp")[0])


def test_logs_of_every_step_over_ranks_are_refused_for_local_steps(tmp_path: Path) -> None:
    said = run(tmp_path, str(SCRIPT), str(tmp_path), "logging", devices="cpu,cpu@0.4", is_well=False)
    assert "a value that is reduced over ranks (sync_dist=True) in the middle of an epoch waits for all ranks" in said
    assert "hint: do it at the end of an epoch (self.log(..., on_step=False, on_epoch=True)" in said


def test_the_fabric_example_learns_on_two_ranks(tmp_path: Path) -> None:
    example = str(ROOT / "examples" / "lightning_fabric_classifier.py")
    said = run(tmp_path, example, "--epochs", "2", "--policy", "cadence", devices="cpu,cpu@0.4")
    assert [float(number) for number in re.findall(r"accuracy ([\d.]+)%", said)][-1] > 60
    assert set(torch.load(tmp_path / "digits.ckpt", weights_only=True)) == {"model"}
    (record,) = tmp_path.glob("runs/*/record.json")
    assert json.loads(record.read_text())["status"] == "finished"


def test_the_trainer_example_learns_and_resumes(tmp_path: Path) -> None:
    example = str(ROOT / "examples" / "lightning_trainer.py")
    run(tmp_path, example, "--epochs", "1", devices="cpu")
    said = run(tmp_path, example, "--epochs", "2", "--resume", devices="cpu")
    assert re.search(r"step 376: accuracy (\d\d)", said)


def test_the_changed_lines_of_the_examples_are_those_of_the_guide() -> None:
    guide = (ROOT / "docs" / "adopting.md").read_text().split("\n## Lightning\n")[1]
    for name in ("lightning_fabric_classifier", "lightning_trainer"):
        code = (ROOT / "examples" / f"{name}.py").read_text().split('"""', 2)[2]
        changed = [line.strip() for line in code.splitlines() if "utrider" in line]
        assert len(changed) == 2
        assert all(f"+{line}" in guide for line in changed), changed
        assert f"2 of {len((ROOT / 'examples' / f'{name}.py').read_text().splitlines())} lines" in guide


# What cannot work


class Line(L.LightningModule):
    kind: type[torch.optim.Optimizer] = torch.optim.SGD

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.kind(self.parameters(), lr=0.1)  # type: ignore[call-arg]


class Closing(Line):
    kind = torch.optim.LBFGS


def fit(module: L.LightningModule, folder: Path, *, loaders: int = 1, **wishes: Any) -> None:
    loader = DataLoader(TensorDataset(torch.randn(8, 1)), batch_size=2)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_epochs": 1}
    trainer = L.Trainer(accelerator="cpu", strategy=OutriderStrategy(), default_root_dir=folder, **{**quiet, **wishes})  # type: ignore[arg-type]
    trainer.fit(module, [loader] * loaders if loaders > 1 else loader)


@pytest.fixture(autouse=True)
def _on_one_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OUTRIDER_DEVICES", "cpu")


@pytest.mark.parametrize("kind", [OutriderStrategy, OutriderFabricStrategy])
@pytest.mark.parametrize(("name", "device"), [("cpu", "cuda:0"), ("cuda", "cpu"), ("cpu", "cpu")])
def test_devices_of_the_ranks_come_before_the_accelerator_of_the_script(
    kind: Any, name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerators = {"cpu": L.pytorch.accelerators.CPUAccelerator, "cuda": L.pytorch.accelerators.CUDAAccelerator}
    monkeypatch.setattr(kind, "root_device", property(lambda strategy: torch.device(device)))
    strategy = kind()
    strategy.accelerator = accelerators[name]()
    strategy.setup_environment()


@pytest.mark.parametrize("kind", [OutriderStrategy, OutriderFabricStrategy])
def test_options_that_lightning_decides_are_refused(kind: Any) -> None:
    with pytest.raises(ConfigError, match="resume was given, but Lightning saves and loads") as caught:
        kind(resume="auto")
    assert caught.value.hint == "pass ckpt_path= to trainer.fit(), or load with fabric.load()"
    with pytest.raises(ConfigError, match="policy='auto' changes between exact and local steps"):
        kind(policy="auto")


def test_what_ranks_cannot_share_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="2 training loaders, and ranks share the batches of one"):
        fit(Line(), tmp_path, loaders=2)
    with pytest.raises(ConfigError, match="LBFGS calls its closure several times in a step"):
        fit(Closing(), tmp_path)
    with pytest.raises(ConfigError, match="sync_batchnorm=True computes statistics over ranks"):
        fit(Line(), tmp_path, sync_batchnorm=True)
    fit(Line(), tmp_path)


def test_checkpoints_and_means_at_steps_are_refused_for_local_steps() -> None:
    trainer = L.Trainer(
        accelerator="cpu", logger=False, callbacks=[L.pytorch.callbacks.ModelCheckpoint(every_n_train_steps=5)]
    )
    with pytest.raises(ConfigError, match="with policy 'cadence' ranks are at different steps"):
        _refuse_per_step(trainer, "cadence")
    trainer = L.Trainer(accelerator="cpu", logger=False, callbacks=[L.pytorch.callbacks.EMAWeightAveraging()])
    with pytest.raises(ConfigError, match="EMAWeightAveraging averages the weights of each rank's own steps"):
        _refuse_per_step(trainer, "cadence")


def test_a_fabric_loop_without_a_step_says_how_to_evaluate(tmp_path: Path) -> None:
    strategy = OutriderFabricStrategy()
    fabric = L.Fabric(accelerator="cpu", strategy=strategy)
    fabric.launch()
    model = torch.nn.Linear(1, 1)
    model, _ = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.randn(8, 1)), batch_size=2))
    with torch.no_grad():
        assert len(list(loader)) == len(loader) == 4
    with pytest.raises(ConfigError, match="took no step"):
        list(loader)
    strategy.close()
