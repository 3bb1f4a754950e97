"""What the live page learns of a GPU: the phases of its steps, and its memory and temperature where NVML tells."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import outrider
from outrider.timeline.rank_load import load_of
from outrider.watch.run_reader import RunReader


def test_a_run_on_a_gpu_writes_phases_and_conditions(tmp_path: Path) -> None:
    data = torch.randn(50_000, 256), torch.randn(50_000, 1)
    outrider.train(
        lambda: nn.Sequential(nn.Linear(256, 2_048), nn.ReLU(), nn.Linear(2_048, 1)),
        lambda parameters: torch.optim.SGD(parameters, lr=0.001),
        lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        data,
        batch_size=32,
        epochs=4,
        devices="cuda:0,cpu",
        policy="sync",
        run_dir=tmp_path,
    ).join()
    reader = RunReader(tmp_path)
    reader.refresh()
    loads = {rank: load_of(known) for rank, known in reader.pulses.items()}
    assert sum(load.samples for load in loads.values()) == 200_000
    assert all(load.spent_s["compute"] > 0 and load.spent_s["average"] > 0 for load in loads.values())
    condition = reader.condition(0)
    assert condition["memory_bytes"] <= condition["memory_limit_bytes"]
