"""Runs a function as the ranks of a world: each in a process that has imported transformers already."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

from ports import free_port

_PRELOAD = ["torch", "integrations.hf_programs"]
_LIMIT_S = 300.0


def run_ranks(program: str, *, folder: Path, devices: str = "cpu", **arguments: Any) -> list[Any]:
    """What this function of `hf_programs` returns on each rank, as JSON carries it; one rank per device."""
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    world_size, port = len(devices.split(",")), free_port()
    processes = []
    for rank in range(world_size):
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        told = variables if world_size > 1 else {}
        told |= {"OUTRIDER_DEVICES": devices, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
        processes.append(context.Process(target=_be_rank, args=(rank, folder, told, program, arguments)))
    for process in processes:
        process.start()
    for process in processes:
        process.join(_LIMIT_S)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    assert codes == [0] * world_size, "".join(_file(folder, rank, "log").read_text() for rank in range(world_size))
    return [json.loads(_file(folder, rank, "json").read_text()) for rank in range(world_size)]


def _file(folder: Path, rank: int, ending: str) -> Path:
    return folder / f"rank{rank}.{ending}"


def _be_rank(rank: int, folder: Path, variables: dict[str, str], program: str, arguments: dict[str, Any]) -> None:
    log = _file(folder, rank, "log").open("w")
    os.dup2(log.fileno(), sys.stdout.fileno())
    os.dup2(log.fileno(), sys.stderr.fileno())
    os.environ.update(variables)
    os.chdir(folder)
    # Not at the top: the tests do without transformers, whose import takes many seconds.
    from integrations import hf_programs

    result = getattr(hf_programs, program)(**arguments)
    _file(folder, rank, "json").write_text(json.dumps(result))
