"""fp16 with a prepared GradScaler in a user's loop on CUDA: ranks skip an overflow together, fused or not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import json, sys, torch, outrider
from pathlib import Path
from torch import nn

folder, fused = Path(sys.argv[1]), sys.argv[2] == "fused"
torch.manual_seed(0)
model = nn.Linear(4, 1).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=fused)
scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
steps = []
with outrider.Session(policy="sync", run_dir=folder / "run", seed=1) as s:
    s.prepare(model, optimizer, scaler)
    for number, (batch,) in enumerate(s.batches((torch.ones(64, 4),), batch_size=8)):
        before = model.weight.detach().clone()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(batch).float().square().mean()
        hook = None
        if s.rank == 1 and number == 2:
            hook = model.weight.register_hook(lambda gradient: gradient * float("inf"))
        s.step(loss)
        if hook is not None:
            hook.remove()
        steps.append(not torch.equal(before, model.weight))
    weight = model.weight.tolist()
told = {"steps": steps, "scale": scaler.get_scale(), "weight": weight}
(folder / f"rank{s.rank}.json").write_text(json.dumps(told))
"""


@pytest.mark.parametrize("kind", ["fused", "plain"])
def test_ranks_skip_an_overflow_of_one_together_on_cuda(tmp_path: Path, kind: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    variables = {**os.environ, "OUTRIDER_DEVICES": "cuda:0%60,cuda:0%20"}
    command = [sys.executable, str(script), str(tmp_path), kind]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    told: list[dict[str, Any]] = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert [rank["steps"] for rank in told] == [[True, True, False, True]] * 2
    assert [rank["scale"] for rank in told] == [2.0, 2.0]
    assert told[0]["weight"] == told[1]["weight"]
