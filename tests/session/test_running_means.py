"""The running mean (EMA) of a model in a user's loop: that of one device, and the same on all ranks."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import outrider
from outrider import ConfigError

PROGRAM = """
import json, sys
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
import outrider

def train(policy, lr, decay, shift=0.0):
    torch.manual_seed(0)
    inputs = torch.linspace(-1, 1, 660).reshape(330, 2)
    model = nn.Linear(2, 2)
    with outrider.Session(policy=policy) as s:
        s.prepare(model, torch.optim.SGD(model.parameters(), lr=lr))
        ema = s.ema(model, decay=decay)
        with torch.no_grad():
            for mean in ema.module.parameters():
                mean += shift
        for epoch in s.epochs(2):
            for x, y in s.batches(TensorDataset(inputs, inputs.flip(1)), batch_size=32, shuffle=False):
                s.step(F.mse_loss(model(x), y))
                ema.update()
        told = [nn.utils.parameters_to_vector(m.parameters()).tolist() for m in (model, ema.module)]
        open(f"{policy}-{s.rank}.json", "w").write(json.dumps(told))

train("balanced", 0.1, lambda step: min(0.9, (1 + step) / (10 + step)))
train("cadence", 0.0, 0.9, shift=1.0)
"""


def mean_of_one_device() -> list[float]:
    """The same loop in plain torch."""
    torch.manual_seed(0)
    inputs = torch.linspace(-1, 1, 660).reshape(330, 2)
    model = nn.Linear(2, 2)
    mean, optimizer, step = copy.deepcopy(model), torch.optim.SGD(model.parameters(), lr=0.1), 0
    for _ in range(2):
        for x in inputs.split(32):
            optimizer.zero_grad()
            F.mse_loss(model(x), x.flip(1)).backward()
            optimizer.step()
            step += 1
            with torch.no_grad():
                for kept, latest in zip(mean.parameters(), model.parameters(), strict=True):
                    kept.lerp_(latest, 1 - min(0.9, (1 + step) / (10 + step)))
        # A last batch of ten samples is less than a step of 32, so the warm-up of a session counts ten steps.
        step -= 1
    return nn.utils.parameters_to_vector(mean.parameters()).tolist()


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[float]]]:
    folder = tmp_path_factory.mktemp("means")
    (folder / "script.py").write_text(PROGRAM)
    variables = {**os.environ, "OUTRIDER_DEVICES": "cpu,cpu@0.5", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {path.stem: json.loads(path.read_text()) for path in Path(folder).glob("*.json")}


def test_the_mean_of_balanced_ranks_is_that_of_one_device(told: dict[str, list[list[float]]]) -> None:
    assert told["balanced-0"][1] == pytest.approx(mean_of_one_device(), abs=1e-6)
    assert told["balanced-1"] == told["balanced-0"]


def test_the_mean_of_local_steps_forgets_with_the_steps_of_all_ranks(told: dict[str, list[list[float]]]) -> None:
    model, mean = told["cadence-0"]
    assert told["cadence-1"] == told["cadence-0"]
    # 330 samples are ten steps of 32 and a part of one, twice; a rank that takes the part counts it.
    forgotten = [kept - latest for kept, latest in zip(mean, model, strict=True)]
    assert forgotten == pytest.approx([forgotten[0]] * len(forgotten), abs=1e-5)
    assert 0.9**22 - 1e-5 <= forgotten[0] <= 0.9**20 + 1e-5


def test_a_mean_goes_on_from_its_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OUTRIDER_DEVICES", "cpu")
    model = nn.Linear(2, 2)
    with outrider.Session() as s:
        s.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(ConfigError, match=r"decay must be between 0 and 1, got 1\.5"):
            s.ema(decay=1.5)
        first, second = s.ema(decay=0.5), s.ema(decay=0.5)
        for (x,) in s.batches(TensorDataset(torch.ones(8, 2)), batch_size=2):
            s.step(model(x).square().mean())
            first.update()
        second.load_state_dict(first.state_dict())
    for mean, same, latest in zip(
        first.module.parameters(), second.module.parameters(), model.parameters(), strict=True
    ):
        assert torch.equal(mean, same)
        assert not torch.equal(mean, latest)
        assert not mean.requires_grad


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_running_mean_that_begins_anew_after_a_resume_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], is_loaded: bool
) -> None:
    data = TensorDataset(torch.randn(16, 2), torch.randn(16, 1))

    def train(epochs: int) -> None:
        model = nn.Linear(2, 1)
        with outrider.Session(devices="cpu", run_dir=tmp_path, quiet=True, checkpoint_every=1, resume="auto") as s:
            s.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
            ema = s.ema(model, decay=0.9)
            for epoch in s.epochs(epochs):
                if epoch and is_loaded:
                    ema.load_state_dict(torch.load(tmp_path / "ema.pt"))
                for x, y in s.batches(data, batch_size=4):
                    s.step(F.mse_loss(model(x), y))
                    ema.update()
            torch.save(ema.state_dict(), tmp_path / "ema.pt")

    train(1)
    assert "running mean" not in capsys.readouterr().err
    train(3)
    assert capsys.readouterr().err.count("the running mean (EMA) begins anew") == (0 if is_loaded else 1)
