"""Libraries that would average a prepared model as well: refused, with a way out that works."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import outrider

pytestmark = pytest.mark.slow

ACCELERATE = """
import os, sys, torch, outrider
from torch import nn
from accelerate import Accelerator

model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with outrider.Session(devices="cpu,cpu", policy="cadence", run_dir=sys.argv[1]) as s:
    s.prepare(model, optimizer)
    for name in sys.argv[2:]:
        del os.environ[name]
    wrapped = Accelerator(cpu=True).prepare(model)
    for (batch,) in s.batches((torch.ones(64, 2),), batch_size=8):
        wrapped(batch).square().mean().backward()
        optimizer.step(None)
        optimizer.zero_grad()
    print("trained", s.metrics.samples)
"""


def run_accelerate(tmp_path: Path, *hidden: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(ACCELERATE)
    variables = {name: value for name, value in os.environ.items() if name != "OUTRIDER_DEVICES"}
    command = [sys.executable, str(script), str(tmp_path / "run"), *hidden]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)


def test_a_wrapper_around_a_prepared_model_is_refused_at_its_first_batch(tmp_path: Path) -> None:
    ended = run_accelerate(tmp_path)
    assert ended.returncode != 0
    assert "DistributedDataParallel is around a prepared model" in ended.stderr
    assert "delete RANK, LOCAL_RANK and WORLD_SIZE from os.environ" in ended.stderr


def test_the_hint_is_a_way_out(tmp_path: Path) -> None:
    ended = run_accelerate(tmp_path, "RANK", "LOCAL_RANK", "WORLD_SIZE")
    assert ended.returncode == 0, ended.stderr
    assert "trained 64" in ended.stdout


def test_a_wrapped_model_is_refused(tmp_path: Path) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)  # opens no port
    try:
        wrapped = DistributedDataParallel(nn.Linear(2, 1))
        with outrider.Session(devices="cpu", run_dir=tmp_path) as s, pytest.raises(outrider.ConfigError) as caught:
            s.prepare(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1))
    finally:
        dist.destroy_process_group()
    assert "hint: pass the model itself, not the wrapper: s.prepare(model.module, optimizer)" in str(caught.value)
