"""Ray Train with unequal workers: a session in the workers of a TorchTrainer.

Needs `pip install "outrider[ray]"`. Start it on a machine of its own, or on the head of a cluster (RAY_ADDRESS=auto):

    python examples/ray_train.py --workers 2 --storage /mnt/shared/results

Nodes whose device is not to be found by itself get a label: `ray start --labels device=slow ...`.
"""

import argparse
from pathlib import Path

import ray
import torch
import torch.nn.functional as F
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn
from torch.utils.data import TensorDataset

from outrider.integrations.ray import RaySession

DEVICES = {"slow": "cpu@0.4"}  # by the label of a node


def make_data(num_samples: int) -> TensorDataset:
    inputs = torch.randn(num_samples, 32, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def accuracy(model: nn.Module, batch) -> torch.Tensor:
    return (model(batch[0]).argmax(1) == batch[1]).float().mean()


def train_loop(config: dict) -> None:
    data = make_data(config["samples"])
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    label = ray.get_runtime_context().get_node_labels().get("device")
    with RaySession(devices=DEVICES.get(label, "auto")) as s:
        model, optimizer = s.prepare(model, optimizer)
        for _ in s.epochs(config["epochs"]):
            for x, y in s.batches(data, batch_size=64):
                s.step(F.cross_entropy(model(x), y))
            s.report(accuracy=s.evaluate_together(accuracy, data))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--storage", type=Path, default=Path("ray-results"))
    options = parser.parse_args()
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"epochs": options.epochs, "samples": options.samples},
        scaling_config=ScalingConfig(num_workers=options.workers, placement_strategy="SPREAD"),
        run_config=RunConfig(
            name="outrider-example",
            storage_path=str(options.storage.resolve()),
            failure_config=FailureConfig(max_failures=3),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    metrics = trainer.fit().metrics
    shares = [metrics[f"share_rank{rank}"] for rank in range(options.workers)]
    print(f"epoch {metrics['epoch']}: loss {metrics['loss']:.3f}, accuracy {metrics['accuracy']:.1%}")
    print("shares " + " ".join(f"{share:.2f}" for share in shares))


if __name__ == "__main__":
    main()
