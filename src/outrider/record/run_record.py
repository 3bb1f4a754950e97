"""The record of a run: everything needed to report, compare and reproduce it.

Decides the content of `record.json`; reports and diffs read nothing else. Called by rank 0, or by the starter.
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
from outrider.record import run_config as configs
from outrider.record.run_config import RunConfig
from outrider.record.run_folder import SCHEMA_VERSION, RunFolder
from outrider.record.run_forecast import receipt
from outrider.replica import recipe as recipes
from outrider.replica.recipe import LoopRecipe
from outrider.timeline.timeline_files import read_record


class Recorded(Protocol):
    """The facts of a run that its record contains."""

    recipe: LoopRecipe
    config: RunConfig
    backend: str
    devices: tuple[str, ...]
    started_at: str
    commit: str | None
    history: list[dict[str, Any]]
    resumed_from: str | None
    loop_options: dict[str, Any]

    @property
    def num_samples(self) -> int: ...

    @property
    def parameters(self) -> int: ...


def environment() -> dict[str, Any]:
    """Versions and hardware on which the numbers depend."""
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
    """The UUID of a CUDA device, because NVML and CUDA number devices differently."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else None


def commit() -> str | None:
    """The git commit of the working folder; None without one."""
    try:
        answer = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None


def write_record(folder: RunFolder, run: Recorded, *, status: str) -> None:
    """Write the record: at the start, every few seconds (see `EpochLog`) and at the end."""
    told = totals(run.history)
    forecast = receipt(folder, told)
    folder.write_json(
        "record.json",
        {
            "schema_version": SCHEMA_VERSION,
            "status": status,
            "started_at": run.started_at,
            "policy": run.recipe.policy_spec.name,
            "backend": run.backend,
            "devices": run.devices,
            "resumed_from": run.resumed_from,
            "num_samples": run.num_samples,
            "parameters": run.parameters,
            "options": recipes.settings(run.recipe) | configs.settings(run.config) | run.loop_options,
            "environment": environment(),
            "commit": run.commit,
            "epochs": run.history,
            "totals": told,
            **({} if forecast is None else {"forecast": forecast}),
        },
    )


def status_at_end(*, is_complete: bool, is_interrupted: bool) -> str:
    """The status of a run that ended regularly."""
    if is_complete:
        return "finished"
    return "interrupted" if is_interrupted else "stopped"


def close_record(folder: RunFolder, *, status: str, error: OutriderError | None = None) -> None:
    """Record the status of a run that could not do so itself: failed, interrupted, or closed by its program."""
    record = read_record(folder.path) or _record_of_nothing(folder)
    record["totals"] = totals(record["epochs"])
    told = error and {"type": type(error).__name__, "message": error.message, "rank": error.rank, "step": error.step}
    # A full disk may itself be the reason; the failed write must not hide that.
    with contextlib.suppress(DataError):
        folder.write_json("record.json", {**record, "status": status, "error": told})


def _record_of_nothing(folder: RunFolder) -> dict[str, Any]:
    """A record for a run that ended before its first record, from its configuration."""
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
    """Totals over all epochs; throughput is per training time, without evaluation."""
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


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
