"""A store that is lost or silent: every wait ends, and the error names the hosts and not the user's code."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import TCPStore

from outrider.data.leases import StoreLeases
from outrider.errors import PeerLostError, WaitError
from outrider.policy.effects import Lease, Take
from outrider.world.environment import Environment
from outrider.world.store import WatchedStore, limit_waits

SERVER = """
import sys
from torch._C._distributed_c10d import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""
ENVIRONMENT = Environment(
    rank=1, local_rank=0, world_size=2, local_world_size=1, master_addr="10.0.0.1", master_port=29500, has_store=True
)


class Agent:
    """A process that serves a store of torch, as torchrun's agent does."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", SERVER]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def connect(self, *, timeout_s: float) -> TCPStore:
        store = TCPStore("127.0.0.1", self.port, is_master=False, timeout=timedelta(seconds=timeout_s))
        limit_waits(self.port, timeout_s=timeout_s)
        return store

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def agent() -> Iterator[Agent]:
    server = Agent()
    yield server
    server.close()


def test_an_agent_that_does_not_answer_is_not_waited_for_without_end(agent: Agent) -> None:
    store = WatchedStore(agent.connect(timeout_s=1), ENVIRONMENT)
    store.set("key", "value")
    os.kill(agent.process.pid, signal.SIGSTOP)
    leases = StoreLeases(store, "ledger", Lease(0, 64), rank=1, batch_size=8)
    with pytest.raises(PeerLostError) as caught:
        leases.take(Take(samples=8, share=0.5))
    host = socket.gethostname()
    assert caught.value.message == f"rank 1 on {host} lost the store at 10.0.0.1:29500: Socket Timeout"
    assert caught.value.hint == (
        "see that rank 0 and its host are still running, and that the network between the hosts works"
    )
    assert caught.value.rank is None


def test_a_store_that_is_gone_is_the_fault_of_the_rank_that_served_it(agent: Agent) -> None:
    store = WatchedStore(agent.connect(timeout_s=5), replace(ENVIRONMENT, has_store=False))
    agent.close()
    with pytest.raises(PeerLostError) as caught:
        store.check(["key"])
    assert caught.value.message.startswith(f"rank 1 on {socket.gethostname()} lost the store at 10.0.0.1:29500: ")
    assert caught.value.rank == 0


def test_a_key_that_never_comes_is_a_wait_that_ended(agent: Agent) -> None:
    store = WatchedStore(agent.connect(timeout_s=1), ENVIRONMENT)
    assert not store.are_set(["key"], limit_s=0.1)
    with pytest.raises(WaitError):
        store.get("key")
