"""What is a sample worth under local steps? Runs the cells of a declared grid in virtual time, most informative first.

A cell has the same result on every machine. Small models run as a stack (learning_stack.py), larger ones in the lab.
One JSON line per finished cell; cells that are in the output file already are skipped. learning_fit.py reads them, and
docs/results/learning has the results.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from learning_grid import Cell, jobs
from learning_stack import Stack, StackRun, StackTask, mlp_gradient
from torch import Tensor, nn
from torch.nn import functional

from outrider.average.outer import Outer
from outrider.bench.datasets import cifar10, mnist, shakespeare
from outrider.bench.models.image_models import bytes_cross_entropy_step, cross_entropy_step, lenet, mlp, resnet
from outrider.bench.models.text_models import CharRnn, Gpt, char_rnn, gpt_nano, next_symbol_loss
from outrider.bench.zoo import tenth_at_half_and_three_quarters, warm_up_and_cosine_factor, warm_up_then_cosine
from outrider.policy import Average, Lease, PolicySpec, SegmentContext, Step
from outrider.policy.effects import Policy
from outrider.replica.recipe import Recipe
from outrider.virtual.lab import Bench, train

POINTS = 5
"""Evaluations of a run with local steps; each ends a window, so they are few."""
FINE_POINTS = 20
"""The same for the remedies "fine" and "phases", whose windows change more often."""
SOLO_POINTS = 30
NUM_EVALUATED = 2_000
SPEEDS = {"solo": (1.0,), "pair0.4": (1.0, 0.4), "pair0.8": (1.0, 0.8), "trio": (1.0, 0.5, 0.25), "quad": (1.0,) * 4}


def tiny_mlp() -> nn.Module:
    """The suite's mlp, an eighth as wide, for images of 14 × 14 (6,634 parameters)."""
    return nn.Sequential(nn.Flatten(), nn.Linear(196, 32), nn.ReLU(), nn.Linear(32, 10))


def tiny_gpt() -> nn.Module:
    """gpt-nano at a quarter of its width and half its depth (33,825 parameters), without dropout."""
    return Gpt(width=32, num_heads=4, num_blocks=2, feed_forward=128, dropout=0.0)


def _tenth_twice(tick: int, *, num_steps: int) -> float:
    """The suite's schedule for ResNets."""
    return 0.1 ** ((tick >= num_steps // 2) + (tick >= num_steps * 3 // 4))


_MLP = partial(
    StackTask,
    model=tiny_mlp,
    loss=cross_entropy_step,
    gradient=mlp_gradient,
    data="mnist14",
    batch_size=32,
    batches=1_000,
)
_GPT = partial(StackTask, model=tiny_gpt, loss=next_symbol_loss, data="text", batch_size=8, batches=400)
STACKED = {
    "mlp-adam": _MLP(optimizer="adam", rate=8e-3),
    "mlp-adam-b8": _MLP(optimizer="adam", rate=8e-3, batch_size=8),
    "mlp-adam-long": _MLP(optimizer="adam", rate=8e-3, batch_size=8, batches=4_000),
    "mlp-adamw": _MLP(optimizer="adamw", rate=8e-3, weight_decay=0.1, schedule=warm_up_and_cosine_factor),
    "mlp-sgd": _MLP(optimizer="sgd", rate=0.1),
    "mlp-sgd-steps": _MLP(optimizer="sgd", rate=0.1, schedule=_tenth_twice),
    "mlp-rmsprop": _MLP(optimizer="rmsprop", rate=8e-3),
    "gpt-adamw": _GPT(
        optimizer="adamw", rate=1e-2, weight_decay=0.01, schedule=warm_up_and_cosine_factor, max_grad_norm=1.0
    ),
    "gpt-adam": _GPT(optimizer="adam", rate=4e-3),
}
"""Rates are the best of one device alone among powers of two, see docs/results/learning."""


@dataclass(frozen=True, kw_only=True)
class LabTask:
    """A model of the suite, too large or with buffers: it runs in the lab."""

    model: Callable[[], nn.Module]
    optimizer: Callable[..., torch.optim.Optimizer]
    rate: float
    data: str
    batch_size: int
    batches: int
    loss: Callable[[nn.Module, Any], Tensor] = cross_entropy_step
    schedule: Callable[[int], Any] | None = None
    max_grad_norm: float | None = None


_TEXT = partial(LabTask, data="text", loss=next_symbol_loss, batch_size=16)
_RESNET = partial(
    LabTask,
    data="cifar16",
    loss=bytes_cross_entropy_step,
    batch_size=16,
    batches=400,
    optimizer=partial(torch.optim.SGD, momentum=0.9, weight_decay=1e-4),
    rate=0.1,
    schedule=tenth_at_half_and_three_quarters,
)
IN_LAB = {
    "lab-mlp-adam": LabTask(model=mlp, optimizer=torch.optim.Adam, rate=1e-3, data="mnist", batch_size=32, batches=500),
    "lab-lenet-adam": LabTask(
        model=lenet, optimizer=torch.optim.Adam, rate=1e-3, data="mnist", batch_size=16, batches=300
    ),
    "lab-rnn-rmsprop": _TEXT(
        model=partial(CharRnn, width=32, hidden=64, num_layers=2, dropout=0.0),
        optimizer=torch.optim.RMSprop,
        rate=2e-3,
        batches=400,
        max_grad_norm=5.0,
    ),
    "lab-char-rnn": _TEXT(model=char_rnn, optimizer=torch.optim.RMSprop, rate=2e-3, batches=300, max_grad_norm=5.0),
    "lab-resnet8-sgd": _RESNET(model=partial(resnet, 8)),
    "lab-resnet20-sgd": _RESNET(model=partial(resnet, 20)),
    "lab-gpt-nano": _TEXT(
        model=gpt_nano, optimizer=torch.optim.Adam, rate=1e-3, batches=150, schedule=warm_up_then_cosine
    ),
    "mlp-adam": LabTask(
        model=tiny_mlp, optimizer=torch.optim.Adam, rate=8e-3, data="mnist14", batch_size=32, batches=1_000
    ),
    "mlp-sgd": LabTask(
        model=tiny_mlp,
        optimizer=partial(torch.optim.SGD, momentum=0.9),
        rate=0.1,
        data="mnist14",
        batch_size=32,
        batches=1_000,
    ),
}


# Windows: which rank takes which batch, and where the ranks average.


def plan(speeds: Sequence[float], window: float, remedy: str, batches: int, segments: int) -> list[list[list[int]]]:
    """Per segment and window the rank of each batch, in the order in which batches would be finished.

    A rank whose batch takes longer than a window takes no step in some windows, and then begins its next one at the
    last average: slightly better than a real run, where it would have begun earlier.
    """
    events = sorted(((k + 1) / speed, rank) for rank, speed in enumerate(speeds) for k in range(batches))[:batches]
    planned = []
    for number in range(segments):
        first, last = (batches * edge // segments for edge in (number, number + 1))
        if number < exact_segments(remedy):
            planned.append([[0] for _ in range(first, last)])
            continue
        start = events[first - 1][0] if first else 0.0
        length = windowed(window, remedy, (number + 0.5) / segments)
        planned.append(_cut(events[first:last], start, length))
    return planned


def _cut(events: Sequence[tuple[float, int]], start: float, length: float) -> list[list[int]]:
    """Equal windows of about this length, from the start to the last event."""
    end = events[-1][0]
    num_windows = max(1, round((end - start) / length))
    windows: list[list[int]] = [[] for _ in range(num_windows)]
    for time, rank in events:
        place = math.ceil((time - start) / (end - start) * num_windows - 1e-6) - 1
        windows[max(0, min(num_windows - 1, place))].append(rank)
    return [window for window in windows if window]


def windowed(window: float, remedy: str, progress: float) -> float:
    """Schedules with as many averages as constant windows: shorter windows in one half of the run."""
    if "early" in remedy:
        return window * (0.625 if progress < 0.5 else 2.5)
    if "late" in remedy:
        return window * (2.5 if progress < 0.5 else 0.625)
    if "phases" in remedy:
        # The last fifth of each phase of a rate that falls at half and three quarters; here averages are more.
        is_end = any(end - part / 5 < progress < end for end, part in ((0.5, 0.5), (0.75, 0.25), (1.0, 0.25)))
        return window / 4 if is_end else window
    return window


def exact_segments(remedy: str) -> int:
    return 1 if "warmup" in remedy else 0


# Remedies are words joined by "+".


def effective_ranks(speeds: Sequence[float]) -> float:
    return sum(speeds) ** 2 / sum(speed**2 for speed in speeds)


def momentum_of(remedy: str, speeds: Sequence[float]) -> float:
    """Of the outer step: "outer" follows the ranks, "outer0.3" is fixed, "bold" as in `cadence`."""
    concentration = 1 / effective_ranks(speeds)
    for word in remedy.split("+"):
        if word == "bold":
            return max(1 - concentration, min(0.75, 1 - concentration**2))
        if word.startswith(("outer", "delayed")):
            given = word.removeprefix("outer").removeprefix("delayed")
            return float(given) if given else 1 - concentration
    return 0.0


def rate_of(remedy: str, speeds: Sequence[float]) -> float:
    words = remedy.split("+")
    return effective_ranks(speeds) ** (1.0 if "scale" in words else 0.5 if "root" in words else 0.0)


# Cells in a stack


def run_stack(cells: Sequence[Cell], folder: Path) -> Iterator[dict[str, Any]]:
    task, speeds = STACKED[cells[0].task], SPEEDS[cells[0].speeds]
    length = round(task.batches * cells[0].length)
    is_fine = cells[0].remedy.startswith("fine")
    segments = FINE_POINTS if is_fine else POINTS if len(speeds) > 1 else 10 if task.data == "text" else SOLO_POINTS
    runs = [stack_run(cell, speeds, length, segments) for cell in cells]
    data, evaluated = dataset(task.data, folder)
    stack = Stack(task, runs, data, length=length)
    points: list[list[list[float]]] = [[] for _ in cells]
    for number in range(segments):
        stack.run_segment(number)
        for cell, loss in enumerate(stack.evaluate(evaluated)):
            points[cell].append([length * (number + 1) // segments, _rounded(loss)])
    for cell, num_averages, curve in zip(cells, stack.num_averages, points, strict=True):
        yield {"key": cell.key, "averages": num_averages, "points": curve}


def stack_run(cell: Cell, speeds: Sequence[float], length: int, segments: int) -> StackRun:
    words = cell.remedy.split("+")
    return StackRun(
        seed=cell.seed,
        rate=cell.rate * rate_of(cell.remedy, speeds),
        windows=plan(speeds, cell.window or 1, cell.remedy, length, segments),
        momentum=momentum_of(cell.remedy, speeds),
        period=4 if any(word.startswith("delayed") for word in words) else 1,
        averages_state="state" in words,
        weight_power=2.0 if "weigh" in words else 1.0,
        delay=next((int(word[-1]) for word in words if word.startswith("lag")), 0),
        is_behind="behind" in words,
        exact_segments=exact_segments(cell.remedy),
    )


# Cells in the lab


def windows_policy(windows: Sequence[Sequence[Sequence[int]]]) -> PolicySpec:
    """A policy with the windows of a plan."""
    opened: dict[int, int] = {}

    def open_segment(segment: SegmentContext) -> Policy:
        rank = segment.seat.rank
        opened[rank] = opened.get(rank, -1) + 1
        return _local_steps(segment, windows[opened[rank]])

    return PolicySpec(name="study_windows", open=open_segment, blocks_at_averages=True)


def _local_steps(segment: SegmentContext, windows: Sequence[Sequence[int]]) -> Policy:
    seat, span = segment.seat, segment.span
    batches = Lease(span.start, span.count).batches(seat.batch_size)
    for window in windows:
        samples = 0
        for owner, batch in zip(window, batches, strict=False):
            if owner == seat.rank:
                samples += batch.count
                yield Step(batch, at=batch.start)
        yield Average(samples=samples)


def run_lab(cell: Cell, folder: Path) -> dict[str, Any]:
    task, speeds = IN_LAB[cell.task], SPEEDS[cell.speeds]
    length = round(task.batches * cell.length)
    segments = SOLO_POINTS // 2 if len(speeds) == 1 else POINTS
    trained, evaluated = dataset(task.data, folder)
    momentum = momentum_of(cell.remedy, speeds)
    windows = plan(speeds, cell.window or 1, cell.remedy, length, segments)
    recipe = Recipe(
        model=task.model,
        optimizer=partial(task.optimizer, lr=task.rate * cell.rate * rate_of(cell.remedy, speeds)),
        step=task.loss,
        dataset=tuple(tensor[: length * task.batch_size] for tensor in trained),
        batch_size=task.batch_size,
        policy=windows_policy(windows) if cell.window else "cadence",
        evaluate=task.loss,
        eval_dataset=tuple(tensor[: 500 if cell.task.startswith("lab-") else None] for tensor in evaluated),
        scheduler=task.schedule(length) if task.schedule else None,
        max_grad_norm=task.max_grad_norm,
        outer=Outer(kind="nesterov", momentum=momentum) if momentum else Outer(),
        average_optimizer="state" in cell.remedy,
        seed=cell.seed,
    )
    result = train(recipe, Bench(speeds=speeds), points_per_epoch=segments)
    points = [[round(point.samples / task.batch_size, 1), _rounded(point.eval)] for point in result.points]
    return {"key": cell.key, "averages": result.averages, "points": points}


# Data


@cache
def dataset(name: str, folder: Path) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Training and evaluation data; "mnist14" and "cifar16" at half their size, text in windows of 33 symbols."""
    read, place = {
        "mnist": (mnist.read_part, "mnist"),
        "cifar": (cifar10.read_part, "cifar10"),
        "text": (shakespeare.read_part, "shakespeare"),
    }[name.rstrip("0123456789")]
    trained, evaluated = (_prepared(name, read(folder / place, part).tensors) for part in ("train", "test"))
    order = torch.randperm(len(trained[0]), generator=torch.Generator().manual_seed(0))
    return tuple(tensor[order] for tensor in trained), tuple(
        tensor[: 500 if name == "text" else NUM_EVALUATED] for tensor in evaluated
    )


def _prepared(name: str, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    if name == "text":
        windows = tensors[0]
        return (windows[:, : 33 * (windows.shape[1] // 33)].reshape(-1, 33),)
    if name == "mnist":
        return tuple(tensors)
    images, labels = tensors
    half = functional.avg_pool2d(images.float(), 2)
    return (half if name == "mnist14" else half.round().to(torch.uint8)), labels


def _rounded(loss: float | None) -> float | None:
    return round(loss, 4) if loss is not None and math.isfinite(loss) else None


def check(folder: Path) -> None:
    """Print the losses of the same cells in a stack and in the lab."""
    for task, remedy in (("mlp-adam", "plain"), ("mlp-adam", "state"), ("mlp-sgd", "outer")):
        cell = Cell(task=task, speeds="pair0.4", window=5, remedy=remedy, length=0.2)
        (stacked,) = run_stack([cell], folder)
        print(cell.key, "stack", stacked["points"], "lab", run_lab(cell, folder)["points"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with mnist, shakespeare and cifar10")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", default="", help="run only the jobs of the grid with this name")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no job after this time")
    parser.add_argument("--check", action="store_true", help="compare the stack with the lab instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.check:
        check(options.data)
        return
    start = monotonic()
    for job in jobs(options.only):
        done = {json.loads(line)["key"] for line in _lines(options.output)}
        cells = [cell for cell in job if cell.key not in done]
        if not cells or monotonic() - start > options.minutes * 60:
            continue
        is_stacked = cells[0].task in STACKED
        results = run_stack(cells, options.data) if is_stacked else (run_lab(cell, options.data) for cell in cells)
        for result in results:
            with options.output.open("a") as file:
                file.write(json.dumps(result, separators=(",", ":")) + "\n")


def _lines(path: Path) -> Iterable[str]:
    return path.read_text().splitlines() if path.exists() else ()


if __name__ == "__main__":
    main()
