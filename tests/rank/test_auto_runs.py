"""Real runs that change between exact and local steps: nothing is lost or used twice, and the lab repeats them."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

import outrider
from outrider.policy import AverageReport, Policy, PolicySpec, SegmentContext
from outrider.policy.policies.auto import auto
from outrider.policy.policy_chooser import PolicyChooser
from outrider.record import checkpoint, checkpoint_files
from outrider.replica.recipe import Recipe
from outrider.virtual.lab import Bench
from outrider.virtual.lab import train as train_in_lab

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

SIZE, BATCH, SEED, EPOCHS = 331, 4, 3, 3
EXACT, LOCAL = 9, 5
"""Reports after which a restless chooser changes its mind."""


class Restless(PolicyChooser):
    """Changes between exact and local steps by the number of reports, whatever they say."""

    count, changes = 0, 0

    def learn_exact(self, report: AverageReport, splitter: Any, left: int | None) -> list[Any]:
        return self._count(report, EXACT)

    def learn_local(self, report: AverageReport, planner: Any) -> list[Any]:
        return self._count(report, LOCAL)

    def _count(self, report: AverageReport, limit: int) -> list[Any]:
        self.count += 1
        if self.count < limit or not self.changes:
            return []
        self.count, self.changes = 0, self.changes - 1
        return [self._change(report, is_exact=not self.is_exact, reason="restless")]


def restless(changes: int = 1000) -> PolicySpec:
    def open_auto(segment: SegmentContext) -> Policy:
        # The rank's own, whose state checkpoints keep.
        chooser: Any = segment.chooser
        if not isinstance(chooser, Restless):
            chooser.__class__ = Restless
            chooser.changes = changes
        return auto(segment)

    return PolicySpec(name="restless", open=open_auto, shares_steps=True, batch_is_global=True, switches=True)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SIZE, 6, generator=generator)
    return TensorDataset(inputs, (inputs.sum(1) > 0).long(), torch.arange(SIZE))


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2))


def kept_in(folder: Path | None) -> Callable[[nn.Module, Any], torch.Tensor]:
    """A step that writes down which samples it was given."""

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        if folder is not None:
            with open(folder / f"{os.getpid()}.samples", "a") as file:
                file.write("".join(f"{number}\n" for number in batch[2].tolist()))
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    return step


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.02)


def run_for_real(folder: Path, **changes: Any) -> Path:
    # With given shares no rank works alone, so every step has its report.
    options = {"policy": restless(), "shares": (0.5, 0.5), "anchor": 2, "devices": "cpu,cpu@0.5", "epochs": EPOCHS}
    run = outrider.train(
        make_model,
        make_optimizer,
        kept_in(folder),
        data(),
        run_dir=folder / "run",
        batch_size=BATCH,
        seed=SEED,
        threads_per_rank=1,
        **{**options, **changes},
    )
    run.join()
    return folder


def used(folder: Path) -> Counter[int]:
    return Counter(int(line) for file in folder.glob("*.samples") for line in file.read_text().split())


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "run" / "timeline.json").read_text())["events"]
    return [event for event in found if event["kind"] == kind]


@pytest.fixture(scope="module")
def changing_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_for_real(tmp_path_factory.mktemp("changing"), record_schedule=True)


def test_every_sample_is_used_once_per_epoch(changing_run: Path) -> None:
    changes = [event["value"] for event in events(changing_run, "policy")]
    assert changes[:3] == ["local", "exact", "local"]
    assert used(changing_run) == Counter(dict.fromkeys(range(SIZE), EPOCHS))
    epochs = json.loads((changing_run / "run" / "record.json").read_text())["epochs"]
    assert [(epoch["samples"], epoch["is_complete"]) for epoch in epochs] == [(SIZE, True)] * EPOCHS


def test_the_lab_repeats_it_bit_for_bit(changing_run: Path) -> None:
    segments = json.loads((changing_run / "run" / "schedule.json").read_text())["segments"]
    assert len(segments) > 2 * EPOCHS
    recipe = Recipe(
        model=make_model,
        optimizer=make_optimizer,
        step=kept_in(None),
        dataset=data(),
        batch_size=BATCH,
        epochs=EPOCHS,
        seed=SEED,
        policy="auto",
        anchor=2,
    )
    again = train_in_lab(recipe, Bench(speeds=(1.0, 1.0)), schedule=segments).state_dict()
    trained = load_file(changing_run / "run" / "model.safetensors")
    assert all(torch.equal(tensor, again[name]) for name, tensor in trained.items())


def test_shared_steps_after_local_ones_begin_with_the_same_optimizer_everywhere(tmp_path: Path) -> None:
    """Adam's moments differ after local steps; if they stayed apart, so would the parameters."""
    run_for_real(tmp_path, policy=restless(changes=2), checkpoint_every=1)
    assert [event["value"] for event in events(tmp_path, "policy")] == ["local", "exact"]
    [path, *_] = checkpoint_files.find(tmp_path / "run")
    first, second = (checkpoint.load_rank(path, rank)["optimizer"]["state"] for rank in range(2))
    assert first
    for number, entry in first.items():
        assert all(torch.equal(value, second[number][key]) for key, value in entry.items())


def test_shared_steps_on_other_devices_begin_with_the_same_optimizer_everywhere(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint is from local steps, whose optimizers differ; another number of ranks begins with exact steps."""
    run_for_real(tmp_path, policy=restless(changes=1), epochs=1, checkpoint_every=1)
    # With given shares no rank works alone, whose optimizer state would be sent to the others.
    more = {"devices": "cpu,cpu,cpu", "shares": (0.5, 0.25, 0.25), "epochs": 2, "checkpoint_every": 1}
    run_for_real(tmp_path, policy=restless(changes=0), resume=tmp_path / "run", **more)
    [path, *_] = checkpoint_files.find(tmp_path / "run")
    states = [checkpoint.load_rank(path, rank)["optimizer"]["state"] for rank in range(3)]
    for number, entry in states[0].items():
        assert all(torch.equal(value, other[number][key]) for other in states[1:] for key, value in entry.items())
    assert "rank 0's optimizer state serves all ranks, speeds are measured anew" in capfd.readouterr().err


def test_a_run_with_pauses_for_checkpoints_uses_every_sample_once(tmp_path: Path) -> None:
    run_for_real(tmp_path, checkpoint_every="0.01s")
    assert used(tmp_path) == Counter(dict.fromkeys(range(SIZE), EPOCHS))


def test_one_rank_trains_as_with_balanced(tmp_path: Path) -> None:
    models = []
    for policy in ("auto", "balanced"):
        folder = tmp_path / policy
        folder.mkdir()
        run_for_real(folder, policy=policy, devices="cpu", shares=None)
        models.append(load_file(folder / "run" / "model.safetensors"))
    assert all(torch.equal(tensor, models[1][name]) for name, tensor in models[0].items())
