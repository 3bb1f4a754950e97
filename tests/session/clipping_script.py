"""A user's script that clips by hand between backward and step: `python clipping_script.py FOLDER CASE ...`."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import outrider

SIZE, BATCH, LIMIT = 43, 8, 0.05
FOLDER = Path(sys.argv[1])


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SIZE, 6, generator=generator, dtype=torch.float64)
    return inputs, (inputs.sum(1) > 0).long()


def make_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)).double()


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def clip(*models: nn.Module) -> float:
    return float(nn.utils.clip_grad_norm_([p for model in models for p in model.parameters()], LIMIT))


def tell(case: str, rank: int, model: nn.Module, **facts: Any) -> None:
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()
    (FOLDER / f"{case}{rank}.json").write_text(json.dumps({"weights": weights, **facts}))


@contextlib.contextmanager
def session(
    case: str, policy: str = "balanced", shares: tuple[float, float] = (0.7, 0.3)
) -> Iterator[outrider.Session]:
    options: dict[str, Any] = {"threads_per_rank": 1, "timeout_s": 60.0, "seed": 3, "devices": "cpu,cpu"}
    if policy == "balanced":
        options["shares"] = shares
    with outrider.Session(policy=policy, run_dir=FOLDER / f"{case}-run", **options) as s:
        yield s


def batches(s: outrider.Session) -> Any:
    return s.batches(data(), batch_size=BATCH, shuffle=False)


def by_steps(case: str) -> None:
    model, norms = make_model(), []
    optimizer = make_optimizer(model.parameters())
    with session(case) as s:
        s.prepare(model, optimizer)
        for x, y in batches(s):
            s.backward(loss_of(model, x, y))
            norms.append(clip(model))
            s.optimizer_step()
        tell(case, s.rank, model, norms=norms)


def accumulated(case: str) -> None:
    """Two batches to a step."""
    model, norms = make_model(), []
    optimizer = make_optimizer(model.parameters())
    with session(case) as s:
        s.prepare(model, optimizer)
        for number, (x, y) in enumerate(batches(s)):
            s.backward(loss_of(model, x, y) / 2)
            if number % 2 == 1:
                norms.append(clip(model))
                optimizer.step()
                optimizer.zero_grad()
        rank = s.rank
    tell(case, rank, model, norms=norms, loss=s.metrics.loss)


def in_pieces(case: str) -> None:
    """Pieces of three samples: of every batch one rank has more of them than the other."""
    model, norms = make_model(), []
    optimizer = make_optimizer(model.parameters())
    with session(case) as s:
        s.prepare(model, optimizer)
        for x, y in batches(s):
            pieces = list(zip(x.split(3), y.split(3), strict=True))
            with s.no_sync():
                for xs, ys in pieces[:-1]:
                    s.backward(loss_of(model, xs, ys) * (len(xs) / len(x)))
            xs, ys = pieces[-1]
            s.backward(loss_of(model, xs, ys) * (len(xs) / len(x)))
            norms.append(clip(model))
            s.optimizer_step()
        rank = s.rank
    tell(case, rank, model, norms=norms, loss=s.metrics.loss)


def two_optimizers(case: str) -> None:
    """One backward pass for two optimizers; the second is clipped only after the first has stepped."""
    model, norms = make_model(), []
    first, second = (make_optimizer(part.parameters()) for part in (model[0], model[2]))
    with session(case) as s:
        s.prepare(model, first, second)
        for x, y in batches(s):
            s.backward(loss_of(model, x, y))
            norms.append(clip(model[0]))
            s.optimizer_step(first)
            norms.append(clip(model[2]))
            s.optimizer_step(second)
        tell(case, s.rank, model, norms=norms)


def frozen(case: str) -> None:
    """The first layer rests, and a second backward pass of the same batch adds a penalty."""
    model, norms = make_model(), []
    model[0].requires_grad_(False)
    optimizer = make_optimizer(model[2].parameters())
    with session(case) as s:
        s.prepare(model, optimizer)
        for x, y in batches(s):
            s.backward(loss_of(model, x, y))
            s.backward(0.1 * model[2].weight.square().sum())
            norms.append(clip(model[2]))
            s.optimizer_step()
        tell(case, s.rank, model, norms=norms)


def scaled(case: str) -> None:
    model, norms = make_model(), []
    optimizer = make_optimizer(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with session(case) as s:
        s.prepare(model, optimizer, scaler)
        for x, y in batches(s):
            s.backward(scaler.scale(loss_of(model, x, y)))
            scaler.unscale_(optimizer)
            norms.append(clip(model))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        tell(case, s.rank, model, norms=norms)


def leaving(case: str) -> None:
    """Rank 1 leaves between its backward pass and the step, and computes alone what the others share."""
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    with session(case) as s:
        s.prepare(model, optimizer)
        for _ in s.epochs(2):
            for number, (x, y) in enumerate(batches(s)):
                s.backward(loss_of(model, x, y))
                if s.rank == 1 and number == 2:
                    break
                clip(model)
                s.optimizer_step()
        tell(case, s.rank, model, momenta=[state["momentum_buffer"].tolist() for state in optimizer.state.values()])


def like_ddp(case: str) -> None:
    """The same batches in torch DDP, which has processes of its own to meet."""
    model, seen = make_model().float(), []
    optimizer = make_optimizer(model.parameters())
    with session(case, "sync") as s:
        s.prepare(model, optimizer)
        for x, y in batches(s):
            if s.samples_seen + 2 * BATCH > SIZE:
                continue  # DDP takes equal batches only
            seen.append((x.float(), y))
            s.backward(loss_of(model, x.float(), y))
            clip(model)
            s.optimizer_step()
        rank = s.rank
    dist.init_process_group("gloo", init_method=f"file://{FOLDER}/meeting", rank=rank, world_size=2)
    plain = make_model().float()
    ddp = DistributedDataParallel(plain)
    its = make_optimizer(ddp.parameters())
    for x, y in seen:
        its.zero_grad()
        loss_of(ddp, x, y).backward()
        clip(ddp)
        its.step()
    # Else DDP holds the group to the end of this function, where its threads and the interpreter may hang.
    del ddp
    dist.destroy_process_group()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    difference = max(float((mine - other).detach().abs().max()) for mine, other in pairs)
    tell(case, rank, model, difference=difference, steps=len(seen))


def unequal(case: str) -> None:
    """Rank 0 cuts its part of a batch in more pieces than rank 1, and says nothing of it."""
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    with session(case) as s:
        s.prepare(model, optimizer)
        for x, y in batches(s):
            for xs, ys in zip(x.split(3), y.split(3), strict=True):
                s.backward(loss_of(model, xs, ys) * (len(xs) / len(x)))
            s.optimizer_step()


def accumulated_nan(case: str) -> None:
    """The gradient of rank 1 is NaN in a batch without a step, and its loss is finite."""
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    with session(case) as s:
        s.prepare(model, optimizer)
        for number, (x, y) in enumerate(batches(s)):
            loss_of(model, x, y).backward()
            if s.rank == 1 and number == 2:
                model[0].weight.grad[0, 0] = float("nan")
            if number % 2 == 1:
                optimizer.step()
                optimizer.zero_grad()


CASES: dict[str, Callable[[str], None]] = {
    one.__name__: one
    for one in (
        by_steps,
        accumulated,
        in_pieces,
        two_optimizers,
        frozen,
        scaled,
        leaving,
        like_ddp,
        unequal,
        accumulated_nan,
    )
}

if __name__ == "__main__":
    for name in sys.argv[2:]:
        CASES[name](name)
