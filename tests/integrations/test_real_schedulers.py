"""Schedules of transformers and timm and the loop of nanoGPT: the same curve on one rank and on two unequal ones.

`import timm` needs torchvision, so its schedule is loaded from its folder: the file is timm's own and needs only torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

SCRIPT = """
import importlib, importlib.util, json, math, sys, types
import torch
from torch import nn
from transformers import get_cosine_schedule_with_warmup
import outrider

def timm_schedulers():
    folder = importlib.util.find_spec("timm").submodule_search_locations[0] + "/scheduler"
    sys.modules["timm_scheduler"] = package = types.ModuleType("timm_scheduler")
    package.__path__ = [folder]
    return importlib.import_module("timm_scheduler.cosine_lr")

policy, folder = sys.argv[1:]
BATCH, SAMPLES, EPOCHS = 4, 128, 3
TOTAL = EPOCHS * SAMPLES // BATCH

def get_lr(iteration):  # nanoGPT's train.py: warm-up, cosine, a floor
    if iteration < 5:
        return 1e-3 * (iteration + 1) / 6
    ratio = (iteration - 5) / (TOTAL - 5)
    return 1e-5 + 0.5 * (1 + math.cos(math.pi * ratio)) * (1e-3 - 1e-5)

models = [nn.Linear(1, 1) for _ in range(3)]
optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in models]
prepared = get_cosine_schedule_with_warmup(optimizers[0], num_warmup_steps=10, num_training_steps=TOTAL)
by_updates = timm_schedulers().CosineLRScheduler(
    optimizers[1], t_initial=TOTAL, lr_min=1e-5, warmup_t=8, warmup_lr_init=1e-6, t_in_epochs=False
)
curve = []
with outrider.Session(policy=policy, run_dir=folder, outer="none", threads_per_rank=1) as s:
    s.prepare(*models, *optimizers, prepared)
    for epoch in s.epochs(EPOCHS):
        for batch in s.batches(torch.ones(SAMPLES, 1), batch_size=BATCH):
            s.backward(sum(model(batch).square().mean() for model in models))
            by_updates.step_update(s.global_step)
            optimizers[2].param_groups[0]["lr"] = get_lr(s.global_step)
            for optimizer in optimizers:
                s.optimizer_step(optimizer)
            curve.append([s.global_step, *(optimizer.param_groups[0]["lr"] for optimizer in optimizers)])
    told = {"curve": curve, "steps": s.global_step, "total": TOTAL}
    open(f"{folder}/curve{s.rank}.json", "w").write(json.dumps(told))
"""


def curves(folder: Path, policy: str, devices: str) -> list[dict[str, Any]]:
    folder.mkdir()
    (folder / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py", policy, str(folder)],
        cwd=folder,
        env={**os.environ, "OUTRIDER_DEVICES": devices, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(path.read_text()) for path in sorted(folder.glob("curve*.json"))]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return curves(tmp_path_factory.mktemp("alone") / "run", "sync", "cpu")[0]


def test_one_rank_follows_every_curve_to_its_end(alone: dict[str, Any]) -> None:
    assert alone["steps"] == alone["total"] == len(alone["curve"])
    assert alone["curve"][-1][1:] == pytest.approx([0.0, 1e-5, 1e-5], abs=1e-6)


@pytest.mark.parametrize("policy", ["balanced", "cadence"])
def test_two_unequal_ranks_have_the_curve_of_one(tmp_path: Path, alone: dict[str, Any], policy: str) -> None:
    expected = {step: rates for step, *rates in alone["curve"]}
    ranks = curves(tmp_path / "run", policy, "cpu,cpu@0.4")
    assert len(ranks) == 2
    for told in ranks:
        assert told["steps"] == alone["total"]
        for step, *rates in told["curve"]:
            assert rates == pytest.approx(expected[step], rel=1e-6, abs=1e-12)
