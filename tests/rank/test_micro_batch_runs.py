"""Whole runs in which one rank runs out of memory: no other rank sees it, and one device would learn the same."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
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

SIZE, BATCH = 101, 8
POLICIES = ["sync", "balanced", "cadence", "async"]


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(SIZE, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return inputs, inputs.sum(1, keepdim=True)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def step(model: nn.Module, batch: Any, *, fits: int | None = None) -> torch.Tensor:
    """Squared error; on rank 1 memory runs out in the forward pass of more samples than fit."""
    inputs, targets = batch
    outputs = model(inputs)
    is_small = fits is not None and torch.distributed.is_initialized() and torch.distributed.get_rank() == 1
    if is_small and len(inputs) > (fits or 0):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    loss: torch.Tensor = (outputs - targets).square().mean()
    return loss


def options(policy: str, **changes: Any) -> dict[str, Any]:
    basics = {"batch_size": BATCH, "epochs": 2, "policy": policy, "threads_per_rank": 1, "record_schedule": True}
    fixed = {"anchor": 2} if policy in ("cadence", "async") else {}
    return {**basics, **fixed, "shares": [0.5, 0.5], "devices": "cpu,cpu", **changes}


def run(folder: Path, policy: str, *, fits: int | None, **changes: Any) -> outrider.Run:
    own_step = partial(step, fits=fits)
    started = outrider.train(
        make_model, make_optimizer, own_step, make_data(), run_dir=folder, **options(policy, **changes)
    )
    started.join()
    return started


def trained(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_close(mine: dict[str, torch.Tensor], its: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == its.keys()
    for name in mine:
        torch.testing.assert_close(mine[name], its[name], rtol=1e-9, atol=1e-12)


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    found = json.loads((folder / "timeline.json").read_text())["events"]
    return [event for event in found if event["kind"] == kind]


def replayed(folder: Path, policy: str) -> dict[str, torch.Tensor]:
    """The same schedule in the lab, where no memory runs out."""
    segments = json.loads((folder / "schedule.json").read_text())["segments"]
    recipe = Recipe(
        model=make_model,
        optimizer=make_optimizer,
        step=step,
        dataset=make_data(),
        batch_size=BATCH,
        epochs=2,
        policy=policy,
    )
    return train_in_lab(recipe, Bench(speeds=(1.0, 1.0)), schedule=segments).state_dict()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_rank_out_of_memory_learns_what_it_would_have_learned(policy: str, tmp_path: Path) -> None:
    done = run(tmp_path, policy, fits=3)
    assert [epoch.samples for epoch in done.epochs] == [SIZE, SIZE]
    assert_close(trained(tmp_path), replayed(tmp_path, policy))
    (event,) = events(tmp_path, "micro-batch")
    assert (event["rank"], event["reason"]) == (1, f"out of memory with {event['tried']} samples at once")
    assert event["value"] <= 3
    segments = json.loads((tmp_path / "schedule.json").read_text())["segments"]
    for segment in segments:
        used = Counter(
            p for rank in segment for e in rank if e[0] in ("step", "shared") for p in range(e[1], e[1] + e[2])
        )
        assert set(used.values()) == {1}


def test_balanced_equals_one_device_although_memory_ran_out(tmp_path: Path) -> None:
    run(tmp_path / "two", "balanced", fits=2)
    alone = outrider.train(
        make_model,
        make_optimizer,
        step,
        make_data(),
        run_dir=tmp_path / "one",
        **{**options("balanced"), "devices": "cpu", "shares": None},
    )
    alone.join()
    assert_close(trained(tmp_path / "two"), trained(tmp_path / "one"))


def test_auto_trains_every_sample_once_although_memory_ran_out(tmp_path: Path) -> None:
    done = run(tmp_path, "auto", fits=3, shares=None, epochs=3)
    assert [epoch.samples for epoch in done.epochs] == [SIZE] * 3


def test_a_resumed_run_begins_with_the_size_that_fitted(tmp_path: Path) -> None:
    run(tmp_path / "first", "cadence", fits=3, epochs=1, checkpoint_every=1)
    assert len(events(tmp_path / "first", "micro-batch")) == 1
    run(tmp_path / "second", "cadence", fits=3, epochs=2, resume=tmp_path / "first")
    assert events(tmp_path / "second", "micro-batch") == []


def test_sizes_per_rank_and_a_single_sample_that_does_not_fit(tmp_path: Path) -> None:
    run(tmp_path / "given", "cadence", fits=2, micro_batch=["auto", 2])
    assert events(tmp_path / "given", "micro-batch") == []
    with pytest.raises(outrider.StepError, match=r"^rank 1 \(cpu\), step 0: out of memory with a single sample\n"):
        run(tmp_path / "none", "sync", fits=0)


def test_the_lab_takes_sizes_per_rank() -> None:
    def train_with(**changes: Any) -> dict[str, torch.Tensor]:
        return outrider.lab(
            make_model, make_optimizer, step, make_data(), speeds=(1.0, 0.5), batch_size=8, policy="cadence", **changes
        ).state_dict()

    assert_close(train_with(micro_batch=[3, 2]), train_with())
    with pytest.raises(outrider.ConfigError, match="micro_batch has 1 values for 2 ranks"):
        train_with(micro_batch=[3])
