"""Signals and errors in a user's own loop, on one device and on two ranks: what is told, recorded and returned."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from outrider.record.checkpoint_files import epoch_of

pytestmark = pytest.mark.slow

SCRIPT = """
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import outrider

folder = Path(sys.argv[1])
inputs = torch.randn(96, 4, generator=torch.Generator().manual_seed(1))
dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with outrider.Session(policy="sync", run_dir=folder / "run", checkpoint_every=1, timeout_s=60) as s:
    model, optimizer = s.prepare(model, optimizer)
    for epoch in s.epochs(100_000):
        for inputs, targets in s.batches(dataset, batch_size=4):
            s.step((model(inputs) - targets).square().mean())
            {inside}
        (folder / "ready").touch()
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    code: int
    stderr: str
    run: Path

    @property
    def record(self) -> dict[str, Any]:
        record: dict[str, Any] = json.loads((self.run / "record.json").read_text())
        return record

    @property
    def place(self) -> str:
        epochs = epoch_of(max((self.run / "checkpoints").glob("epoch*")))
        return f"after {epochs} epoch{'' if epochs == 1 else 's'}" if epochs else "in the first epoch"


def run_script(
    folder: Path, *, devices: str, faults: str = "", inside: str = "pass", send: signal.Signals | None = None
) -> Ended:
    script = folder / "script.py"
    script.write_text(SCRIPT.format(inside=inside))
    variables = {**os.environ, "OUTRIDER_DEVICES": devices, "OMP_NUM_THREADS": "1", "OUTRIDER_FAULTS": faults}
    process = subprocess.Popen(
        [sys.executable, str(script), str(folder)], env=variables, stderr=subprocess.PIPE, text=True
    )
    while send is not None and not (folder / "ready").exists() and process.poll() is None:
        time.sleep(0.02)
    if send is not None:
        process.send_signal(send)
    _, told = process.communicate(timeout=300)
    return Ended(code=process.returncode, stderr=told, run=folder / "run")


def test_a_signal_ends_a_loop_on_one_device_with_the_record_saying_so(tmp_path: Path) -> None:
    ended = run_script(tmp_path, devices="cpu", faults="rank=0,at=step,n=60,do=sigterm")
    assert ended.code == 143
    assert ended.stderr == (
        "outrider: fault on rank 0 at step 60: sigterm\n"
        "outrider: SIGTERM: stopping at the next average; again to end at once\n"
        f'outrider: interrupted {ended.place}; pass resume="{ended.run}" to go on\n'
    )
    assert ended.record["status"] == "interrupted"
    assert (ended.run / "timeline.json").is_file()


def test_ctrl_c_in_a_loop_on_one_device_shows_two_lines_and_no_traceback(tmp_path: Path) -> None:
    ended = run_script(tmp_path, devices="cpu", send=signal.SIGINT)
    assert ended.code == -signal.SIGINT
    assert ended.stderr == (
        "outrider: SIGINT: stopping at the next average; again to end at once\n"
        f'outrider: interrupted {ended.place}; pass resume="{ended.run}" to go on\n'
    )
    assert (ended.run / "timeline.json").is_file()


def test_ctrl_c_in_a_loop_on_two_ranks_ends_both_without_a_traceback(tmp_path: Path) -> None:
    ended = run_script(tmp_path, devices="cpu,cpu@0.5", send=signal.SIGINT)
    assert ended.code == 130
    assert ended.stderr == (
        "outrider: SIGINT: stopping at the next average within 25 s; again to end at once\n"
        f'outrider: interrupted {ended.place}; pass resume="{ended.run}" to go on\n'
    )
    assert ended.record["status"] == "interrupted"


def test_a_signal_to_one_rank_ends_the_loops_of_all(tmp_path: Path) -> None:
    ended = run_script(tmp_path, devices="cpu,cpu@0.5", faults="rank=1,at=step,n=60,do=sigterm")
    assert ended.code == 143
    assert ended.stderr == (f'outrider: interrupted {ended.place}; pass resume="{ended.run}" to go on\n')
    assert ended.record["status"] == "interrupted"


def test_the_error_of_a_rank_comes_before_what_others_suffered_from_it(tmp_path: Path) -> None:
    inside = "if s.rank == 1 and epoch == 1: raise ValueError('a bad batch')"
    ended = run_script(tmp_path, devices="cpu,cpu@0.5", inside=inside)
    assert ended.code == 1
    lines = ended.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "raise ValueError('a bad batch')" in lines[2]
    [place] = [place for place, line in enumerate(lines) if line.startswith("error: ")]
    message = lines[place].removeprefix("error: ")
    assert message.startswith("rank 1 (cpu@0.5), step ")
    assert message.endswith(": ValueError: a bad batch")
    # Whether rank 0 was waiting for rank 1 at that moment is up to the two.
    assert lines[place + 1 :] in ([], ["outrider: rank 0 lost its connection to rank 1 as a consequence"])
    assert "PeerLostError" not in ended.stderr
    assert (ended.record["status"], ended.record["error"]["message"]) == ("failed", message)
    assert (ended.run / "timeline.json").is_file()


def test_the_traceback_of_rank_0_has_the_lines_of_the_user_only(tmp_path: Path) -> None:
    ended = run_script(tmp_path, devices="cpu,cpu@0.5", inside="if s.rank == 0: raise ValueError('a bad batch')")
    lines = ended.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert [line for line in lines if line.startswith("  File")] == [
        f'  File "{tmp_path / "script.py"}", line 21, in <module>'
    ]
    assert ended.record["status"] == "failed"


@pytest.mark.parametrize("devices", ["cpu", "cpu,cpu@0.5"])
def test_the_exit_code_of_the_script_is_that_of_the_program(tmp_path: Path, devices: str) -> None:
    ended = run_script(tmp_path, devices=devices, inside="raise SystemExit(3)")
    assert ended.code == 3
