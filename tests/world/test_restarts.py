"""Ranks that torchrun restarts: those of one attempt meet, and nobody meets a rank of the attempt before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from ports import free_port
from torch._C._distributed_c10d import HashStore

from outrider.errors import WaitError
from outrider.world.environment import alone
from outrider.world.rendezvous import meet
from outrider.world.store import WatchedStore

pytestmark = pytest.mark.slow

SCRIPT = """
import os, signal, sys
from pathlib import Path
import torch, torch.distributed as dist
from outrider.world.environment import adopted, local_devices
from outrider.world.messages import adopted_link
from outrider.world.world import World

folder = Path(sys.argv[1])
environment = adopted()
link = adopted_link(environment, devices=local_devices(environment, "cpu,cpu", cuda_devices=()))
with World.join(link, timeout_s=60) as world:
    if world.rank == 1 and not (folder / "killed").exists():
        (folder / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    total = torch.tensor([float(world.rank + 1)])
    dist.all_reduce(total, group=world.group_for("cpu"))
    (folder / f"rank{world.rank}").write_text(f"{total.item()} restart {os.environ['TORCHELASTIC_RESTART_COUNT']}")
"""


TRAINING = """
import os, signal, sys
from pathlib import Path
import torch, outrider
from torch import nn

folder = Path(sys.argv[1])
inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))

def begin(context):
    with (folder / f"epochs-rank{context.rank}").open("a") as file:
        file.write(f"{context.epoch} ")
    if context.epoch == 2 and context.rank == 1 and not (folder / "killed").exists():
        (folder / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)

outrider.train(
    lambda: nn.Linear(4, 1), lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    lambda model, batch: (model(batch[0]) - batch[1]).square().mean(), (inputs, inputs.sum(1, keepdim=True)),
    batch_size=8, epochs=4, checkpoint_every=1, resume="auto", run_dir=folder / "run", epoch_start=begin,
    devices="cpu,cpu", timeout_s=60,
).join()
"""


def run_agents(folder: Path, *options: str, num_agents: int, content: str = SCRIPT) -> None:
    script = folder / "script.py"
    script.write_text(content)
    shared = ["--max-restarts=3", "--monitor-interval=0.2", *options, str(script), str(folder)]
    command = [sys.executable, "-m", "torch.distributed.run", *shared]
    logs = [(folder / f"agent{number}.log").open("w+") for number in range(num_agents)]
    agents = [subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=os.environ) for log in logs]
    codes = [agent.wait(240) for agent in agents]
    said = []
    for log in logs:
        log.seek(0)
        said.append(log.read())
        log.close()
    assert codes == [0] * num_agents, said


def test_ranks_that_one_agent_restarts_meet_again(tmp_path: Path) -> None:
    run_agents(tmp_path, "--standalone", "--nproc-per-node=2", num_agents=1)
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["3.0 restart 1"] * 2


def test_ranks_of_two_agents_meet_again_though_the_agents_count_differently(tmp_path: Path) -> None:
    endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    run_agents(tmp_path, "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", endpoint, num_agents=2)
    told = sorted((tmp_path / f"rank{rank}").read_text() for rank in range(2))
    assert told == ["3.0 restart 0", "3.0 restart 1"]


def test_training_goes_on_from_the_newest_checkpoint_when_two_agents_restart_their_ranks(tmp_path: Path) -> None:
    endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    options = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", endpoint]
    run_agents(tmp_path, *options, num_agents=2, content=TRAINING)
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["status"] == "finished"
    assert [epoch["epoch"] for epoch in record["epochs"]] == [0, 1, 2, 3]
    # The checkpoint of epoch 1 is written in the background and may not be whole yet when the rank ends.
    assert (tmp_path / "epochs-rank1").read_text() in ("0 1 2 2 3 ", "0 1 2 1 2 3 ")


# The meeting by itself, in one process.


def in_threads(store: WatchedStore, ranks: list[int], *, world_size: int) -> dict[int, str]:
    """The attempts that ranks join, each in a thread of its own."""
    found: dict[int, str] = {}

    def join(rank: int) -> None:
        found[rank] = meet(store, rank=rank, world_size=world_size, timeout_s=30)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.fixture
def store() -> WatchedStore:
    return WatchedStore(HashStore(), alone())


def test_all_ranks_of_an_attempt_get_its_name_and_the_next_attempt_has_another(store: WatchedStore) -> None:
    attempts = [in_threads(store, [2, 1, 0], world_size=3) for _ in range(3)]
    assert [len(set(attempt.values())) for attempt in attempts] == [1, 1, 1]
    assert len({attempt[0] for attempt in attempts}) == 3


def test_a_restarted_rank_does_not_join_the_attempt_that_its_predecessor_was_in(store: WatchedStore) -> None:
    before = in_threads(store, [0, 1], world_size=2)
    with pytest.raises(WaitError) as caught:
        meet(store, rank=1, world_size=2, timeout_s=0.2)
    assert caught.value.message == "rank 1 waited 0.2 s for all ranks to start, rank 0 did not come"
    assert caught.value.rank == 0
    after = in_threads(store, [0, 1], world_size=2)
    assert after[0] == after[1] != before[0]


def test_a_rank_that_waits_names_all_that_are_missing(store: WatchedStore) -> None:
    late: list[Any] = []

    def lead() -> None:
        try:
            meet(store, rank=0, world_size=4, timeout_s=1)
        except WaitError as error:
            late.append(error)

    thread = threading.Thread(target=lead)
    thread.start()
    with pytest.raises(WaitError) as caught:
        meet(store, rank=1, world_size=4, timeout_s=0.5)
    thread.join()
    assert caught.value.message == "rank 1 waited 0.5 s for all ranks to start, ranks 2, 3 did not come"
    assert [error.message for error in late] == ["rank 0 waited 1 s for all ranks to start, ranks 2, 3 did not come"]
