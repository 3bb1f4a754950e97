"""What a flow costs: forward and backward of ResNet-20 as a flow against the hand-written module, in one process.

Rounds alternate between the two, each going first in turn, so that a noisy machine hurts both alike.
Prints the median ratio of the rounds with its spread; `--json` adds the raw samples as one line.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from flow_resnet20 import PlainResNet20, copy_weights, resnet20_flow


def step_ms(model: nn.Module, images: Tensor, labels: Tensor, *, steps: int) -> float:
    """Milliseconds of one forward and backward, the mean of `steps`."""
    _wait_for(images)
    started = time.perf_counter()
    for _ in range(steps):
        model.zero_grad(set_to_none=True)
        F.cross_entropy(model(images), labels).backward()
    _wait_for(images)
    return (time.perf_counter() - started) * 1e3 / steps


def _wait_for(images: Tensor) -> None:
    if images.is_cuda:
        torch.cuda.synchronize()


def measure(options: argparse.Namespace) -> list[dict[str, float]]:
    """One entry for each round: ms per step of both."""
    plain, flow = PlainResNet20().to(options.device), resnet20_flow().to(options.device)
    copy_weights(plain, flow)
    images = torch.randn(options.batch, 3, 32, 32, device=options.device)
    labels = torch.randint(10, (options.batch,), device=options.device)
    for model in (plain, flow):
        step_ms(model, images, labels, steps=max(3, options.steps))
    rounds = []
    for number in range(options.rounds):
        pair = [("plain", plain), ("flow", flow)]
        times = {name: step_ms(m, images, labels, steps=options.steps) for name, m in pair[:: 1 - 2 * (number % 2)]}
        rounds.append(times)
    return rounds


def report(rounds: list[dict[str, float]], options: argparse.Namespace) -> None:
    ratios = [times["flow"] / times["plain"] for times in rounds]
    low, middle, high = statistics.quantiles(ratios, n=4)
    best = min(times["flow"] for times in rounds) / min(times["plain"] for times in rounds)
    medians = {name: statistics.median(times[name] for times in rounds) for name in ("plain", "flow")}
    machine = torch.cuda.get_device_name() if options.device.startswith("cuda") else platform.machine()
    print(f"ResNet-20, batch {options.batch}, {options.device} ({machine}), torch {torch.__version__}")
    print(f"hand-written {medians['plain']:.2f} ms, flow {medians['flow']:.2f} ms (medians of {len(rounds)} rounds)")
    print(f"flow / hand-written: median {middle:.4f}, quartiles {low:.4f} to {high:.4f}, of the fastest {best:.4f}")
    if options.json:
        print(json.dumps({"ratios": ratios, "rounds": rounds}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=2, help="steps of each model in a round")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true", help="print the raw samples too")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    report(measure(options), options)


if __name__ == "__main__":
    main()
