"""Rank 0 trains alone and leaves its loops by a flag of its own: the ranks that rested leave theirs, too."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from outrider.errors import ConfigError
from outrider.rank import session_run

SCRIPT = """
import sys
import torch, outrider

case = sys.argv[1]
data = torch.utils.data.TensorDataset(torch.randn(512, 4), torch.zeros(512, dtype=torch.long))
model, done, passes = torch.nn.Linear(4, 2), False, 0
# A tenth of the speed, and a run too short to try sharing: rank 0 works alone from the first step on.
with outrider.Session(devices="cpu,cpu@0.1", run_dir="run") as s:
    s.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    for epoch in s.epochs(1 if case == "own loop" else 6):
        for _ in range({"two passes": 2, "own loop": 6}.get(case, 1)):
            passes += 1
            for x, y in s.batches(data, batch_size=16):
                s.step(torch.nn.functional.cross_entropy(model(x), y))
                if case != "to the end" and s.global_step >= 80:
                    done = True
                    break
            if done:
                break
        if done:
            break
    alike = s.evaluate_together(lambda model, batch: model(batch[0]).sum(1).mean(), data) if case == "evaluated" else 0
    weights = s.gather(model.weight.tolist())
    if s.is_main:
        assert all(one == weights[0] for one in weights)
print("left", s.rank, done, flush=True)
"""

SLOW_CASES = ("epochs", "own loop", "two passes", "to the end")


@pytest.mark.parametrize("case", ["evaluated", *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW_CASES)])
def test_ranks_that_rest_leave_the_loops_that_rank_0_has_left(tmp_path: Path, case: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py", case], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "left 0 " + str(case != "to the end") in done.stdout
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["status"] == "finished"
    assert record["epochs"][0]["share_by_rank"] == [1.0, 0.0]
    assert "left 1 False" in (tmp_path / "run" / "rank1.log").read_text()


def test_a_loop_that_never_ends_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """`while step < 1000` with a counter of its own, which stands still on a rank that rests."""
    monkeypatch.setattr(session_run, "MOST_REFUSED", 3)
    resting = SimpleNamespace(
        _life=SimpleNamespace(splitter=SimpleNamespace(stays_alone=True)),
        world=SimpleNamespace(rank=1, follow=lambda what: False),
        _num_refused=0,
    )
    goes_on = partial(session_run.SessionRun.goes_on, resting, "a pass over the data")  # type: ignore[arg-type]
    assert [goes_on() for _ in range(3)] == [False] * 3
    with pytest.raises(ConfigError, match="rank 0 has left its loops, but rank 1 asked for more than 3 further passes"):
        goes_on()
