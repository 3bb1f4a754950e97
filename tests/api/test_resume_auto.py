"""`resume="auto"`: one line for the first start and for every restart."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import outrider

pytestmark = pytest.mark.slow

Trainer = Callable[..., outrider.Run]

SCRIPT = """
import sys
import torch
from safetensors.torch import load_file
from torch import nn
import outrider

def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))

run = outrider.train(
    model=make_model, optimizer=lambda p: torch.optim.Adam(p, 1e-2),
    step=lambda model, batch: (model(batch) - 1).square().mean(),
    dataset=torch.randn(96, 4, generator=torch.Generator().manual_seed(1)),
    batch_size=8, epochs=4, policy="sync", devices="cpu,cpu", checkpoint_every=0.5,
    run_dir=sys.argv[1], resume="auto",
)
run.join()
"""


def start(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    script = folder.parent / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    return subprocess.run(
        [sys.executable, str(script), str(folder)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_a_run_that_was_killed_goes_on_with_the_same_line(tmp_path: Path) -> None:
    whole = start(tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    assert "no checkpoint yet, starting from the beginning" in whole.stderr
    killed = start(tmp_path / "run", OUTRIDER_FAULTS="rank=1,at=step,n=20,do=kill")
    assert killed.returncode != 0
    assert "SIGKILL" in killed.stderr
    ended = start(tmp_path / "run")
    assert ended.returncode == 0, ended.stderr
    assert 'resume="auto": going on from epoch0000' in ended.stderr
    left, right = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "run"))
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_run_that_had_ended_ends_again_with_its_model(train_here: Trainer, tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": 2, "checkpoint_every": 1, "resume": "auto"}
    first = train_here(**options).join()
    again = train_here(**options).join()
    assert again.epochs == ()
    assert all(torch.equal(first.state_dict[name], tensor) for name, tensor in again.state_dict.items())


def test_auto_needs_to_know_where_to_look(train_here: Trainer) -> None:
    with pytest.raises(outrider.ConfigError) as refused:
        train_here(resume="auto", run_dir=None)
    assert str(refused.value) == (
        'resume="auto" needs run_dir: it goes on from the newest checkpoint there\n'
        'hint: pass run_dir="runs/mine", the same at every start'
    )
