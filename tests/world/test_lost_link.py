"""Two hosts lose the link between them: ranks end by themselves and say so, or go on where it comes back in time."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from namespaces import Host, two_hosts

pytestmark = pytest.mark.slow

SCRIPT = """
import json, os, sys, time, torch, outrider
from pathlib import Path
from torch import nn
folder, epochs = Path(sys.argv[1]), int(sys.argv[2])
inputs = torch.randn(64, 4)

def slow_error(model, batch):
    time.sleep(0.02)
    return (model(batch[0]) - batch[1]).square().mean()

def begin(context):
    (folder / f"epoch{context.epoch}-rank{context.rank}").touch()

try:
    outrider.train(
        lambda: nn.Linear(4, 1), lambda parameters: torch.optim.SGD(parameters, lr=0.1), slow_error,
        (inputs, inputs.sum(1, keepdim=True)), batch_size=8, epochs=epochs, policy=sys.argv[3], epoch_start=begin,
        timeout_s=float(sys.argv[4]), devices="cpu,cpu", run_dir=folder / f"run{os.environ['RANK']}",
    ).join()
    print("told", json.dumps(["finished"]), flush=True)
except outrider.OutriderError as error:
    print("told", json.dumps([type(error).__name__, error.message, error.rank]), flush=True)
"""
PATIENCE_S = 240


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    with two_hosts(tmp_path) as both:
        yield both


class TwoRanks:
    """A run with one rank on each host."""

    def __init__(self, hosts: tuple[Host, Host], folder: Path, *, epochs: int, policy: str, timeout_s: float) -> None:
        self.folder = folder
        script = folder / "script.py"
        script.write_text(SCRIPT)
        shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "ranger1", "MASTER_PORT": "29513"}
        command = [sys.executable, str(script), str(folder), str(epochs), policy, str(timeout_s)]
        self.logs = [folder / f"rank{rank}.log" for rank in range(2)]
        self.ranks = [
            host.start(command, log=log, variables={**shared, "RANK": str(rank)})
            for rank, (host, log) in enumerate(zip(hosts, self.logs, strict=True))
        ]

    def await_epoch(self, epoch: int) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not all((self.folder / f"epoch{epoch}-rank{rank}").exists() for rank in range(2)):
            assert time.monotonic() < deadline_s, [log.read_text() for log in self.logs]
            assert all(rank.poll() is None for rank in self.ranks), [log.read_text() for log in self.logs]
            time.sleep(0.05)

    def told(self) -> list[list[object]]:
        """What each rank says at its end."""
        for rank in self.ranks:
            rank.wait(PATIENCE_S)
        lines = [log.read_text().splitlines()[-1] for log in self.logs]
        return [json.loads(line.removeprefix("told ")) for line in lines]


@pytest.mark.parametrize("policy", ["sync", "cadence"])
def test_ranks_that_lost_the_link_end_by_themselves_and_name_the_other_host(
    hosts: tuple[Host, Host], tmp_path: Path, policy: str
) -> None:
    run = TwoRanks(hosts, tmp_path, epochs=10_000, policy=policy, timeout_s=20)
    run.await_epoch(1)
    hosts[1].cut_link()
    (kind, message, rank), (other_kind, other_message, other_rank) = run.told()
    assert {kind, other_kind} <= {"PeerLostError", "WaitError"}, (message, other_message)
    assert (rank, other_rank) == (1, 0), (message, other_message)
    assert "rank 1" in str(message)
    assert "ranger1" in str(other_message) or "rank 0" in str(other_message)


def test_a_link_that_comes_back_in_time_is_no_error(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    run = TwoRanks(hosts, tmp_path, epochs=10, policy="cadence", timeout_s=60)
    run.await_epoch(1)
    hosts[1].cut_link()
    time.sleep(3)
    hosts[1].restore_link()
    assert run.told() == [["finished"], ["finished"]]
