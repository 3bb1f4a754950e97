"""Ranks on two hosts, each of them a network namespace: how they meet, and what is told where they cannot."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from namespaces import Host, two_hosts

pytestmark = pytest.mark.slow

PORT = "29511"
MEET = """
import json, os, sys, torch, torch.distributed as dist
from outrider.errors import OutriderError
from outrider.world.environment import adopted, local_devices
from outrider.world.messages import adopted_link
from outrider.world.world import World

environment = adopted()
link = adopted_link(environment, devices=local_devices(environment, "cpu", cuda_devices=()))
try:
    with World.join(link, timeout_s=float(os.environ.get("LIMIT_S", "60"))) as world:
        total = torch.tensor([float(world.rank + 1)])
        dist.all_reduce(total, group=world.group_for("cpu"))
        print("told", json.dumps([world.rank, total.item(), world.hosts]), flush=True)
except OutriderError as error:
    print("told", json.dumps([type(error).__name__, error.message, error.rank]), flush=True)
"""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    with two_hosts(tmp_path) as both:
        yield both


def told(log: Path) -> list[object]:
    lines = [line for line in log.read_text().splitlines() if line.startswith("told ")]
    assert lines, log.read_text()
    result: list[object] = json.loads(lines[-1].removeprefix("told "))
    return result


def run_ranks(hosts: tuple[Host, Host], folder: Path, *variables: dict[str, str]) -> list[list[object]]:
    """One rank on each host, with variables of its own each; what each tells."""
    script = folder / "meet.py"
    script.write_text(MEET)
    logs = [folder / f"rank{rank}.log" for rank in range(2)]
    shared = {"WORLD_SIZE": "2", "MASTER_PORT": PORT}
    ranks = [
        host.start([sys.executable, str(script)], log=log, variables={**shared, "RANK": str(rank), **own})
        for rank, (host, log, own) in enumerate(zip(hosts, logs, variables, strict=True))
    ]
    for rank in ranks:
        rank.wait(180)
    return [told(log) for log in logs]


@pytest.mark.parametrize("master", ["ranger1", "10.77.0.1", "[fd77::1]"])
def test_ranks_of_two_hosts_meet_whatever_the_name_of_their_own_host_means(
    hosts: tuple[Host, Host], tmp_path: Path, master: str
) -> None:
    address = {"MASTER_ADDR": master}
    found = run_ranks(hosts, tmp_path, address, address)
    assert found == [[rank, 3.0, ["ranger1", "ranger2"]] for rank in range(2)]


def test_interfaces_that_cannot_reach_each_other_are_named(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    wrong = {"MASTER_ADDR": "10.77.0.1", "LIMIT_S": "20", "GLOO_SOCKET_IFNAME": "lo"}
    found = run_ranks(hosts, tmp_path, wrong, wrong)
    first, second = "rank 0 on ranger1 (127.0.0.1, lo)", "rank 1 on ranger2 (127.0.0.1, lo)"
    assert found == [
        ["PeerLostError", f"{first} could not connect to {second}", 1],
        ["PeerLostError", f"{second} could not connect to {first}", 0],
    ]


def test_an_interface_that_is_not_there_is_refused_on_all_ranks(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    address = {"MASTER_ADDR": "10.77.0.1"}
    found = run_ranks(hosts, tmp_path, address, {**address, "GLOO_SOCKET_IFNAME": "eth9"})
    message = f"GLOO_SOCKET_IFNAME is eth9 on rank 1, but ranger2 has only lo, {hosts[1].interface}"
    assert found == [["ConfigError", message, 1]] * 2


def test_torchrun_on_two_hosts_meets_by_names(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    script = tmp_path / "meet.py"
    script.write_text(MEET)
    options = [
        "--nnodes=2",
        "--nproc-per-node=1",
        "--rdzv-backend=c10d",
        "--rdzv-id=run",
        "--rdzv-endpoint=ranger1:29512",
    ]
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(script)]
    logs = [tmp_path / f"agent{number}.log" for number in range(2)]
    # Agents take a host for the endpoint's own where the name means one of its addresses, which 127.0.1.1 may not be.
    agents = [
        host.start([*command[:3], f"--rdzv-conf=is_host={int(number == 0)}", *command[3:]], log=log)
        for number, (host, log) in enumerate(zip(hosts, logs, strict=True))
    ]
    assert [agent.wait(180) for agent in agents] == [0, 0], [log.read_text() for log in logs]
    assert sorted(str(told(log)) for log in logs) == sorted(
        str([rank, 3.0, names]) for rank, names in enumerate([["ranger1", "ranger2"]] * 2)
    )
