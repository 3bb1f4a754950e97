"""A loop of the user's own goes on with another number of ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import sys
import torch
from torch import nn
import outrider

epochs, policy = int(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda tick: 1 / (1 + tick))
inputs = torch.randn(96, 4, generator=torch.Generator().manual_seed(7))
resume = "run" if epochs > 1 else None
with outrider.Session(run_dir="run", policy=policy, checkpoint_every=1, resume=resume, threads_per_rank=1) as s:
    s.prepare(model, optimizer, schedule)
    for _ in s.epochs(epochs):
        for batch in s.batches(inputs, batch_size=8):
            s.step((model(batch) - batch.sum(1, keepdim=True)).square().mean())
"""


def sit(folder: Path, epochs: int, *, policy: str, num_ranks: int) -> str:
    """Train up to an epoch; what the script wrote to stderr."""
    (folder / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py", str(epochs), policy],
        cwd=folder,
        env={**os.environ, "OUTRIDER_DEVICES": ",".join(["cpu"] * num_ranks), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("policy", ["sync", "cadence"])
def test_a_loop_goes_on_with_any_number_of_ranks(tmp_path: Path, policy: str) -> None:
    told = [sit(tmp_path, number + 1, policy=policy, num_ranks=ranks) for number, ranks in enumerate((2, 3, 1, 2))]
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert [(epoch["epoch"], epoch["samples"], len(epoch["share_by_rank"])) for epoch in record["epochs"]] == [
        (0, 96, 2),
        (1, 96, 3),
        (2, 96, 1),
        (3, 96, 2),
    ]
    assert (
        "outrider: resumed from epoch 1 on cpu,cpu,cpu, saved on cpu,cpu: rank 0's optimizer state also serves rank 2, "
        "speeds are measured anew\n"
    ) in told[1]
