"""A user's training script: `python user_script.py FOLDER CASE:POLICY ...`; each case is one way to use a session."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import TensorDataset

import outrider
from outrider.data.keyed import uniform

SIZE, BATCH, SEED = 331, 8, 3
"""A prime, so that nothing divides it."""


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SIZE, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def make_model() -> nn.Module:
    torch.manual_seed(SEED)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)).double()


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def make_calm_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.5)


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def accuracy(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return (model(batch[0]).argmax(1) == batch[1]).double().mean()


def save(session: outrider.Session, name: str, model: nn.Module, **facts: Any) -> None:
    tensors = {key: value.detach().clone() for key, value in model.state_dict().items()}
    save_file(tensors, f"{name}{session.rank}.safetensors")
    Path(f"{name}{session.rank}.json").write_text(json.dumps({"rank": session.rank, **facts}))


def options(policy: str) -> dict[str, Any]:
    return {
        "policy": policy,
        "seed": SEED,
        "threads_per_rank": 1,
        "speed_hints": None,
        "record_schedule": True,
        "run_dir": "run",
        "timeout_s": 60.0,
        "verify": True,
        "anchor": 2 if policy in ("cadence", "async") else None,
    }


def plain(policy: str) -> None:
    """The loop of the README, and an evaluation that all ranks share."""
    train_set = data()
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    with outrider.Session(**options(policy)) as s:
        model, optimizer = s.prepare(model, optimizer)
        for _ in s.epochs(2):
            for batch in s.batches(train_set, batch_size=BATCH):
                s.step(loss_of(model, batch))
                s.log("size", len(batch[0]))
        alone, together = s.evaluate(accuracy, train_set), s.evaluate_together(accuracy, train_set)
        save(s, "plain", model, alone=alone, together=together, world=s.world_size, device=str(s.device))
        if s.is_main:
            print("main is rank", s.rank)


def leaving(policy: str) -> None:
    """Rank 1 breaks out of the first epoch; everybody changes the rate and goes on with the second."""
    train_set = data()
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    counts = []
    with outrider.Session(**options(policy)) as s:
        s.prepare(model, optimizer)
        for epoch in s.epochs(2):
            count = 0
            for batch in s.batches(train_set, batch_size=BATCH):
                s.step(loss_of(model, batch))
                count += 1
                if epoch == 0 and s.rank == 1 and count == 3:
                    break
            counts.append(count)
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
        save(s, "leaving", model, counts=counts, rate=optimizer.param_groups[0]["lr"])


def failing(policy: str) -> None:
    """Rank 1 meets an exception in its loop body."""
    train_set = data()
    model = make_model()
    with outrider.Session(**options(policy)) as s:
        optimizer = make_optimizer(model.parameters())
        s.prepare(model, optimizer)
        for _ in s.epochs(2):
            for number, batch in enumerate(s.batches(train_set, batch_size=BATCH)):
                if s.rank == s.world_size - 1 and number == 2:
                    raise ValueError("a bad batch")
                s.step(loss_of(model, batch))


def together_alone(policy: str) -> None:
    """Only rank 0 calls what all ranks must call."""
    train_set = data()
    model = make_model()
    with outrider.Session(**options(policy)) as s:
        s.prepare(model, make_optimizer(model.parameters()))
        for _ in s.epochs(2):
            for batch in s.batches(train_set, batch_size=BATCH):
                s.step(loss_of(model, batch))
            if s.is_main:
                s.evaluate_together(accuracy, train_set)


def accumulating(policy: str) -> None:
    """Gradients of two batches to a step, by optimizer.step() as in plain torch."""
    train_set = data()
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    with outrider.Session(**options(policy)) as s:
        s.prepare(model, optimizer)
        for _ in s.epochs(1):
            for number, batch in enumerate(s.batches(train_set, batch_size=BATCH, shuffle=False)):
                (loss_of(model, batch) / 2).backward()
                if number % 2 == 1:
                    optimizer.step()
                    optimizer.zero_grad()
        save(s, "accumulating", model)


def adversaries(policy: str) -> None:
    """Two models, two optimizers, two steps to a batch."""
    train_set = data()
    torch.manual_seed(SEED)
    left, right = nn.Linear(6, 2).double(), nn.Linear(2, 1).double()
    left_optimizer, right_optimizer = (make_calm_optimizer(model.parameters()) for model in (left, right))
    with outrider.Session(**options(policy)) as s:
        s.prepare(left, right, left_optimizer, right_optimizer)
        for _ in s.epochs(1):
            for inputs, _ in s.batches(train_set, batch_size=BATCH, shuffle=False):
                s.step(right(left(inputs).detach()).square().mean(), optimizer=right_optimizer)
                s.backward((right(left(inputs)) - 1).square().mean())
                s.optimizer_step(left_optimizer)
                right_optimizer.zero_grad()
        save(s, "left", left)
        save(s, "right", right)


def two_sessions(policy: str) -> None:
    """One session after the other in the same script."""
    reached = []
    for number in range(2):
        model = make_model()
        optimizer = make_optimizer(model.parameters())
        with outrider.Session(policy=policy, run_dir=f"run{number}", threads_per_rank=1) as s:
            s.prepare(model, optimizer)
            for batch in s.batches(data(), batch_size=BATCH):
                s.step(loss_of(model, batch))
            reached.append(s.evaluate(accuracy, data()))
            save(s, f"session{number}-", model, reached=reached)


def by_hand(policy: str) -> None:
    """Averages when the user says so, weighted by samples."""
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).double()
    with outrider.wrap(model, policy=policy, threads_per_rank=1) as wrapped:
        s = wrapped.session
        save(s, "start", model)
        samples = 3 if s.rank == 0 else 1
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(4.0 * s.rank)
        model[1].running_mean.fill_(float(s.rank))
        model[1].running_var.fill_(2.0)
        model[1].num_batches_tracked.fill_(5 + s.rank)
        wrapped.average_parameters(samples=samples)
        wrapped.average_buffers(samples=samples)
        save(s, "averaged", model)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 8.0 * s.rank)
        wrapped.average_gradients(samples=samples)
        gradients = [float(parameter.grad.mean()) for parameter in model.parameters()]
        with torch.no_grad():
            model[0].weight.fill_(float(s.rank))
        wrapped.broadcast(source=s.world_size - 1)
        save(s, "sent", model, gradients=gradients)


def noisy(batch: tuple[torch.Tensor, ...], keys: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Every sample a little moved, in every epoch in another way."""
    return batch[0] + 0.1 * uniform(keys, 0)[:, None].double(), batch[1]


def train_in_sittings(policy: str, *, epochs: int, gives_up_in: int | None = None, **more: Any) -> None:
    """A model that draws, normalises and is scheduled, on samples that are augmented."""
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 2)).double()
    optimizer = make_optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=4 * SIZE // BATCH + 1)
    plan = FIXED_PLAN if policy == "cadence" else {}
    with outrider.Session(**{**options(policy), **plan, **more}) as s:
        s.prepare(model, optimizer, schedule)
        for epoch in s.epochs(epochs):
            for number, batch in enumerate(s.batches(data(), batch_size=BATCH, augment=noisy)):
                if epoch == gives_up_in and number == 3:
                    raise ValueError("the power is gone")
                s.step(loss_of(model, batch))
            s.evaluate_together(accuracy, data())
        save(s, "sittings", model)


def whole(policy: str) -> None:
    """Four epochs in one sitting, from the same start as `cut`."""
    torch.manual_seed(SEED)
    train_in_sittings(policy, epochs=4)


def cut(policy: str) -> None:
    """The same, ended in the middle of the third epoch."""
    torch.manual_seed(SEED)
    train_in_sittings(policy, epochs=4, gives_up_in=2, checkpoint_every=1)


def resumed(policy: str) -> None:
    """The rest, from another start: only what the checkpoint has can make it the same."""
    torch.manual_seed(SEED + 1)
    train_in_sittings(policy, epochs=4, resume=f"../cut-{policy}/run")


FIXED_PLAN: dict[str, Any] = {"shares": (0.6, 0.4), "anchor": 2, "guard": False}
"""Nothing that is measured decides who takes what, so every run has the same schedule."""


def images() -> TensorDataset:
    torch.manual_seed(SEED)
    pixels, labels = _resnet()["striped_images"](40, size=8)
    return TensorDataset(pixels.double(), labels)


def make_resnet20() -> nn.Module:
    torch.manual_seed(SEED)
    plain: nn.Module = _resnet()["PlainResNet20"]().double()
    return plain


def _resnet() -> dict[str, Any]:
    return runpy.run_path(str(Path(__file__).parents[2] / "examples" / "flow_resnet20.py"))


def resnet20_flow(policy: str) -> None:
    """ResNet-20 as a flow, from the weights of the hand-written one, by one call of setup()."""
    resnet = _resnet()
    graph = resnet["resnet20_flow"]().double()
    resnet["copy_weights"](make_resnet20(), graph)
    with outrider.setup(graph, optimizer=make_calm_optimizer, **{**options(policy), **FIXED_PLAN}) as s:
        for batch in s.batches(images(), batch_size=4):
            s.step(loss_of(graph, batch))
        save(s, "flow", graph)


if __name__ == "__main__":
    base = Path(sys.argv[1])
    for wish in sys.argv[2:]:
        folder = base / wish.replace(":", "-")
        folder.mkdir(exist_ok=True)
        os.chdir(folder)
        case, policy = wish.split(":")
        globals()[case](policy)
