"""One rank of several on this machine that sum in shared memory: runs every scenario and writes what it found as JSON.

Not a test itself; test_shared_memory_sums.py starts these. Usage: shared_memory_rank.py RANK WORLD_SIZE FOLDER
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from outrider.average.transport.shared_memory import NoSharedMemory, connect_shared_memory
from outrider.average.transport.shared_memory_sums import PIECE_BYTES, SharedMemoryCollective
from outrider.errors import OutriderError

SIZES = (1, 1_000, PIECE_BYTES // 4, PIECE_BYTES // 4 + 1, 5 * PIECE_BYTES // 8)


def teller(store: dist.Store, rank: int, world_size: int) -> Callable[[Any], list[Any]]:
    rounds = itertools.count()

    def exchange(value: Any) -> list[Any]:
        number = next(rounds)
        store.set(f"{number}/{rank}", json.dumps(value))
        return [json.loads(store.get(f"{number}/{other}")) for other in range(world_size)]

    return exchange


def numbers(size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def sums(collective: SharedMemoryCollective) -> bool:
    """In the order of the ranks, piece by piece, as one process would add them up?"""
    agrees = True
    for number, size in enumerate(SIZES):
        mine = numbers(size, seed=collective.rank + 10 * number)
        expected = numbers(size, seed=10 * number)
        for rank in range(1, collective.world_size):
            expected += numbers(size, seed=rank + 10 * number)
        collective.sum_([mine])
        agrees &= torch.equal(mine, expected)
    return agrees


def many_small_sums(collective: SharedMemoryCollective) -> int:
    """One after the other without any pause: a place that is written too early would be seen."""
    num_wrong = 0
    tensor = torch.empty(3_000)
    for number in range(2_000):
        tensor.fill_(number + collective.rank)
        collective.sum_([tensor])
        expected = sum(number + rank for rank in range(collective.world_size))
        num_wrong += not bool((tensor == expected).all())
    return num_wrong


def others(collective: SharedMemoryCollective) -> dict[str, Any]:
    rank = collective.rank
    largest, sent, strided = torch.tensor([rank, -rank]), torch.tensor(float(rank)), torch.zeros(3, 2).t()
    strided += torch.arange(3) + rank
    flags, double = torch.tensor([rank == 1, False]), torch.full((2,), 0.5, dtype=torch.float64)
    collective.max_([largest])
    collective.broadcast_([sent, flags], source=1)
    collective.sum_([strided, double, torch.empty(0)])
    return {
        "max": largest.tolist(),
        "broadcast": [sent.item(), flags.tolist()],
        "strided": strided.tolist(),
        "double": double.tolist(),
        "gather": collective.gather([rank, 10 * rank]),
    }


def told(attempt: Callable[[], Any]) -> dict[str, Any] | None:
    try:
        attempt()
    except OutriderError as error:
        return {"kind": type(error).__name__, "message": error.message, "hint": error.hint, "rank": error.rank}
    return None


def no_shared_memory(rank: int, exchange: Callable[[Any], list[Any]]) -> str | None:
    """Rank 1 cannot make a folder: who is told?"""
    if rank == 1:
        tempfile.tempdir = "/nowhere"
    try:
        connect_shared_memory(rank, 64, exchange=exchange)
    except NoSharedMemory as error:
        return str(error)
    finally:
        tempfile.tempdir = None
    return None


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    exchange = teller(dist.FileStore(str(folder / "store"), world_size), rank, world_size)
    collective = SharedMemoryCollective.open(rank, exchange=exchange, timeout_s=60)
    found: dict[str, Any] = {
        "agrees": sums(collective),
        "wrong": many_small_sums(collective),
        "others": others(collective),
        "no shared memory": no_shared_memory(rank, exchange),
        "left behind": [path.name for path in Path(tempfile.gettempdir()).glob(f"outrider-{os.getpid()}-*")],
    }
    impatient = SharedMemoryCollective.open(rank, exchange=exchange, timeout_s=0.2)
    if rank == 0:
        found["late"] = told(lambda: impatient.sum_([torch.zeros(1_000)]))
    exchange("rank 0 has waited")
    if rank == world_size - 1:
        (folder / f"rank{rank}.json").write_text(json.dumps(found))
        os.kill(os.getpid(), signal.SIGKILL)
    found["lost"] = told(lambda: collective.sum_([torch.zeros(1_000)]))
    collective.close()
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
