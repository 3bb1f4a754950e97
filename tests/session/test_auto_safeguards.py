"""What `auto` does in a user's loop where one rank alone would lose something of the user's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

OBJECTS = """
import torch, outrider

class Projecting(torch.optim.SGD):
    '''Keeps an object beside its momentum, as optimizers that project gradients do.'''

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["projector"] = object()

data = torch.utils.data.TensorDataset(torch.randn(640, 4), torch.zeros(640, dtype=torch.long))
model = torch.nn.Linear(4, 2)
with outrider.Session(devices="cpu,cpu", threads_per_rank=1, run_dir="run") as s:
    s.prepare(model, Projecting(model.parameters(), 0.1, momentum=0.9))
    for epoch in s.epochs(3):
        for x, y in s.batches(data, batch_size=16):
            s.step(torch.nn.functional.cross_entropy(model(x), y))
"""

MEAN = """
import os, signal, sys
import torch, outrider

data = torch.utils.data.TensorDataset(torch.randn(512, 4), torch.zeros(512, dtype=torch.long))
model = torch.nn.Linear(4, 2)
with outrider.Session(devices="cpu,cpu@0.1", run_dir="run") as s:
    s.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    ema, own = s.ema(decay=0.5), model.weight.detach().clone()
    try:
        for epoch in s.epochs(6):
            for number, (x, y) in enumerate(s.batches(data, batch_size=16)):
                s.step(torch.nn.functional.cross_entropy(model(x), y))
                ema.update()
                own.mul_(0.5).add_(model.weight.detach(), alpha=0.5)
                if epoch == 0 and number == 20:
                    os.kill(os.getpid(), signal.SIGTERM)
    finally:
        if s.is_main:
            torch.save([ema.module.weight.detach(), own], "means.pt")
"""


def run(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(script)
    command = [sys.executable, "script.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)


def test_all_share_steps_where_other_ranks_could_not_take_over_the_optimizers_state(tmp_path: Path) -> None:
    done = run(tmp_path, OBJECTS)
    assert done.returncode == 0, done.stderr
    assert "keeps an object of type object in 'projector' of parameter 0" in done.stderr
    assert "so no rank trains alone, and all share every step" in done.stderr
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["status"] == "finished"
    timeline = json.loads((tmp_path / "run" / "timeline.json").read_text())
    assert [event for event in timeline["events"] if event["kind"] == "alone"] == []


@pytest.mark.slow
def test_a_signal_while_other_ranks_rest_leaves_the_running_mean_of_rank_0(tmp_path: Path) -> None:
    import torch

    done = run(tmp_path, MEAN)
    assert done.returncode == 143, done.stderr
    ema, own = torch.load(tmp_path / "means.pt")
    assert torch.allclose(ema, own, atol=1e-6)
