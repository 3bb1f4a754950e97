"""A user's loop that freezes and thaws parameters: `python frozen_script.py FOLDER CASE:POLICY ...`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import outrider

SIZE, BATCH = 320, 4


def data() -> TensorDataset:
    inputs = torch.randn(SIZE, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def make_tower() -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    model[0].requires_grad_(False)
    return model


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def options(policy: str) -> dict[str, Any]:
    return {
        "policy": policy,
        "seed": 3,
        "threads_per_rank": 1,
        "run_dir": "run",
        "timeout_s": 60.0,
        "verify": True,
        "anchor": 2 if policy in ("cadence", "async") else None,
        # Else the slower rank may rest, and count fewer batches than the other.
        "shares": (0.6, 0.4) if policy in ("auto", "balanced") else None,
    }


def tell(session: outrider.Session, *models: nn.Module) -> None:
    values = [parameter.detach().flatten().tolist() for model in models for parameter in model.parameters()]
    Path(f"rank{session.rank}.json").write_text(json.dumps(values))


def thawing(policy: str) -> None:
    """The lower layer is thawed in the middle of a pass, the upper one frozen in the middle of the next."""
    model = make_tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with outrider.Session(**options(policy)) as s:
        model, optimizer = s.prepare(model, optimizer)
        for epoch in s.epochs(3):
            for number, batch in enumerate(s.batches(data(), batch_size=BATCH)):
                if (epoch, number) == (0, 8):
                    model[0].requires_grad_(True)
                if (epoch, number) == (1, 2):
                    model[2].requires_grad_(False)
                s.step(loss_of(model, batch))
            # A rank on a busy machine may have had fewer batches.
            model[0].requires_grad_(True)
            model[2].requires_grad_(epoch < 1)
        tell(s, model)


def adversaries(policy: str) -> None:
    """Each half requires gradients only while it is trained, and one of them only in every third batch."""
    torch.manual_seed(3)
    generator, critic = nn.Linear(6, 6), nn.Linear(6, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (generator, critic)]
    with outrider.Session(**options(policy)) as s:
        generator, critic, for_generator, for_critic = s.prepare(generator, critic, *optimizers)
        for _ in s.epochs(2):
            for number, (inputs, _) in enumerate(s.batches(data(), batch_size=BATCH)):
                generator.requires_grad_(False)
                critic.requires_grad_(True)
                for_critic.zero_grad()
                s.backward((critic(generator(inputs)) - critic(inputs)).square().mean())
                for_critic.step()
                for_critic.zero_grad()
                if number % 3 == 0:
                    generator.requires_grad_(True)
                    critic.requires_grad_(False)
                    for_generator.zero_grad()
                    s.backward(-critic(generator(inputs)).mean())
                    for_generator.step()
                    for_generator.zero_grad()
        tell(s, generator, critic)


def differing(policy: str) -> None:
    """One rank alone thaws a layer between two passes."""
    model = make_tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with outrider.Session(**options(policy)) as s:
        model, optimizer = s.prepare(model, optimizer)
        for epoch in s.epochs(2):
            if epoch == 1 and s.rank == 1:
                model[0].weight.requires_grad_(True)
            for batch in s.batches(data(), batch_size=BATCH):
                s.step(loss_of(model, batch))


CASES = {"thawing": thawing, "adversaries": adversaries, "differing": differing}

if __name__ == "__main__":
    for wish in sys.argv[2:]:
        folder = Path(sys.argv[1]) / wish.replace(":", "-")
        folder.mkdir(exist_ok=True)
        os.chdir(folder)
        case, policy = wish.split(":")
        CASES[case](policy)
