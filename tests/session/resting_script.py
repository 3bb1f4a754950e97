"""A user's loop in which rank 0 soon trains alone: `resting_script.py FOLDER CASES DEVICES`, cases with commas between.

The splitter is scripted: some shared steps, then rank 0 alone until the end, in short stretches. A case chooses what
else the loop does. Every rank writes what it saw and its final state.
"""

from __future__ import annotations

import json
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import outrider
from outrider.policy import PolicySpec
from outrider.policy.batch_splitter import Splitter
from outrider.policy.effects import AverageReport, Decision
from outrider.policy.policies.balanced import balanced

SIZE, BATCH, EPOCHS = 328, 8, 3
SHARED, STRETCH = 22, 4


class Scripted(Splitter):
    """Shares some steps, then lets rank 0 train alone."""

    _scripted: int | None = None
    _num_shared = 0

    @property
    def lone(self) -> int | None:
        return self._scripted

    @property
    def stretch(self) -> int:
        return STRETCH

    def learn(self, report: AverageReport, *, left: int | None = None) -> list[Decision]:
        self._num_shared += 1
        if self._num_shared == SHARED:
            self._scripted = 0
        return []

    def learn_alone(self, report: AverageReport, *, left: int | None = None) -> list[Decision]:
        return []


def make_policy() -> PolicySpec:
    """`balanced` with the scripted splitter, declared to switch as `auto` does."""
    splitters: list[Scripted] = []

    def open_scripted(segment: Any) -> Any:
        if not splitters:
            splitters.append(
                Scripted(world_size=(ranks := segment.seat.world_size), shares=(3.0,) + (1.0,) * (ranks - 1))
            )
        return balanced(replace(segment, splitter=splitters[0]))

    return PolicySpec(name="scripted", open=open_scripted, shares_steps=True, batch_is_global=True, switches=True)


def data() -> torch.utils.data.TensorDataset:
    inputs = torch.randn(SIZE, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return torch.utils.data.TensorDataset(inputs, (inputs.sum(1) > 0).long(), torch.arange(SIZE))


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)).double()


def is_step_due(case: str, *, seen: int, number: int) -> bool:
    """`number` counts the batches of this rank, `seen` those of all."""
    if case == "two habits":
        return seen % 4 == 3 or (seen < 43 and seen % 2 == 1)
    every = {"accumulating": 4, "own counter": 3}.get(case, 1)
    return number % every == every - 1


def own_steps(case: str, optimizers: list[torch.optim.Optimizer], *, number: int) -> list[torch.optim.Optimizer]:
    """The optimizers that step with this batch; as for a GAN, one may step after every fifth of this rank only."""
    return optimizers[:1] if case == "own turns" and number % 5 else optimizers


def train(folder: Path, case: str, devices: str) -> None:
    model = make_model()
    optimizers: list[torch.optim.Optimizer] = [torch.optim.Adam(model[0].parameters(), lr=0.02)]
    head = [model[2].weight] if case == "adding a group" else list(model[2].parameters())
    optimizers += [torch.optim.SGD(head, lr=0.1, momentum=0.9)]
    schedule = torch.optim.lr_scheduler.StepLR(optimizers[0], step_size=7, gamma=0.8)
    own = None
    if case in ("own schedule", "late schedule"):
        size = 5 if case == "own schedule" else 20
        own = torch.optim.lr_scheduler.StepLR(optimizers[1], step_size=size, gamma=0.5)
    if case in ("thawing", "thawing late"):
        model[0].requires_grad_(False)
    teacher = deepcopy(model).requires_grad_(False)
    used: list[int] = []
    outputs: list[float] = []
    options: Any = {"checkpoint_every": "0.02s"} if case == "checkpoints" else {}
    policy: Any = "sync" if devices == "cpu" else make_policy()
    with outrider.Session(devices=devices, policy=policy, run_dir=folder / "run", seed=3, **options) as s:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=5) if case == "loss scale" else None
        s.prepare(model, *optimizers, schedule, *([scaler] if scaler is not None else []))
        ema = s.ema(model, decay=0.9)
        if case == "other form" and not s.is_main:
            optimizers[0].param_groups[0]["foreach"] = True
        for epoch in s.epochs(EPOCHS):
            losses: list[float] = []
            for number, (x, y, index) in enumerate(s.batches(data(), batch_size=BATCH)):
                used += index.tolist() if s.batch_samples else []
                if case == "freezing" and s.global_step == 30:
                    model[0].requires_grad_(False)
                if case == "adding a group" and s.global_step == 30:
                    optimizers[1].add_param_group({"params": [model[2].bias]})
                if case == "raising" and s.is_main and s.global_step == 25:
                    raise ValueError("the user's own mistake")
                if case == "by hand":
                    optimizers[1].param_groups[0]["lr"] = 0.1 * (1 - s.progress)
                    if s.global_step == 30:
                        optimizers[0].param_groups[0]["weight_decay"] = 0.01
                if (case, s.global_step) in (("thawing", 30), ("thawing late", EPOCHS * SIZE // BATCH - 2)):
                    model[0].requires_grad_(True)
                if case == "modes" and s.global_step == 30:
                    model[1].eval()
                loss = F.cross_entropy(model(x), y) / (4 if case == "accumulating" else 1)
                if case == "own weight":
                    loss = loss * (1 + number / 41)
                if case == "own teacher":
                    loss = loss + (model(x) - teacher(x)).square().mean()
                losses.append(loss.item())
                s.backward(loss)
                if is_step_due(case, seen=s.samples_seen // BATCH, number=number):
                    for optimizer in own_steps(case, optimizers, number=number):
                        optimizer.step() if scaler is None else scaler.step(optimizer)
                        optimizer.zero_grad()
                    if scaler is not None:
                        scaler.update()
                    if case != "late mean" or epoch:
                        ema.update()
                    if own is not None:
                        own.step()
                    for slow, quick in zip(teacher.parameters(), model.parameters(), strict=True):
                        slow.data.lerp_(quick.data, 0.1)
                if case == "break" and epoch == 1 and s.is_main and s.samples_seen >= (SIZE + 12 * BATCH):
                    break
            if case == "break":
                optimizers[1].param_groups[0]["lr"] *= 0.5
            if case == "own mean":
                outputs.append(sum(losses) / len(losses))
            outputs.append(model(data().tensors[0]).sum().item())
        seen = s.samples_seen
    tensors = [*model.state_dict().values(), *ema.module.state_dict().values()]
    tensors += [value for o in optimizers for entry in o.state_dict()["state"].values() for value in entry.values()]
    told = {
        "used": used,
        "outputs": outputs,
        "rates": [group["lr"] for o in optimizers for group in o.param_groups],
        "ticks": schedule.last_epoch,
        "seen": seen,
        "modes": [module.training for module in model.modules()],
        "scale": None if scaler is None else scaler.get_scale(),
        "tensors": [torch.as_tensor(tensor).double().tolist() for tensor in tensors],
    }
    (folder / f"rank{s.rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    for name in sys.argv[2].split(","):
        train(Path(sys.argv[1]) / f"{name}-{sys.argv[3]}", name, sys.argv[3])
