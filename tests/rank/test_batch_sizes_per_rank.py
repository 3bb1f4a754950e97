"""Runs in which each rank has a batch size of its own: every sample once, the same numbers as in the lab."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import outrider
from outrider.replica.recipe import Recipe
from outrider.virtual.lab import Bench
from outrider.virtual.lab import train as train_in_lab

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

SIZE, SIZES = 331, (12, 4)
MEAN = 8


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(SIZE, 6, generator=torch.Generator().manual_seed(1))
    return inputs, inputs.sum(1, keepdim=True)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def make_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)


def step(model: nn.Module, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = (model(batch[0]) - batch[1]).square().mean()
    return loss


PROBLEM: dict[str, Any] = {"model": make_model, "optimizer": make_optimizer, "step": step}


def run(folder: Path, **changes: Any) -> outrider.Run:
    options = {"batch_size": SIZES, "epochs": 2, "threads_per_rank": 1, "record_schedule": True, "anchor": 2}
    options |= {"devices": "cpu,cpu@0.5", "scheduler": make_scheduler, "policy": "cadence"}
    started = outrider.train(**PROBLEM, dataset=make_data(), run_dir=folder, **{**options, **changes})
    started.join()
    return started


def segments_of(folder: Path) -> Any:
    return json.loads((folder / "schedule.json").read_text())["segments"]


def steps_of(segment: Any, rank: int) -> list[tuple[int, int]]:
    return [(entry[1], entry[2]) for entry in segment[rank] if entry[0] == "step"]


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_each_rank_takes_batches_of_its_own_size_and_every_sample_once(policy: str, tmp_path: Path) -> None:
    done = run(tmp_path, policy=policy)
    assert [epoch.samples for epoch in done.epochs] == [SIZE, SIZE]
    segments = segments_of(tmp_path)
    for segment in segments:
        used = Counter(
            p for rank in (0, 1) for start, count in steps_of(segment, rank) for p in range(start, start + count)
        )
        assert used == Counter(range(SIZE))
        for rank, size in enumerate(SIZES):
            # The last batch of an epoch is what is left; one sample more where one would be left alone.
            assert {count for _, count in steps_of(segment, rank)[:-2]} <= {size}
    recipe = Recipe(**PROBLEM, dataset=make_data(), batch_size=SIZES, epochs=2, policy=policy, scheduler=make_scheduler)
    again = train_in_lab(recipe, Bench(speeds=(1.0, 0.5)), schedule=segments).state_dict()
    trained = load_file(tmp_path / "model.safetensors")
    assert {name: torch.equal(tensor, again[name]) for name, tensor in trained.items()} == dict.fromkeys(trained, True)


def test_a_run_with_sizes_by_device_is_resumed_with_a_list(tmp_path: Path) -> None:
    sizes = {"cpu": 12, "cpu@0.5": 4}
    run(tmp_path / "first", batch_size=sizes, epochs=1, checkpoint_every=1)
    done = run(tmp_path / "second", epochs=2, resume=tmp_path / "first")
    assert [epoch.epoch for epoch in done.epochs] == [1]
    with pytest.raises(outrider.ConfigError, match=r"^cannot resume: batch_size was \[12, 4\], now \[4, 12\]"):
        run(tmp_path / "third", batch_size=[4, 12], resume=tmp_path / "first")


def test_the_lab_has_sizes_per_rank_and_steps_count_their_mean() -> None:
    def rates(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda tick: 1.0 / (1 + tick))

    done = outrider.lab(
        **PROBLEM,
        dataset=make_data(),
        speeds=(1.0, 0.5),
        batch_size=[12, 4],
        policy="cadence",
        steps=20,
        anchor=2,
        scheduler=rates,
    )
    assert sum(done.samples_by_rank) == 20 * MEAN


BY_RANK = "batch_size has one value per rank, but policy"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"policy": "sync"},
            f"{BY_RANK} 'sync' gives every rank an equal batch\nhint: choose another policy: cadence, async",
        ),
        (
            {"policy": "balanced"},
            f"{BY_RANK} 'balanced' splits one batch of all ranks\n"
            "hint: pass one batch_size, and shares=[0.75, 0.25] to fix the split",
        ),
        (
            {"policy": "auto"},
            f"{BY_RANK} 'auto' begins with the steps of one device\nhint: choose another policy: cadence, async",
        ),
        ({"batch_size": [8, 0]}, "batch_size must be a whole number >= 1, got 0\nhint: pass batch_size=1 or more"),
        ({"batch_size": []}, "batch_size must be a whole number >= 1, got ()\nhint: pass batch_size=1 or more"),
        (
            {"batch_size": [8, 8, 8]},
            "batch_size has 3 values for 2 ranks\n"
            "hint: pass one value per device, in the order of devices, or one batch_size for all",
        ),
        (
            {"batch_size": {"cpu": 8, "cuda:0": 8}},
            "batch_size names cpu, cuda:0, the devices are cpu, cpu@0.5\n"
            "hint: name every device as it is written in devices, or pass a list in their order",
        ),
        (
            {"drop_last": True},
            "drop_last=True was given, but batch_size has one value per rank: no size says what the last batch is\n"
            "hint: leave drop_last out: the last samples are dealt to the ranks that finish them first",
        ),
        (
            {"accumulate": 5},
            "accumulate must be <= batch_size, got accumulate=5, batch_size=(12, 4)\n"
            "hint: a batch is computed in `accumulate` pieces of at least one sample",
        ),
    ],
)
def test_sizes_that_cannot_be_honoured_are_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(outrider.ConfigError) as caught:
        run(tmp_path / "run", **{"policy": "cadence", "anchor": None, **options})
    assert str(caught.value) == words


def test_devices_by_name_are_refused_where_there_are_none(tmp_path: Path) -> None:
    with pytest.raises(outrider.ConfigError, match=r"^batch_size names devices, which the lab does not have"):
        outrider.lab(**PROBLEM, dataset=make_data(), speeds=(1.0,), batch_size={"cpu": 8}, policy="cadence")
    with outrider.Session(devices="cpu", run_dir=tmp_path) as s:
        model = make_model()
        s.prepare(model, make_optimizer(model.parameters()))
        with pytest.raises(
            outrider.ConfigError, match=r"^batch_size has one value per rank, which only train\(\) takes"
        ):
            s.batches(make_data(), batch_size=[8, 4])  # type: ignore[arg-type]
