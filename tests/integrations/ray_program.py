"""The program of test_ray.py: a cluster of two nodes on this machine, and two runs of Ray Train in it.

The nodes have different addresses, so Ray places and numbers the workers as on two hosts. Prints what the runs left, as
JSON in the last line.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray.train
import torch
from ray.cluster_utils import Cluster
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

import outrider

NUM_SAMPLES = 256
SMALL_STORE = 80_000_000


def train_loop(config: dict[str, Any]) -> list[str]:
    """Three epochs; worker 1 is killed in the second one, and again in the third after the run folder has gone."""
    from outrider.integrations.ray import RaySession, ray_options, report_epoch

    folder = Path(config["folder"])
    attempt = len(list(folder.glob("killed*")))
    inputs = torch.randn(NUM_SAMPLES, 8, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(inputs, (inputs.sum(1) > 0).long(), torch.arange(NUM_SAMPLES))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    device = "cpu@0.4" if ray.get_runtime_context().get_node_labels()["device"] == "slow" else "cpu"
    # Measured shares would depend on what else the machine does.
    with RaySession(devices=device, policy="cadence", shares=(0.75, 0.25)) as s:
        s.prepare(model, optimizer)
        for epoch in s.epochs(3):
            for x, y, indices in s.batches(data, batch_size=16):
                s.step(nn.functional.cross_entropy(model(x), y))
                with (folder / f"epoch{epoch}-attempt{attempt}-rank{s.rank}").open("a") as file:
                    print(*indices.tolist(), file=file)
                if s.rank == 1 and epoch == attempt + 1 < 3:
                    end_worker(folder / f"killed{attempt}", s.run_dir, forgets=attempt == 1)
            s.report(answer=42 + s.rank)
    run = outrider.train(
        lambda: nn.Linear(8, 2),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        data,
        epochs=1,
        batch_size=16,
        **ray_options(devices=device, run_dir=folder / "train", policy="cadence", resume=None),
    )
    for metrics in run:
        report_epoch(metrics, run_dir=run.run_dir, answer="train")
    return [s.run_dir.name, *s.devices]


def end_worker(mark: Path, run_dir: Path, *, forgets: bool) -> None:
    # Ray loses reports that its controller has not fetched when a worker dies.
    ray.train.get_all_reported_checkpoints()
    mark.touch()
    if forgets:
        shutil.rmtree(run_dir / "checkpoints")
    os.kill(os.getpid(), signal.SIGKILL)


def fit(folder: Path) -> dict[str, Any]:
    result = TorchTrainer(
        train_loop,
        train_loop_config={"folder": str(folder)},
        scaling_config=ScalingConfig(num_workers=2, label_selector=[{"device": "fast"}, {"device": "slow"}]),
        run_config=RunConfig(
            name="run", storage_path=str(folder / "store"), failure_config=FailureConfig(max_failures=2)
        ),
    ).fit()
    return {
        "returned": result.return_value,
        "reports": [metrics for _, metrics in result.best_checkpoints],
        "last": result.metrics,
        "files": sorted(os.listdir(result.checkpoint.path)),
        "seen_in_epoch_1": seen(folder, "epoch1-attempt1"),
        "seen_in_epoch_2": seen(folder, "epoch2-attempt2"),
        "attempts": sorted(path.name for path in folder.glob("epoch*-rank0")),
    }


def seen(folder: Path, name: str) -> list[int]:
    """The samples that both ranks took."""
    return sorted(int(index) for rank in (0, 1) for index in (folder / f"{name}-rank{rank}").read_text().split())


def main(folder: Path, example: str) -> None:
    cluster = Cluster()
    for label, place in (("fast", {"num_cpus": 2}), ("slow", {"num_cpus": 1, "node_ip_address": "127.0.0.2"})):
        cluster.add_node(object_store_memory=SMALL_STORE, include_dashboard=False, labels={"device": label}, **place)
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        found: dict[str, Any] = {"run": fit(folder)}
        command = [sys.executable, example, "--storage", str(folder / "example"), "--epochs", "2"]
        variables = {**os.environ, "RAY_ADDRESS": cluster.address}
        found["example"] = subprocess.run(command, env=variables, capture_output=True, text=True).stdout
        print(json.dumps(found))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
