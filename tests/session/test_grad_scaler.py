"""A GradScaler in a user's loop: ranks skip a shared step together, and the loss is told unscaled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outrider

pytestmark = pytest.mark.slow

PREPARED = """
import json, sys, torch, outrider
from pathlib import Path
from torch import nn

way, _, dtype = sys.argv[2].partition("-")
if dtype:
    torch.set_default_dtype(getattr(torch, dtype))
torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
folder, policy = Path(sys.argv[1]), sys.argv[3]
steps, losses, scales = [], [], []
with outrider.Session(policy=policy, devices="cpu,cpu", shares=(0.5, 0.5), run_dir=folder / "run", seed=1) as s:
    s.prepare(model, optimizer, *([scaler] if way != "unprepared" else []))
    for number, (batch,) in enumerate(s.batches((torch.ones(64, 4),), batch_size=8)):
        before = model.weight.detach().clone()
        loss = model(batch).square().mean()
        losses.append(float(loss))
        if s.rank == 1 and number == 2:
            # The gradient overflows, and the loss does not.
            model.weight.register_hook(lambda gradient: gradient * float("inf"))
            loss = model(batch).square().mean()
        if way == "session":
            s.step(loss)
        else:
            s.backward(scaler.scale(loss))
            if way == "unscaling":
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        if s.rank == 1 and number == 2:
            model.weight._backward_hooks.clear()
        steps.append(not torch.equal(before, model.weight))
        scales.append(scaler.get_scale())
    weight = model.weight.tolist()
told = {"steps": steps, "scales": scales, "weight": weight, "loss": s.metrics.loss, "mean": sum(losses) / len(losses)}
(folder / f"rank{s.rank}.json").write_text(json.dumps(told))
"""


def run(tmp_path: Path, way: str, policy: str = "sync") -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(PREPARED)
    variables = {name: value for name, value in os.environ.items() if name != "OUTRIDER_DEVICES"}
    command = [sys.executable, str(script), str(tmp_path), way, policy]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)


def told_by_both(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("way", ["session", "unscaling", "unscaling-float64"])
def test_all_ranks_skip_an_overflow_of_one_together(tmp_path: Path, way: str) -> None:
    ended = run(tmp_path, way)
    assert ended.returncode == 0, ended.stderr
    first, second = told_by_both(tmp_path)
    assert first["steps"] == second["steps"] == [True, True, False, True]
    assert first["scales"] == second["scales"] == [4.0, 4.0, 2.0, 2.0]
    assert first["weight"] == second["weight"]
    assert first["loss"] == pytest.approx((first["mean"] + second["mean"]) / 2)


def test_in_local_steps_a_rank_skips_alone(tmp_path: Path) -> None:
    ended = run(tmp_path, "scaling", "cadence")
    assert ended.returncode == 0, ended.stderr
    first, second = told_by_both(tmp_path)
    assert all(first["steps"])
    assert second["steps"][2] is False
    assert first["weight"] == second["weight"]


def test_a_scaler_that_was_not_prepared_is_refused(tmp_path: Path) -> None:
    ended = run(tmp_path, "unprepared")
    assert ended.returncode != 0
    assert "a GradScaler stepped a prepared optimizer, but was not given to prepare()" in ended.stderr
    assert "hint: call model, optimizer, scaler = s.prepare(model, optimizer, scaler)" in ended.stderr


def test_a_checkpoint_keeps_the_scale(tmp_path: Path) -> None:
    reached = []
    for epochs, resume in ((1, None), (2, tmp_path)):
        model = nn.Linear(2, 1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with outrider.Session(devices="cpu", run_dir=tmp_path, checkpoint_every=1, resume=resume) as s:
            s.prepare(model, optimizer, scaler)
            for _ in s.epochs(epochs):
                reached.append(scaler.get_scale())
                for (x,) in s.batches((torch.ones(16, 2),), batch_size=4):
                    s.step(model(x).square().mean())
        assert type(scaler) is torch.amp.GradScaler
    assert reached == [4.0, 16.0]


def test_several_optimizers_of_one_scaler_are_stepped_by_it(tmp_path: Path) -> None:
    left, right = nn.Linear(2, 1), nn.Linear(1, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (left, right)]
    scaler = torch.amp.GradScaler("cpu")
    with outrider.Session(devices="cpu", run_dir=tmp_path) as s:
        s.prepare(left, right, *optimizers, scaler)
        for (x,) in s.batches((torch.ones(4, 2),), batch_size=4):
            s.backward(right(left(x)).mean())
            with pytest.raises(outrider.ConfigError) as caught:
                s.optimizer_step(optimizers[0])
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
    assert "hint: call scaler.step(optimizer) for each, then scaler.update()" in str(caught.value)
