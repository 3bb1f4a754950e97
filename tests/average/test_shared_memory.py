"""Ranks that share memory let in processes of their own user, and nobody else; strangers keep nobody from meeting."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from outrider.average.transport.shared_memory import NoSharedMemory, SharedMemoryGroup, connect_shared_memory

NOBODY = 65534
NUM_BYTES = 64


def meet_two(on_paths: Callable[[list[str]], None]) -> list[SharedMemoryGroup]:
    """Two ranks in this process; somebody is told the paths of their sockets before they meet."""
    told: dict[int, list[Any]] = {0: [None, None], 1: [None, None], 2: [None, None]}
    barrier = threading.Barrier(2)
    rounds = [0, 0]

    def exchange(rank: int, value: Any) -> list[Any]:
        number, rounds[rank] = rounds[rank], rounds[rank] + 1
        told[number][rank] = value
        if barrier.wait(60) == 0 and number == 0:
            on_paths(told[0])
        barrier.wait(60)
        return told[number]

    with ThreadPoolExecutor(2) as pool:
        ranks = [
            pool.submit(connect_shared_memory, rank, NUM_BYTES, exchange=lambda value, rank=rank: exchange(rank, value))
            for rank in range(2)
        ]
        return [rank.result(120) for rank in ranks]


def check_shared(shared_memory_group: list[SharedMemoryGroup]) -> None:
    shared_memory_group[1].memories[1][0] = 7
    assert shared_memory_group[0].memories[1][0] == 7
    for one in shared_memory_group:
        one.close()


class Stranger:
    """A process of another user that connects to a path, and tells what it was sent."""

    def __init__(self) -> None:
        (orders, self._orders), (self._answers, answers) = os.pipe(), os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._orders)
                os.close(self._answers)
                self._live(orders, answers)
            finally:
                os._exit(0)
        os.close(orders)
        os.close(answers)

    @staticmethod
    def _live(orders: int, answers: int) -> None:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        with open(orders) as lines, open(answers, "w", buffering=1) as words:
            for line in lines:
                try:
                    with socket.socket(socket.AF_UNIX) as connection:
                        connection.settimeout(60)
                        connection.connect(line.strip())
                        print("connected", file=words)
                        found = socket.recv_fds(connection, 4, 1)[:2]
                        print(json.dumps([len(part) for part in found]), file=words)
                except OSError as error:
                    print(type(error).__name__, file=words)

    def connect(self, path: str) -> None:
        os.write(self._orders, f"{path}\n".encode())

    def told(self) -> str:
        line = b""
        while not line.endswith(b"\n"):
            byte = os.read(self._answers, 1)
            if not byte:
                return "gone"
            line += byte
        return line.decode().strip()

    def close(self) -> None:
        os.close(self._orders)
        os.close(self._answers)
        os.waitpid(self._pid, 0)


@pytest.fixture
def stranger() -> Any:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    one = Stranger()
    yield one
    one.close()


def test_another_user_cannot_come_to_the_socket(stranger: Stranger) -> None:
    words = []

    def intrude(paths: list[str]) -> None:
        stranger.connect(paths[0])
        words.append(stranger.told())

    check_shared(meet_two(intrude))
    assert words == ["PermissionError"]


def test_another_user_who_reaches_the_socket_gets_no_memory_and_the_ranks_meet(stranger: Stranger) -> None:
    words = []

    def intrude(paths: list[str]) -> None:
        os.chmod(Path(paths[0]).parent, 0o755)
        os.chmod(paths[0], 0o777)
        stranger.connect(paths[0])
        words.append(stranger.told())

    check_shared(meet_two(intrude))
    assert [*words, stranger.told()] == ["connected", "[0, 0]"]


def test_a_process_that_is_no_rank_keeps_nobody_from_meeting() -> None:
    odd: list[socket.socket] = []

    def intrude(paths: list[str]) -> None:
        for words in (b"", b"?", b"\x09\x00\x00\x00"):
            connection = socket.socket(socket.AF_UNIX)
            odd.append(connection)
            connection.connect(paths[0])
            connection.sendall(words)
            connection.shutdown(socket.SHUT_WR)

    check_shared(meet_two(intrude))
    for connection in odd:
        connection.close()


def test_a_socket_of_another_user_is_not_trusted(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    tmp_path.chmod(0o777)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "door"))
        os.seteuid(NOBODY)
        try:
            listener.listen()
        finally:
            os.seteuid(0)
        answers = iter([[str(tmp_path / "door")] * 2, [False, False]])
        with pytest.raises(NoSharedMemory):
            connect_shared_memory(1, NUM_BYTES, exchange=lambda _: next(answers))
