"""The record of a run: enough to report, compare and reproduce it without the process that made it.

Decides what `record.json` holds; reports and diffs read nothing else.
"""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from outrider._version import __version__
from outrider.errors import DataError, OutriderError
from outrider.replica import recipe as recipes
from outrider.replica.recipe import Recipe
from outrider.runtime import config as configs
from outrider.runtime.config import RunConfig
from outrider.runtime.folder import SCHEMA_VERSION, RunFolder
from outrider.timeline.recorder import Event, merged


class Recorded(Protocol):
    """What a record needs to know of a run."""

    recipe: Recipe
    config: RunConfig
    backend: str
    devices: tuple[str, ...]
    started_at: str
    commit: str | None
    history: list[dict[str, Any]]

    @property
    def num_samples(self) -> int: ...


def environment() -> dict[str, Any]:
    """Versions and hardware that a number depends on."""
    return {
        "outrider": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "num_cores": os.cpu_count(),
        "threads_per_rank": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def gpu_uuid(device: torch.device) -> str | None:
    """The name by which NVML knows a CUDA device: the two count devices in different orders."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else None


def commit() -> str | None:
    """The commit of the folder the run was started in; None where there is none."""
    try:
        answer = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None


def write_record(folder: RunFolder, run: Recorded, *, status: str) -> None:
    """Written at the start and after every epoch, so that a run that dies leaves the epochs it finished."""
    folder.write_json(
        "record.json",
        {
            "schema_version": SCHEMA_VERSION,
            "status": status,
            "started_at": run.started_at,
            "policy": run.recipe.policy,
            "backend": run.backend,
            "devices": run.devices,
            "num_samples": run.num_samples,
            "options": recipes.settings(run.recipe) | configs.settings(run.config),
            "environment": environment(),
            "commit": run.commit,
            "epochs": run.history,
            "totals": totals(run.history),
        },
    )


def close_record(folder: RunFolder, *, status: str, error: OutriderError | None = None) -> None:
    """Say how a run ended that could not say so itself: failed, or closed by its program."""
    record = folder.read_json("record.json") or _record_of_nothing(folder)
    told = error and {"type": type(error).__name__, "message": error.message, "rank": error.rank, "step": error.step}
    # A disk that is full may be the very reason, and must not hide it.
    with contextlib.suppress(DataError):
        folder.write_json("record.json", {**record, "status": status, "error": told})


def _record_of_nothing(folder: RunFolder) -> dict[str, Any]:
    """For a run that ended before its first record; the configuration says what it was to be."""
    config = folder.read_json("config.json") or {"options": {}}
    return {
        "schema_version": SCHEMA_VERSION,
        "policy": config["options"].get("policy"),
        "backend": config.get("backend"),
        "devices": config.get("devices"),
        "options": config["options"],
        "environment": environment(),
        "commit": commit(),
        "epochs": [],
        "totals": totals([]),
    }


def totals(epochs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Over all epochs; throughput is of training time, evaluation excluded."""
    samples = sum(epoch["samples"] for epoch in epochs)
    seconds = sum(epoch["seconds"] for epoch in epochs)
    return {
        "samples": samples,
        "train_s": seconds,
        "samples_per_s": samples / seconds if seconds else None,
        "averages": sum(epoch["averages"] for epoch in epochs),
        "exposed_average_fraction": _weighted(epochs, "exposed_average_fraction", seconds),
        "wait_fraction": _weighted(epochs, "wait_fraction", seconds),
        "eval": epochs[-1]["eval"] if epochs else None,
    }


def _weighted(epochs: Sequence[dict[str, Any]], name: str, seconds: float) -> float | None:
    return sum(epoch[name] * epoch["seconds"] for epoch in epochs) / seconds if seconds else None


def write_timeline(folder: RunFolder, timelines: Sequence[Sequence[Event]]) -> None:
    folder.write_json("timeline.json", merged(timelines))


def write_schedule(folder: RunFolder, schedules: Sequence[Sequence[Any]]) -> None:
    """Per segment and rank, as the lab replays it."""
    by_segment = [list(ranks) for ranks in zip(*schedules, strict=True)]
    folder.write_json("schedule.json", {"schema_version": SCHEMA_VERSION, "segments": by_segment})


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
