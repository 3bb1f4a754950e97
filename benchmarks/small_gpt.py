"""Two small language models for studies in virtual time: characters of Shakespeare, bytes of Python's library.

Decides models, data, optimizer and schedule; the studies decide policies and settings. Called by wire_types.py.
"""

from __future__ import annotations

import math
import sysconfig
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outrider.bench.datasets import shakespeare
from outrider.bench.models.text_models import Gpt2
from outrider.replica.recipe import Recipe

CONTEXT = 64
BATCH = 16
NUM_EVALUATED = 1_024
PYTHON_BYTES = 12_000_000
HELD_OUT = 10
"""One byte in so many, the last ones, is evaluated on."""
WARM_UP = 0.05
"""Of all steps; a cosine follows."""
STUDENT = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}
"""Student's t, 97.5 %, by degrees of freedom."""


@dataclass(frozen=True)
class Task:
    corpus: str
    num_tokens: int
    width: int
    num_blocks: int
    rate: float


TASKS = {
    "shakespeare": Task("shakespeare", num_tokens=len(shakespeare.SYMBOLS), width=64, num_blocks=3, rate=8e-3),
    "python": Task("python", num_tokens=256, width=128, num_blocks=4, rate=1e-3),
}


@cache
def corpus(name: str, data: Path) -> Tensor:
    if name == "shakespeare":
        return shakespeare.encode((data / "shakespeare" / shakespeare.FILE).read_text())
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in library.glob("*.py") if path.is_file())
    files += sorted(library.glob("[a-h]*/*.py"))
    text = b"".join(path.read_bytes() for path in files if path.parent.name not in ("test", "idlelib"))
    return torch.frombuffer(bytearray(text[:PYTHON_BYTES]), dtype=torch.uint8)


def rows(text: Tensor, count: int, *, seed: int) -> tuple[Tensor]:
    """Windows of the text at places that the seed draws."""
    draw = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(text) - CONTEXT - 1, (count,), generator=draw)
    return (text[starts[:, None] + torch.arange(CONTEXT + 1)],)


def next_token_loss(model: nn.Module, batch: Any) -> Tensor:
    tokens = batch[0].long()
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def factor(tick: int, *, steps: int) -> float:
    warm_up = WARM_UP * steps
    return min(1.0, (tick + 1) / warm_up) * 0.5 * (1 + math.cos(math.pi * min(1.0, tick / steps)))


def schedule(optimizer: torch.optim.Optimizer, *, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, partial(factor, steps=steps))


def recipe(task: Task, data: Path, *, steps: int, seed: int, **options: Any) -> Recipe:
    """`steps` batches of all replicas together."""
    text = corpus(task.corpus, data)
    edge = len(text) - len(text) // HELD_OUT
    model = partial(Gpt2, num_tokens=task.num_tokens, width=task.width, num_heads=4, num_blocks=task.num_blocks)
    return Recipe(
        model=model,
        optimizer=partial(torch.optim.AdamW, lr=task.rate, weight_decay=0.1),
        scheduler=partial(schedule, steps=steps),
        step=next_token_loss,
        dataset=rows(text[:edge], steps * BATCH, seed=seed + 10),
        batch_size=BATCH,
        steps=steps,
        max_grad_norm=1.0,
        evaluate=next_token_loss,
        eval_dataset=rows(text[edge:], NUM_EVALUATED, seed=5),
        seed=seed,
        **options,
    )


def interval(differences: list[float]) -> str:
    """Mean and half of the 95 % interval by Student's t."""
    count = len(differences)
    mean = sum(differences) / count
    if count < 2:
        return f"{mean:+.4f}"
    spread = math.sqrt(sum((each - mean) ** 2 for each in differences) / (count - 1) / count)
    return f"{mean:+.4f} ± {STUDENT[count - 1] * spread:.4f}"
