"""Ranks that meet at an address of the network: with the shared secret they do, without it they do not start.

They run in a network namespace of their own, with an address that is not loopback.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ADDRESS = "10.77.0.1"
SECRET = "0123456789abcdef0123456789abcdef"
SCRIPT = """
import json, os, sys
from pathlib import Path
import torch, torch.distributed as dist
from outrider.errors import OutriderError
from outrider.world.environment import adopted, local_devices
from outrider.world.messages import adopted_link
from outrider.world.world import World

def told():
    environment = adopted()
    link = adopted_link(environment, devices=local_devices(environment, "cpu", cuda_devices=()))
    try:
        with World.join(link, timeout_s=float(sys.argv[2])) as world:
            total = torch.tensor([float(world.rank + 1)])
            dist.all_reduce(total, group=world.group_for("cpu"))
            return {"total": total.item(), "told": world.exchange_json(world.rank)}
    except OutriderError as error:
        return {"message": error.message, "hint": error.hint}

Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps(told()))
"""
NAMESPACE = """
ip link set lo up && ip addr add {address}/32 dev lo || exit 9
RANK=0 {first} {command} & first=$!
RANK=1 {second} {command}; wait $first
"""


def meet(folder: Path, *, secrets: tuple[str, str], timeout_s: int) -> list[Any]:
    """What two ranks tell that start with these secrets."""
    if shutil.which("unshare") is None or shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs root, unshare and ip for a network namespace")
    script = folder / "script.py"
    script.write_text(SCRIPT)
    first, second = (f"OUTRIDER_SECRET={secret}" if secret else "" for secret in secrets)
    command = f"{sys.executable} {script} {folder} {timeout_s}"
    shell = NAMESPACE.format(address=ADDRESS, first=first, second=second, command=command)
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": ADDRESS, "MASTER_PORT": "29500"}
    ended = subprocess.run(
        ["unshare", "-n", "sh", "-c", shell], env=os.environ | variables, capture_output=True, text=True, timeout=300
    )
    if ended.returncode == 9 or "unshare failed" in ended.stderr:
        pytest.skip(f"no network namespace here: {ended.stderr.strip()}")
    assert ended.returncode == 0, ended.stderr
    return [json.loads((folder / str(rank)).read_text()) for rank in range(2)]


def test_ranks_with_the_same_secret_meet_over_the_network(tmp_path: Path) -> None:
    assert meet(tmp_path, secrets=(SECRET, SECRET), timeout_s=120) == [{"total": 3.0, "told": [0, 1]}] * 2


def test_a_rank_with_another_secret_stays_outside(tmp_path: Path) -> None:
    first, second = meet(tmp_path, secrets=(SECRET, SECRET[::-1]), timeout_s=30)
    assert second == {
        "message": f"rank 1: the store at {ADDRESS}:29500 has another OUTRIDER_SECRET than this rank",
        "hint": "set the same OUTRIDER_SECRET on all ranks, and a MASTER_PORT that nothing else uses",
    }
    assert first["message"] == "rank 0 waited 30 s for all ranks to start, rank 1 did not come"


def test_ranks_without_a_secret_do_not_start(tmp_path: Path) -> None:
    told = meet(tmp_path, secrets=("", ""), timeout_s=30)
    message = f"OUTRIDER_SECRET is not set, and 2 ranks meet over the network at {ADDRESS}"
    assert [words["message"] for words in told] == [message] * 2


TORCHRUN_SCRIPT = """
import os, sys
from pathlib import Path
from outrider.world.environment import adopted, local_devices
from outrider.world.messages import adopted_link
from outrider.world.world import World

environment = adopted()
link = adopted_link(environment, devices=local_devices(environment, "cpu,cpu", cuda_devices=()))
with World.join(link, timeout_s=60) as world:
    world.exchange_json("ours", name="words")
    kinds = [type(store).__name__ for store in (world.store.raw, world.group_store)]
Path(sys.argv[1], os.environ["RANK"]).write_text(" ".join(kinds))
"""


def test_ranks_of_torchrun_on_one_host_go_on_in_a_private_store(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TORCHRUN_SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    ended = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["PrivateStore FileStore"] * 2
