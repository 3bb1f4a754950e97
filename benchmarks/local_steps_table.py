"""The tables of local_steps_gpt.py: losses and, against runs of the fast device alone, gains in time."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from local_steps_runs import LIMIT

SEED_OF_RATES = 99
"""Finds the rate, and is not reported otherwise."""
STUDENT = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571}
"""Student's t, 97.5 %, by number of values."""


def table(path: Path) -> None:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        if row["kind"] == "setup":
            print(json.dumps(row), end="\n\n")
    for error in [row for row in rows if "error" in row]:
        print(f"failed: {json.dumps(error)}\n")
    done = [row for row in rows if "loss" in row]
    _rates([row for row in done if row["seed"] == SEED_OF_RATES])
    own = [row for row in done if row["seed"] != SEED_OF_RATES]
    alone = _runs_alone([row for row in own if row["kind"] == "alone"])
    _gains([row for row in own if row["kind"] != "alone"], alone)


def _rates(rows: Sequence[dict[str, Any]]) -> None:
    print("| rate | loss, the fast device alone, one seed that is not used below |\n| ---: | ---: |")
    for row in sorted(rows, key=lambda row: row["rate"]):
        print(f"| {row['rate']:g} | {_number(row['loss'])} |")


def _runs_alone(rows: Sequence[dict[str, Any]]) -> dict[int, dict[float, float]]:
    """Print the losses of the fast device alone; returns them by seed and length."""
    alone: dict[int, dict[float, float]] = {}
    for row in rows:
        if row["loss"] is not None:
            alone.setdefault(row["seed"], {})[row["length"]] = row["loss"]
    print("\n| the fast device alone, length in T | n | loss |\n| ---: | ---: | ---: |")
    for length in sorted({length for own in alone.values() for length in own}):
        losses = [own[length] for own in alone.values() if length in own]
        print(f"| {length:g} | {len(losses)} | {interval(losses, 4)} |")
    return alone


COLUMNS = (
    "",
    "window",
    "n",
    "loss",
    "− alone for as long",
    f"gain in time (limit {LIMIT:g})",
    "worth of a sample",
    "time, in T",
    "averages",
)


def _gains(rows: Sequence[dict[str, Any]], alone: dict[int, dict[float, float]]) -> None:
    print("\n| " + " | ".join(COLUMNS) + " |\n| --- | ---: |" + " ---: |" * (len(COLUMNS) - 2))
    exact = [own[LIMIT] - own[1.0] for own in alone.values() if LIMIT in own and 1.0 in own]
    if exact:
        losses = [own[LIMIT] for own in alone.values() if LIMIT in own]
        print(
            f"| exact sharing | – | {len(exact)} | {interval(losses, 4)} | {interval(exact, 4)} | {LIMIT:g} | 1 | 1 | |"
        )
    for label, window in dict.fromkeys((_label(row), row["window"]) for row in rows):
        own = [row for row in rows if (_label(row), row["window"]) == (label, window) and row["seed"] in alone]
        good = [row for row in own if row["loss"] is not None]
        if len(good) < len(own) or not own:
            print(f"| {label} | {window or '–'} | {len(own)} | diverged in {len(own) - len(good)} | | | | | |")
            continue
        times = [row["time"] / row["ticks"] for row in own]
        reached = [_time_alone(alone[row["seed"]], row["loss"]) for row in own]
        same = [row["loss"] - _loss_alone(alone[row["seed"]], t) for row, t in zip(own, times, strict=True)]
        sign = _bound(alone, own)
        cells = [
            label,
            str(window or "–"),
            str(len(own)),
            interval([row["loss"] for row in own], 4),
            interval(same, 4),
            sign + interval([one / t for one, t in zip(reached, times, strict=True)], 2),
            sign + interval([one * row["ticks"] / row["batches"] for one, row in zip(reached, own, strict=True)], 2),
            f"{np.mean(times):.3f}",
            f"{np.mean([row['averages'] for row in own]):.0f}",
        ]
        print("| " + " | ".join(cells) + " |")


def _label(row: dict[str, Any]) -> str:
    kind = row["kind"]
    words = [{"late": "shared steps, gradients one step late", "delayed": "delayed Nesterov"}.get(kind, f"`{kind}`")]
    if kind == "async":
        words.append("averages half a window late")
    if row["momentum"] is not None:
        words.append(("" if kind == "delayed" else "outer Nesterov, ") + f"momentum {row['momentum']}")
    words += [f"outer rate {row['outer_rate']:g}"] if row["outer_rate"] != 1 else []
    words += ["AdamW's state averaged"] if row["averages_state"] else []
    words += [f"rate × {row['rate']:g}"] if row["rate"] != 1 else []
    if row.get("target") is not None:
        words.append(f"averages take {row['cost']:g} steps, at most {row['target']:.0%} of the time")
    return ", ".join(words)


def _time_alone(alone: dict[float, float], loss: float) -> float:
    """How long the fast device alone trains to this loss, in T; straight between runs, and at most the longest."""
    lengths = sorted(alone)
    # Falling losses: a longer run that ended worse counts like the shorter one before it.
    losses = np.minimum.accumulate([alone[length] for length in lengths])
    return float(np.interp(-loss, -losses, lengths))


def _loss_alone(alone: dict[float, float], length: float) -> float:
    lengths = sorted(alone)
    return float(np.interp(length, lengths, [alone[one] for one in lengths]))


def _bound(alone: dict[int, dict[float, float]], rows: Sequence[dict[str, Any]]) -> str:
    """A sign for values at the ends of the runs alone."""
    if any(row["loss"] > max(alone[row["seed"]].values()) for row in rows):
        return "≤ "
    return "≥ " if any(row["loss"] < min(alone[row["seed"]].values()) for row in rows) else ""


def _number(value: float | None) -> str:
    return "diverged" if value is None else f"{value:.4f}"


def interval(values: Sequence[float], digits: int) -> str:
    """The mean, and of several values half of the 95 % interval of Student's t."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return f"{mean:.{digits}f}"
    half = STUDENT[len(values)] * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return f"{mean:.{digits}f} ± {half:.{digits}f}"
