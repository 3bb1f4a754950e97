"""Loops that are so many steps or samples long, and schedules written by hand that follow them."""

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
from outrider.errors import ConfigError

NUMBERS = torch.arange(40).float().reshape(40, 1)


def loop(folder: Path, **length: Any) -> dict[str, Any]:
    """One rank, 40 samples in batches of 4; what it saw."""
    model = nn.Linear(1, 1)
    steps, progress, samples, complete = [], [], [], []
    with outrider.Session(devices="cpu", run_dir=folder) as session:
        session.prepare(model, torch.optim.SGD(model.parameters(), 1e-6))
        for _ in session.epochs(**length):
            for batch in session.batches(NUMBERS, batch_size=4):
                steps.append(session.global_step)
                progress.append(session.progress)
                samples.append(session.samples_seen)
                session.step(model(batch).square().mean())
        seen, end = session.samples_seen, session.progress
        complete.append(session.metrics.is_complete if session.metrics else None)
    status = json.loads((folder / "record.json").read_text())["status"]
    return {
        "steps": steps,
        "progress": progress,
        "samples": samples,
        "seen": seen,
        "end": end,
        "complete": complete[0],
        "status": status,
    }


@pytest.mark.parametrize("length", [{"steps": 13}, {"samples": 52}])
def test_a_loop_ends_after_its_steps(tmp_path: Path, length: dict[str, int]) -> None:
    told = loop(tmp_path, **length)
    assert told["steps"] == list(range(13))
    assert told["samples"] == list(range(0, 52, 4))
    assert told["progress"] == [step / 13 for step in range(13)]
    assert (told["seen"], told["end"], told["complete"], told["status"]) == (52, 1.0, True, "finished")


def test_a_loop_over_epochs_tells_its_progress_too(tmp_path: Path) -> None:
    told = loop(tmp_path, count=2)
    assert told["progress"] == [step / 20 for step in range(20)]
    assert (told["seen"], told["end"]) == (80, 1.0)


def message_of(call: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        call()
    return str(caught.value)


def test_two_lengths_are_refused(tmp_path: Path) -> None:
    assert message_of(lambda: loop(tmp_path, count=2, steps=3)) == (
        "epochs and steps were given, and each of them says how long to train\n"
        "hint: pass one of epochs, steps and samples"
    )


def test_no_length_is_refused(tmp_path: Path) -> None:
    assert message_of(lambda: loop(tmp_path)) == (
        "epochs() was not told how long to train\nhint: pass s.epochs(3) or s.epochs(steps=1000)"
    )


def idle_loop(folder: Path) -> None:
    model = nn.Linear(1, 1)
    with outrider.Session(devices="cpu", run_dir=folder) as session:
        session.prepare(model, torch.optim.SGD(model.parameters(), 1e-6))
        for _ in session.epochs(steps=3):
            pass


def test_a_loop_without_batches_does_not_go_on_for_ever(tmp_path: Path) -> None:
    assert message_of(lambda: idle_loop(tmp_path)) == (
        "an epoch took no samples, so the loop over epochs would never end\n"
        "hint: loop over s.batches(...) in every epoch, or pass a number of epochs"
    )


def test_a_loop_of_steps_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    assert sitting(tmp_path, steps=10) == list(range(10))
    assert sitting(tmp_path, steps=23, resume=tmp_path) == list(range(10, 23))


def sitting(folder: Path, *, steps: int, **options: Any) -> list[int]:
    model = nn.Linear(1, 1)
    seen = []
    with outrider.Session(devices="cpu", run_dir=folder, checkpoint_every=1, **options) as session:
        session.prepare(model, torch.optim.SGD(model.parameters(), 1e-6))
        for _ in session.epochs(steps=steps):
            for batch in session.batches(NUMBERS, batch_size=4):
                seen.append(session.global_step)
                session.step(model(batch).square().mean())
    return seen


# A schedule written by hand: on any number of ranks the same function of the world's samples.

SCRIPT = """
import json, sys
import torch
from torch import nn
import outrider

policy, folder = sys.argv[1:]
model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
curve = []
with outrider.Session(policy=policy, run_dir=folder, anchor=2) as s:
    s.prepare(model, optimizer)
    for epoch in s.epochs(steps=60):
        for batch in s.batches(torch.arange(160).float().reshape(160, 1) / 160, batch_size=4):
            optimizer.param_groups[0]["lr"] = 1e-3 * (1 - s.progress)
            curve.append([s.global_step, s.samples_seen, optimizer.param_groups[0]["lr"]])
            s.step(model(batch).square().mean())
    open(f"{folder}/curve{s.rank}.json", "w").write(json.dumps({"curve": curve, "seen": s.samples_seen}))
"""


def curves(folder: Path, policy: str, devices: str) -> list[dict[str, Any]]:
    folder.mkdir()
    script = folder / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "OUTRIDER_DEVICES": devices, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, str(script), policy, str(folder / "run")], env=environment, cwd=folder, check=True, timeout=300
    )
    return [json.loads(path.read_text()) for path in sorted((folder / "run").glob("curve*.json"))]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["balanced", "async"])
def test_a_schedule_written_by_hand_is_the_same_on_one_rank_and_on_two_unequal_ones(
    tmp_path: Path, policy: str
) -> None:
    (alone,) = curves(tmp_path / "one", policy, "cpu")
    together = curves(tmp_path / "two", policy, "cpu,cpu@0.5")
    rate_at = {step: rate for step, _, rate in alone["curve"]}
    assert list(rate_at) == list(range(60))
    assert len(together) == 2
    for rank in together:
        assert {(step, rate) for step, _, rate in rank["curve"]} <= set(rate_at.items())
        assert [entry[1] for entry in rank["curve"]] == sorted(entry[1] for entry in rank["curve"])
        assert rank["seen"] == alone["seen"] == 240
    if policy == "balanced":
        assert [rank["curve"] for rank in together] == [alone["curve"]] * 2
