"""A rank that fails takes the others with it: only its own traceback is shown, the others say what they lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ports import free_port

pytestmark = pytest.mark.slow

SCRIPT = """
import os, sys, torch, outrider
from torch import nn
inputs = torch.randn(64, 4)

def fail_later(model, batch):
    if os.environ["RANK"] == "1":
        raise ValueError("a mistake of the user's")
    return model(batch[0]).square().mean()

outrider.train(
    lambda: nn.Linear(4, 1), lambda parameters: torch.optim.SGD(parameters, lr=0.1), fail_later, (inputs,),
    batch_size=8, epochs=1, policy="sync", devices="cpu,cpu", timeout_s=60, run_dir=sys.argv[1],
).join()
"""


def test_only_the_rank_that_failed_first_shows_a_traceback(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    port = free_port()
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path / "run")],
            env={**shared, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    lost, failed = (rank.communicate(timeout=240)[1] for rank in ranks)
    assert "ValueError: a mistake of the user's" in failed
    first, second = lost.splitlines()
    assert first.startswith("outrider: rank 0 of 2 lost rank 1 while exchanging ")
    assert second == "hint: look for the first error among the other ranks"
    assert [rank.returncode for rank in ranks] == [1, 1]
