"""Clipping by hand between backward and step sees the gradient of the whole batch, as with DDP and on one device."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from outrider.rank.averaged_gradients import AveragedGradients

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("clipping_script.py")
EXACT = ("by_steps", "accumulated", "in_pieces", "two_optimizers", "frozen", "scaled")


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The functions of the script, for what one device does."""
    argv, sys.argv = sys.argv, [str(SCRIPT), str(tmp_path_factory.mktemp("alone"))]
    try:
        return runpy.run_path(str(SCRIPT))
    finally:
        sys.argv = argv


def run(folder: Path, *cases: str) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if name != "OUTRIDER_DEVICES"}
    command = [sys.executable, str(SCRIPT), str(folder), *cases]
    return subprocess.run(
        command, cwd=folder, env={**variables, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240
    )


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clipping")
    done = run(folder, *EXACT, "leaving", "like_ddp")
    assert done.returncode == 0, done.stderr
    return folder


def told(folder: Path, case: str) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{case}{rank}.json").read_text()) for rank in range(2)]


def alone(user: dict[str, Any], case: str) -> dict[str, Any]:
    """The same on one device, in plain torch."""
    model, norms, losses = user["make_model"](), [], []
    parts = (model[0], model[2]) if case == "two_optimizers" else (model[2],) if case == "frozen" else (model,)
    model[0].requires_grad_(case != "frozen")
    optimizers = [user["make_optimizer"](part.parameters()) for part in parts]
    every = 2 if case == "accumulated" else 1
    for number, (x, y) in enumerate(_batches(user)):
        loss = user["loss_of"](model, x, y)
        losses.append(loss.item() * len(x))
        (loss / every + (0.1 * model[2].weight.square().sum() if case == "frozen" else 0.0)).backward()
        if number % every == every - 1:
            for part, optimizer in zip(parts, optimizers, strict=True):
                norms.append(user["clip"](part))
                optimizer.step()
                optimizer.zero_grad()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()
    return {"weights": weights, "norms": norms, "loss": sum(losses) / user["SIZE"]}


def _batches(user: dict[str, Any]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    x, y = user["data"]()
    return zip(x.split(user["BATCH"]), y.split(user["BATCH"]), strict=True)


@pytest.mark.parametrize("case", EXACT)
def test_balanced_clipped_by_hand_is_one_device_clipped_by_hand(ended: Path, user: dict[str, Any], case: str) -> None:
    expected = alone(user, case)
    assert min(expected["norms"]) > user["LIMIT"], "every step is clipped"
    for reached in told(ended, case):
        assert reached["norms"] == pytest.approx(expected["norms"], rel=1e-9)
        assert reached["weights"] == pytest.approx(expected["weights"], rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("case", ["accumulated", "in_pieces"])
def test_the_mean_loss_is_that_of_whole_batches(ended: Path, user: dict[str, Any], case: str) -> None:
    expected = alone(user, case)["loss"]
    for reached in told(ended, case):
        assert reached["loss"] == pytest.approx(expected, rel=1e-9)


def test_sync_clipped_by_hand_is_ddp_clipped_by_hand(ended: Path) -> None:
    for reached in told(ended, "like_ddp"):
        assert reached["steps"] == 2
        assert reached["difference"] < 1e-6


def test_a_rank_that_leaves_before_its_step_goes_on_with_the_others(ended: Path) -> None:
    first, second = told(ended, "leaving")
    assert first["weights"] == second["weights"]
    assert first["momenta"] == second["momenta"], "the others clip by hand, and it did not"


@pytest.mark.slow
def test_ranks_that_call_backward_unequally_often_are_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "unequal")
    assert done.returncode != 0
    assert "rank 0 has averaged the gradients of its batch 1 times before, rank 1 0 times" in done.stderr
    assert "hint: cut a batch into pieces inside `with s.no_sync():`" in done.stderr


@pytest.mark.slow
def test_a_bad_gradient_of_a_batch_without_a_step_names_its_rank(tmp_path: Path) -> None:
    done = run(tmp_path, "accumulated_nan")
    assert done.returncode != 0
    assert "rank 1 (cpu), step 1: the gradient is not finite" in done.stderr


def test_gradients_that_nobody_touched_stay_averaged_for_the_next_optimizer() -> None:
    first, second = (torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1) for _ in range(2))
    weight = second.param_groups[0]["params"][0]
    weight.grad = torch.ones_like(weight)
    gradients = AveragedGradients()
    assert not gradients.has(first)
    gradients.saw_average()
    assert gradients.has(first)
    gradients.saw_step((first, second))
    assert gradients.has(second)
    weight.grad.mul_(2)
    assert not gradients.has(second)
