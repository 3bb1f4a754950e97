"""One job of two torch builds: rank 0 runs in this Python, rank 1 in another one that has a different torch.

Needs such a Python, in which this checkout is installed too; `OUTRIDER_OTHER_PYTHON` names it:

    python -m venv other && other/bin/pip install torch==2.9.1 pytest --editable .
    OUTRIDER_OTHER_PYTHON=other/bin/python python -m pytest tests/launch/test_two_builds.py
"""

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

OTHER = os.environ.get("OUTRIDER_OTHER_PYTHON")
POLICIES = ("sync", "balanced", "cadence", "async", "auto")
NUM_SAMPLES = 256
EXACT, TOLERANCE = {"rtol": 0.0, "atol": 0.0}, {"rtol": 1e-5, "atol": 1e-6}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(OTHER is None, reason="OUTRIDER_OTHER_PYTHON names no Python with another torch"),
]
SCRIPT = """
import sys, torch, outrider
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
inputs = torch.randn(256, 8, generator=torch.Generator().manual_seed(1))
data = torch.utils.data.TensorDataset(inputs, (inputs.sum(1) > 0).long())
with outrider.Session(run_dir="run", policy=sys.argv[1]) as s:
    s.prepare(model, optimizer)
    for _ in s.epochs(2):
        for x, y in s.batches(data, batch_size=16):
            s.step(torch.nn.functional.cross_entropy(model(x), y))
    accuracy = s.evaluate_together(lambda model, batch: (model(batch[0]).argmax(1) == batch[1]).float().mean(), data)
    told = s.gather([torch.__version__, model[0].weight.double().sum().item()])
    if s.is_main:
        print(s.metrics.samples, s.metrics.is_complete)
        print(*[len(set(one)) for one in zip(*told)])
        print(accuracy > 0.8)
"""


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(NUM_SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    return inputs, (inputs.sum(1) > 0).long()


def started(folder: Path, environments: list[str] | None, **options: Any) -> outrider.Run:
    fixed: dict[str, Any] = {} if options["policy"] in ("sync", "auto") else {"shares": [0.5, 0.5]}
    if options["policy"] == "cadence":
        fixed |= {"anchor": 4, "guard": False}  # windows by the clock would differ from run to run
    return outrider.train(
        mlp,
        lambda parameters: torch.optim.AdamW(parameters, 1e-2),
        lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        data(),
        **{
            "batch_size": 16,
            "epochs": 3,
            "devices": "cpu,cpu",
            "environments": environments,
            "threads_per_rank": 1,
            "run_dir": folder,
            "quiet": True,
            **fixed,
            **options,
        },
    )


def builds(folder: Path) -> list[str]:
    """The torch of each rank, as the timeline has it."""
    events = json.loads((folder / "timeline.json").read_text())["events"]
    (told,) = [event for event in events if event["kind"] == "builds"]
    return [one["torch"] for one in told["value"]]


@pytest.fixture
def both() -> list[str]:
    assert OTHER is not None
    return ["here", str(Path(OTHER).absolute())]


@pytest.fixture
def both_same_python(both: list[str]) -> list[str]:
    """The two builds where train() can send functions from one to the other."""
    asked = [both[1], "-c", "import sys; print(*sys.version_info[:2])"]
    version = tuple(map(int, subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()))
    if version != sys.version_info[:2]:
        pytest.skip(f"{both[1]} is another minor version of Python, for which train() is refused")
    return both


@pytest.mark.parametrize("policy", POLICIES)
def test_two_builds_train_one_model(tmp_path: Path, both_same_python: list[str], policy: str) -> None:
    both = both_same_python
    run = started(tmp_path / "both", both, policy=policy)
    mixed = run.join()
    assert len(set(builds(run.run_dir))) == 2
    assert [metrics.samples for metrics in mixed.epochs] == [NUM_SAMPLES] * 3
    if policy in ("sync", "balanced", "cadence"):
        one, other = (
            started(tmp_path / str(number), [name] * 2, policy=policy).join().state_dict
            for number, name in enumerate(both)
        )
        # Kernels of two builds may round differently.
        exact = all(torch.equal(one[name], other[name]) for name in one)
        for name, expected in one.items():
            torch.testing.assert_close(mixed.state_dict[name], expected, **(EXACT if exact else TOLERANCE))
    else:
        assert mixed.epochs[-1].loss < mixed.epochs[0].loss


@pytest.mark.parametrize("policy", ["sync", "cadence"])
def test_a_run_goes_on_where_the_builds_have_changed_places(
    tmp_path: Path, both_same_python: list[str], policy: str
) -> None:
    both = both_same_python
    whole = started(tmp_path / "whole", both, policy=policy).join()
    run = started(tmp_path / "stopped", both, policy=policy)
    for metrics in run:
        if metrics.epoch == 1:
            run.stop()
    resumed = started(tmp_path / "stopped", both[::-1], policy=policy, resume="auto").join()
    for name, expected in whole.state_dict.items():
        torch.testing.assert_close(resumed.state_dict[name], expected, **TOLERANCE)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_script_runs_in_two_builds(tmp_path: Path, both: list[str], policy: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = ["run", "--devices", "cpu,cpu", "--environments", ",".join(both), "script.py", policy]
    told = subprocess.run(
        [sys.executable, "-m", "outrider", *command],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    assert told.stdout.splitlines()[-3:] == ["256 True", "2 1", "True"]
