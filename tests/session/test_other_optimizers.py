"""Optimizers that were not given to prepare(), and passes in which none steps: refused, or told in one line."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outrider

DATA = torch.ones(12, 2)


@pytest.fixture(autouse=True)
def _one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTRIDER_DEVICES", raising=False)


class Wrapper(torch.optim.Optimizer):
    """An optimizer made of another, as timm's Lookahead is."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base = base

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()


def train(folder: Path, prepared: Any, stepping: Any) -> nn.Linear:
    """Three steps by one optimizer where another is prepared; both are made from the model and one optimizer of it."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    base = torch.optim.SGD(model.parameters(), 0.1)
    known = {"base": base, "wrapper": Wrapper(base), "twin": torch.optim.SGD(model.parameters(), 0.1)}
    with outrider.Session(devices="cpu", run_dir=folder, quiet=True) as s:
        s.prepare(model, known[prepared])
        for batch in s.batches(DATA, batch_size=4):
            s.backward(model(batch).square().mean())
            known[stepping].step()
            known[stepping].zero_grad()
    return model


def test_an_optimizer_beside_the_prepared_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(outrider.ConfigError) as caught:
        train(tmp_path, "base", "twin")
    assert str(caught.value) == (
        "SGD.step() changed a prepared model, but this SGD was not given to prepare(): every rank would step by its "
        "own gradients\nhint: prepare the optimizer that steps: model, optimizer = s.prepare(model, optimizer)"
    )


@pytest.mark.parametrize("prepared", ["base", "wrapper"])
def test_an_optimizer_made_of_another_works_whichever_is_prepared(tmp_path: Path, prepared: str) -> None:
    expected = train(tmp_path / "plain", "base", "base")
    found = train(tmp_path / "wrapped", prepared, "wrapper")
    assert torch.equal(found.weight, expected.weight)


def test_a_pass_without_a_step_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(2, 1)
    with outrider.Session(devices="cpu", run_dir=tmp_path, quiet=True) as s:
        s.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        for _ in range(2):
            for batch in s.batches(DATA, batch_size=4):
                model(batch)
    told = (
        "outrider: no optimizer stepped in a pass of 3 batches: "
        "call s.step(loss) for each, or s.optimizer_step() after s.backward(loss)\n"
    )
    assert capsys.readouterr().err == told


@pytest.mark.parametrize("is_told", [True, False])
def test_losses_that_nobody_told_are_missed_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], is_told: bool
) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with outrider.Session(devices="cpu", run_dir=tmp_path, quiet=True) as s:
        s.prepare(model, optimizer)
        for _ in range(2):
            for batch in s.batches(DATA, batch_size=4):
                loss = model(batch).square().mean()
                s.backward(loss) if is_told else loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        assert math.isnan(s.metrics.loss) is not is_told
    told = (
        "outrider: nobody told the loss of any step, so metrics and pages show none: call s.backward(loss) in place of "
        "loss.backward()\n"
    )
    assert capsys.readouterr().err == ("" if is_told else told)


def test_a_parameter_added_later_must_be_of_a_prepared_model(tmp_path: Path) -> None:
    model, stranger = nn.Linear(2, 1), nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with outrider.Session(devices="cpu", run_dir=tmp_path, quiet=True) as s:
        s.prepare(model, optimizer)
        optimizer.add_param_group({"params": [stranger]})
        for batch in s.batches(DATA, batch_size=4):
            loss = model(batch).square().mean() + stranger.sum()
            with pytest.raises(outrider.ConfigError, match="SGD trains 1 parameters of no model given to prepare"):
                s.step(loss)
            break


def test_a_step_that_failed_does_not_hide_later_ones(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    prepared, twin = (torch.optim.SGD(model.parameters(), 0.1) for _ in range(2))
    with outrider.Session(devices="cpu", run_dir=tmp_path, quiet=True) as s:
        s.prepare(model, prepared)
        batches = s.batches(DATA, batch_size=4)
        next(batches)
        with pytest.raises(outrider.ConfigError, match="closure"):
            prepared.step(lambda: 0.0)
        s.step(model(DATA[:4]).square().mean())
        failing = prepared.register_step_pre_hook(_fail)
        with pytest.raises(ValueError, match="from a hook"):
            prepared.step()
        failing.remove()
        next(batches)
        twin.step()
        with pytest.raises(outrider.ConfigError, match=r"was not given to prepare\(\)"):
            next(batches)


def _fail(*arguments: Any) -> None:
    raise ValueError("from a hook")


def test_hooks_end_with_the_session(tmp_path: Path) -> None:
    model = train(tmp_path, "base", "base")
    torch.optim.SGD(model.parameters(), 0.1).step()


SCRIPT = """
import sys, torch, outrider
from torch import nn
with outrider.Session(devices="cpu,cpu@0.5", run_dir=sys.argv[1], quiet=True, policy="cadence") as s:
    model, critic = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer, own = torch.optim.SGD(model.parameters(), 0.1), torch.optim.Adam(critic.parameters())
    s.prepare(model, optimizer)
    for batch in s.batches(torch.ones(32, 2), batch_size=4):
        critic(batch).square().mean().backward()
        own.step()
        s.step(model(batch).square().mean())
"""


@pytest.mark.slow
def test_parameters_that_no_rank_averages_are_told_once(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "run")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert ended.stderr == (
        "outrider: Adam trains 2 parameters that were not given to prepare(): each rank has its own, and they are not "
        "averaged\n"
    )
