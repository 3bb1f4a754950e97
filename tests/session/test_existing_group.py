"""A session in a program that has a process group already, as Ray, Lightning and accelerate leave one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ports import free_port

pytestmark = pytest.mark.slow

LOOP = """
import sys, time, torch, torch.distributed as dist, outrider
from torch import nn

def train(**options):
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with outrider.Session(devices="cpu,cpu", run_dir=sys.argv[1], quiet=True, **options) as s:
        s.prepare(model, optimizer)
        for (batch,) in s.batches((torch.ones(64, 2),), batch_size=8):
            s.step(model(batch).square().mean())
        assert s.gather([s.rank, "words"]) == [[0, "words"], [1, "words"]]
    return s

def end_group():
    # A thread of Gloo that has just finished a collective needs the GIL; torch aborts if the process ends first.
    time.sleep(0.5)
    dist.destroy_process_group()

def tell(line):
    # In one piece: ranks of torchrun write to one output, without buffers.
    sys.stdout.write(line + "\\n")

def check_group():
    total = torch.ones(1)
    dist.all_reduce(total)
    tell(f"group of {int(total.item())} backend {dist.get_backend()}")
"""
OWN_STORE = """
rank = int(sys.argv[2])
store = dist.TCPStore("127.0.0.1", int(sys.argv[3]), 2, is_master=rank == 0)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
"""
TWICE = """
for policy in ("sync", "cadence"):
    s = train(policy=policy)
    tell(f"{policy} {s.rank} {s.world_size} {s.metrics.samples}")
check_group()
end_group()
"""
FUNCTION = """
def make(): return nn.Linear(2, 1)
def optimizer(parameters): return torch.optim.SGD(parameters, lr=0.1)
def step(model, batch): return model(batch[0]).square().mean()
for metrics in outrider.train(make, optimizer, step, (torch.ones(64, 2),), epochs=1, batch_size=8, devices="cpu,cpu",
                              run_dir=sys.argv[1], quiet=True):
    print("trained", metrics.samples)
check_group()
end_group()
"""


def run_ranks(tmp_path: Path, text: str, *, starter: tuple[str, ...] = ()) -> list[str]:
    """The output of both ranks: of torchrun, or of two processes without any variables."""
    script = tmp_path / "script.py"
    script.write_text(text)
    hidden = ("OUTRIDER_DEVICES", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    variables = {name: value for name, value in os.environ.items() if name not in hidden} | {"OMP_NUM_THREADS": "1"}
    port, numbers = free_port(), (["-"] if starter else ["0", "1"])
    ranks = [
        subprocess.Popen(
            [sys.executable, *starter, str(script), str(tmp_path / "run"), number, str(port)],
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in numbers
    ]
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(outputs)
    return outputs


def test_two_sessions_adopt_a_group_without_variables_and_leave_it(tmp_path: Path) -> None:
    outputs = run_ranks(tmp_path, LOOP + OWN_STORE + TWICE)
    for rank, output in enumerate(outputs):
        assert f"sync {rank} 2 64" in output
        assert f"cadence {rank} 2 64" in output
        assert "group of 2 backend gloo" in output


def test_a_session_under_torchrun_adopts_the_group_of_the_script(tmp_path: Path) -> None:
    starter = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    (output,) = run_ranks(tmp_path, LOOP + 'dist.init_process_group("gloo")\n' + TWICE, starter=starter)
    assert output.count("group of 2 backend gloo") == 2
    assert "sync 1 2 64" in output


def test_train_adopts_a_group(tmp_path: Path) -> None:
    outputs = run_ranks(tmp_path, LOOP + OWN_STORE + FUNCTION)
    assert all("group of 2 backend gloo" in output for output in outputs)
    assert "trained 64" in outputs[0]


def test_a_group_of_another_size_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LOOP + 'dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)\ntrain()\n')
    variables = {name: value for name, value in os.environ.items() if name != "OUTRIDER_DEVICES"}
    command = [sys.executable, str(script), str(tmp_path / "run")]
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
    assert ended.returncode != 0
    assert "a process group exists in which this is rank 0 of 1, but this process was started as rank" in ended.stderr
