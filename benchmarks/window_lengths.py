"""What short windows bring: loss and time with windows of 20 batches and up, and with tuned ones.

`run` trains one device and a pair of devices for 100, 1,000 and 10,000 steps of the fast device: in the lab at speeds 1
and 0.4, or with `--devices` for real, seed by seed, longest runs first. A fixed random network labels the data of
`classifier`, so that no sample is seen twice; `gpt` and `gpt-small` learn the bytes of `local_steps_gpt.py corpus`.
Learning rates are those of TASKS, the same for all settings. One JSON line per run. `table` compares with one device
that trains for the same time, straight between its runs; what lies beyond them is marked.

    python benchmarks/window_lengths.py run lab.jsonl --tasks classifier
    python benchmarks/window_lengths.py run cpu.jsonl --tasks gpt-small --corpus carry/python_bytes.npz --devices cpu,cpu@0.4
    python benchmarks/window_lengths.py run gpu.jsonl --tasks gpt --corpus carry/python_bytes.npz --devices cuda:0%60,cuda:0%25
    python benchmarks/window_lengths.py table gpu.jsonl
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import outrider
from outrider.bench.models.text_models import Gpt2, next_symbol_loss
from outrider.replica.recipe import Recipe
from outrider.virtual.lab import Bench, train

SPEEDS = (1.0, 0.4)
"""In the lab; real devices have their own."""
AVERAGE_COST = 0.25
"""Of an average in the lab, in batches of the fast device."""
WIDTH, CLASSES = 32, 10
LONGER = 1.4
"""What both devices do in the time in which the fast one does 1; on real devices about."""
SETTINGS: dict[str, dict[str, Any]] = {
    "one device": {"is_alone": True},
    f"one device, {LONGER:g} times as long": {"is_alone": True, "longer": LONGER},
    "cadence, 20 and up": {"policy": "cadence", "min_anchor": 20, "longer": LONGER},
    "cadence, tuned": {"policy": "cadence", "longer": LONGER},
    "async, 20 and up": {"policy": "async", "min_anchor": 20, "longer": LONGER},
    "async, tuned": {"policy": "async", "longer": LONGER},
}
STUDENT = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
"""Student's t, 97.5 %, by number of values."""


# The tasks


def teacher_data(num_samples: int, seed: int) -> tuple[Tensor, ...]:
    """Inputs, and labels drawn from the probabilities of a fixed network."""
    weights = torch.Generator().manual_seed(1)
    hidden, out = torch.randn(WIDTH, 64, generator=weights), torch.randn(64, CLASSES, generator=weights)
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_samples, WIDTH, generator=draw)
    logits = torch.tanh(inputs @ hidden / WIDTH**0.5) @ out
    return inputs, torch.multinomial(logits.softmax(1), 1, generator=draw).squeeze(1)


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 128), nn.Tanh(), nn.Linear(128, CLASSES))


def class_loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


@cache
def text_part(path: Path, part: str) -> Tensor:
    with np.load(path) as parts:
        return torch.from_numpy(parts[part])


def text_data(num_samples: int, seed: int, *, path: Path, part: str, context: int) -> tuple[Tensor, ...]:
    """Windows at places that the seed draws."""
    text, draw = text_part(path, part), torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(text) - context - 1, (num_samples,), generator=draw)
    return (text[starts[:, None] + torch.arange(context + 1)],)


def warm_up_and_cosine(optimizer: torch.optim.Optimizer, *, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    def factor(tick: int) -> float:
        return min(1.0, (tick + 1) / (0.05 * steps)) * 0.5 * (1 + math.cos(math.pi * min(1.0, tick / steps)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def cosine(optimizer: torch.optim.Optimizer, *, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


@dataclass(frozen=True, kw_only=True)
class Task:
    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor]
    optimizer: Callable[..., torch.optim.Optimizer]
    rate: float
    batch_size: int
    num_evaluated: int
    schedule: Callable[..., torch.optim.lr_scheduler.LRScheduler]
    context: int = 0
    """Of a text; 0 for the classifier."""
    options: dict[str, Any] = field(default_factory=dict)

    def data(self, num_samples: int, *, seed: int, part: str, corpus: Path | None) -> tuple[Tensor, ...]:
        if not self.context:
            return teacher_data(num_samples, seed)
        if corpus is None:
            raise SystemExit("pass --corpus, which `local_steps_gpt.py corpus` writes")
        return text_data(num_samples, seed, path=corpus, part=part, context=self.context)


_TEXT = partial(
    Task,
    loss=next_symbol_loss,
    optimizer=partial(torch.optim.AdamW, weight_decay=0.1),
    schedule=warm_up_and_cosine,
    num_evaluated=2_048,
)
# gpt-small has the best of 2, 4, 8 and 16e-3 for one device, 100 and 1,000 steps, seed 7; the others were not tuned.
TASKS = {
    "classifier": Task(
        model=classifier,
        loss=class_loss,
        optimizer=torch.optim.Adam,
        rate=3e-3,
        batch_size=32,
        num_evaluated=20_000,
        schedule=cosine,
    ),
    "gpt-small": _TEXT(
        model=partial(Gpt2, num_tokens=256, width=64, num_heads=2, num_blocks=2),
        rate=2e-3,
        batch_size=8,
        context=32,
        options={"max_grad_norm": 1.0},
    ),
    "gpt": _TEXT(
        model=partial(Gpt2, num_tokens=256, width=256, num_heads=4, num_blocks=4),
        rate=2e-3,
        batch_size=32,
        context=128,
        options={"max_grad_norm": 1.0, "precision": "bf16"},
    ),
}


# Runs


@dataclass(frozen=True, kw_only=True)
class Wish:
    """One run; `steps` of the fast device are the time, and `longer` is what all devices do in it."""

    task: str
    setting: str
    steps: int
    seed: int
    corpus: Path | None
    devices: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        return round(self.steps * SETTINGS[self.setting].get("longer", 1.0))

    @property
    def is_alone(self) -> bool:
        return "is_alone" in SETTINGS[self.setting]

    def options(self) -> dict[str, Any]:
        task, setting = TASKS[self.task], SETTINGS[self.setting]
        return {
            "model": task.model,
            "optimizer": partial(task.optimizer, lr=task.rate),
            "scheduler": partial(task.schedule, steps=self.total),
            "step": task.loss,
            "dataset": task.data(self.total * task.batch_size, seed=self.seed + 10, part="train", corpus=self.corpus),
            "batch_size": task.batch_size,
            "steps": self.total,
            "evaluate": task.loss,
            "eval_dataset": task.data(task.num_evaluated, seed=5, part="test", corpus=self.corpus),
            "seed": self.seed,
            **task.options,
            **{name: setting[name] for name in ("policy", "min_anchor") if name in setting},
        }


def run_for_real(wish: Wish) -> dict[str, Any]:
    devices = list(wish.devices[:1] if wish.is_alone else wish.devices)
    with tempfile.TemporaryDirectory(prefix="outrider-") as folder:
        run_dir = Path(folder) / "run"
        trained = outrider.train(
            **wish.options(),
            devices=devices,
            threads_per_rank=1,
            run_dir=run_dir,
            quiet=True,
            timeout_s=120.0,
        )
        trained.join()
        events = json.loads((run_dir / "timeline.json").read_text())["events"]
    epochs = trained.epochs
    return {
        "loss": epochs[-1].eval,
        "time": sum(epoch.seconds for epoch in epochs),
        "averages": sum(epoch.averages for epoch in epochs),
        "shares": [round(share, 3) for share in epochs[-1].share_by_rank],
        "execution": [event["value"] for event in events if event["kind"] == "execution"],
        "anchors": spread(event["anchor"] for event in events if event["kind"] == "plan"),
    }


def run_in_lab(wish: Wish) -> dict[str, Any]:
    """In virtual time; its unit is a step of the fast device."""
    speeds = SPEEDS[:1] if wish.is_alone else SPEEDS
    result = train(Recipe(**wish.options()), Bench(speeds=speeds, average_cost=AVERAGE_COST))
    return {
        "loss": result.points[-1].eval,
        "time": result.points[-1].time,
        "averages": result.averages,
        "shares": [round(own / sum(result.samples_by_rank), 3) for own in result.samples_by_rank],
        "anchors": spread(decision.details["anchor"] for decision in result.decisions if decision.kind == "plan"),
    }


def spread(anchors: Iterable[int]) -> list[int]:
    """The smallest, the median and the largest of all windows."""
    ordered = sorted(anchors)
    return [ordered[0], ordered[len(ordered) // 2], ordered[-1]] if ordered else []


def run(wishes: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    deadline_s = time.monotonic() + wishes.limit_s
    devices = tuple(wishes.devices.split(",")) if wishes.devices else ()
    order = [(task, steps) for task in wishes.tasks for steps in sorted(wishes.steps, reverse=True)]
    for task, steps in order:
        for number, seed in enumerate(wishes.seeds):
            names = list(SETTINGS)
            # Settings take turns, so that none is always the first.
            for name in names[number % len(names) :] + names[: number % len(names)]:
                if time.monotonic() > deadline_s:
                    return
                wish = Wish(task=task, setting=name, steps=steps, seed=seed, corpus=wishes.corpus, devices=devices)
                write(wishes.path, wish, measured(wish))


def measured(wish: Wish) -> dict[str, Any]:
    began_s = time.monotonic()
    try:
        result = run_for_real(wish) if wish.devices else run_in_lab(wish)
    except Exception as error:
        # The other runs are worth having; the table names this one.
        result = {"error": f"{type(error).__name__}: {error}"[:500]}
    return {**result, "whole_s": round(time.monotonic() - began_s, 2)}


def write(path: Path, wish: Wish, result: dict[str, Any]) -> None:
    facts = {"task": wish.task, "rate": TASKS[wish.task].rate, "torch": torch.__version__}
    place = {
        "setting": wish.setting,
        "steps": wish.steps,
        "seed": wish.seed,
        "devices": ",".join(wish.devices) or "lab",
    }
    line = json.dumps({**facts, **place, **result})
    with path.open("a") as file:
        file.write(line + "\n")
    print(line, flush=True)


# The table


COLUMNS = (
    "task, devices",
    "steps",
    "",
    "n",
    "loss",
    "− one device for the same time",
    "time ÷ one device's",
    "averages",
    "gain in time",
)


def table(paths: Sequence[Path]) -> None:
    rows = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    for row in rows:
        if "error" in row:
            print(f"failed: {json.dumps(row)}\n")
    rows = [row for row in rows if "error" not in row]
    print("| " + " | ".join(COLUMNS) + " |\n| --- | ---: | --- |" + " ---: |" * (len(COLUMNS) - 3))
    groups = dict.fromkeys((row["task"], row["devices"], row["steps"]) for row in rows)
    for task, devices, steps in sorted(groups):
        own = [row for row in rows if (row["task"], row["devices"], row["steps"]) == (task, devices, steps)]
        for setting in SETTINGS:
            if cells := _cells(setting, own):
                print(f"| {task}, `{devices}` | {steps:,} | {setting} | " + " | ".join(cells) + " |")


def _cells(setting: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    """The cells of a row; only seeds with both runs of one device count."""
    alone = {
        seed: sorted(
            (row["time"], row["loss"]) for row in rows if row["seed"] == seed and "one device" in row["setting"]
        )
        for seed in {row["seed"] for row in rows}
    }
    own = [row for row in rows if row["setting"] == setting and len(alone[row["seed"]]) == 2]
    if not own:
        return []
    curves = [alone[row["seed"]] for row in own]
    same = [row["loss"] - _loss_at(row["time"], curve) for row, curve in zip(own, curves, strict=True)]
    times = [row["time"] / curve[0][0] for row, curve in zip(own, curves, strict=True)]
    gains = [_time_to(row["loss"], curve) / row["time"] for row, curve in zip(own, curves, strict=True)]
    is_alone = "one device" in setting
    return [
        str(len(own)),
        interval([row["loss"] for row in own], 4),
        "" if is_alone else interval(same, 4),
        interval(times, 3),
        "" if is_alone else f"{np.mean([row['averages'] for row in own]):,.0f}",
        "" if is_alone else _bound(own, curves) + interval(gains, 2),
    ]


Curve = Sequence[tuple[float, float]]
"""Time and loss of the runs of one device, the shorter one first."""


def _loss_at(time_s: float, curve: Curve) -> float:
    return float(np.interp(time_s, [point[0] for point in curve], [point[1] for point in curve]))


def _time_to(loss: float, curve: Curve) -> float:
    return float(np.interp(-loss, [-point[1] for point in curve], [point[0] for point in curve]))


def _bound(rows: Sequence[dict[str, Any]], curves: Sequence[Curve]) -> str:
    """A sign for gains at the ends of the runs of one device."""
    if any(row["loss"] > curve[0][1] for row, curve in zip(rows, curves, strict=True)):
        return "≤ "
    return "≥ " if any(row["loss"] < curve[1][1] for row, curve in zip(rows, curves, strict=True)) else ""


def interval(values: Sequence[float], digits: int) -> str:
    """The mean, and of several values half of the 95 % interval of Student's t."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return f"{mean:.{digits}f}"
    half = STUDENT[len(values)] * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return f"{mean:.{digits}f} ± {half:.{digits}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("path", type=Path)
    running.add_argument("--tasks", nargs="+", choices=TASKS, default=["classifier"])
    running.add_argument("--corpus", type=Path)
    running.add_argument("--devices", default="", help="train for real, on a pair such as cpu,cpu@0.4")
    running.add_argument("--steps", type=int, nargs="+", default=[100, 1_000, 10_000])
    running.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    running.add_argument("--limit-s", type=float, default=math.inf, help="start no run after so many seconds")
    commands.add_parser("table").add_argument("paths", type=Path, nargs="+")
    wishes = parser.parse_args()
    if wishes.command == "run":
        run(wishes)
    else:
        table(wishes.paths)


if __name__ == "__main__":
    main()
