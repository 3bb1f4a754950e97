"""Samples the utilization of a session's devices: rank 0 watches the ranks on its own host.

Decides which rank samples which ranks; the sampler decides what is read and how often. Called by the session when it
opens.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import torch

from outrider.timeline.sampler import SampledProcess, Sampler
from outrider.world.world import World


def start_sampler(world: World, *, origin_s: float, is_wanted: bool, folder: Path) -> Sampler | None:
    """Start the sampler on rank 0; returns None on other ranks or if sampling is off. All ranks call this.

    Rank 0 samples, because a session may run without a process that started its ranks.
    """
    here = {"pid": os.getpid(), "num_threads": torch.get_num_threads(), "host": socket.gethostname()}
    processes = world.gather_json("sampled processes", here)
    if processes is None or not is_wanted:
        return None
    workers = [
        SampledProcess(rank=rank, device=str(spec), pid=process["pid"], num_threads=process["num_threads"])
        for rank, (spec, process) in enumerate(zip(world.specs, processes, strict=True))
        if process["host"] == here["host"]
    ]
    sampler = Sampler(workers, origin_s=origin_s, is_over=lambda: False, folder=folder)
    sampler.begin()
    return sampler
