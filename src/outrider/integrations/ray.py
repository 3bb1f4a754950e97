"""Outrider inside Ray Train: a session in the workers of a `TorchTrainer`, reported to Ray epoch by epoch.

Decides where a run keeps its checkpoints so that a restarted group of workers finds them, and what Ray is told. The
ranks, their process group and their restarts are Ray's. Imported by users only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

import ray.train
import torch.distributed as dist

from outrider.api.options import SessionOptions
from outrider.api.session import Session
from outrider.errors import ConfigError
from outrider.machine.devices import parse_devices
from outrider.record import checkpoint_files
from outrider.record.epoch_metrics import EpochMetrics

FOLDER = "outrider"
"""The run folder beside Ray's own checkpoints, in the storage of a Ray run."""
_LOCAL = "local"
_LEFT_OUT = ("logged", "share_by_rank", "peak_memory_bytes_by_rank")


class RaySession(Session):
    """A `Session` in the training function of a `ray.train.torch.TorchTrainer`; every worker is a rank.

    Its options are those of `Session`. Unless you pass others, it takes a checkpoint after every epoch
    (`checkpoint_every=1`) in a folder of Ray's storage, and goes on from the newest one (`resume="auto"`) after Ray has
    restarted the workers. One device in `devices` is the device of this worker. Every epoch is reported to Ray when it
    ends: its metrics, what you pass to `report()`, and on rank 0 the new checkpoint.
    """

    def __init__(self, **options: Unpack[SessionOptions]) -> None:
        super().__init__(**ray_options(**options))
        self._reported: Path | None = None
        self._added: dict[str, Any] = {}

    def open(self) -> Session:
        """Join the other workers; `with` does this."""
        _check_group()
        return super().open()

    def report(self, **metrics: Any) -> None:
        """Add values to the report of the present epoch; Ray uses those of rank 0."""
        self._added |= metrics

    def _end_epoch(self) -> None:
        # Every rank ends the same epochs, and Ray waits in its report until all workers have come.
        run = self._joined()
        ended_before = len(run.history)
        super()._end_epoch()
        if len(run.history) == ended_before or run.metrics is None:
            return
        run.await_checkpoint()
        added, self._added = self._added, {}
        self._reported = report_epoch(run.metrics, run_dir=self.run_dir, reported=self._reported, **added)


def ray_options(**options: Any) -> dict[str, Any]:
    """Options of `Session` or `train()` with Ray's run folder, checkpoints and restarts as defaults."""
    context = _context()
    given = {"checkpoint_every": 1, "resume": "auto", **options}
    is_own_folder = given.get("run_dir") is None
    run_dir = _run_dir(context.get_storage()) if is_own_folder else Path(given["run_dir"])
    reported = _reported_checkpoint() if given["resume"] == "auto" else None
    if reported is not None and _is_newer(reported, run_dir):
        given["resume"] = reported
        # The folder of another attempt may hold older checkpoints, which a run does not mix with its own.
        run_dir = run_dir.with_name(f"{run_dir.name}-from-{_name(reported)}") if is_own_folder else run_dir
    devices = given.get("devices", "auto")
    if devices != "auto" and len(parse_devices(devices)) == 1:
        # A worker does not know which rank it will be, but it knows its own device.
        given["devices"] = [str(parse_devices(devices)[0])] * context.get_local_world_size()
    return {**given, "run_dir": run_dir}


def report_epoch(
    metrics: EpochMetrics, *, run_dir: str | Path, reported: Path | None = None, **added: Any
) -> Path | None:
    """Report an epoch to Ray; every worker must call it. Returns the checkpoint that was last reported.

    Rank 0 adds the newest checkpoint of `run_dir`, unless it is the one `reported` before.
    """
    is_main = _context().get_world_rank() == 0
    newest = next(iter(checkpoint_files.whole(Path(run_dir))), None) if is_main else None
    is_new = newest is not None and newest != reported
    checkpoint = ray.train.Checkpoint.from_directory(str(newest)) if is_new else None
    ray.train.report({**as_ray_metrics(metrics), **added}, checkpoint=checkpoint)
    return newest


def as_ray_metrics(metrics: EpochMetrics) -> dict[str, Any]:
    """The metrics of an epoch as a flat dict: its numbers, the share of each rank, and logged scalars by name."""
    flat = {name: getattr(metrics, name) for name in EpochMetrics.__slots__ if name not in _LEFT_OUT}
    shares = {f"share_rank{rank}": share for rank, share in enumerate(metrics.share_by_rank)}
    return {**flat, **shares, **metrics.logged}


def _context() -> Any:
    try:
        return ray.train.get_context()
    except RuntimeError as error:
        raise ConfigError(
            "this process is no worker of Ray Train",
            hint="call it in the function that you pass to ray.train.torch.TorchTrainer",
        ) from error


def _check_group() -> None:
    """Without a process group every worker would train a model of its own."""
    num_workers = _context().get_world_size()
    if num_workers > 1 and not dist.is_initialized():
        raise ConfigError(
            f"Ray started {num_workers} workers without a process group of torch",
            hint="start them with ray.train.torch.TorchTrainer",
        )


def _run_dir(storage: Any) -> Path:
    """In the storage that all nodes share, if it is a file system; else in the working directory of this worker."""
    is_mounted = storage.storage_filesystem.type_name == _LOCAL
    return Path(storage.experiment_fs_path if is_mounted else storage.local_working_directory) / FOLDER


def _reported_checkpoint() -> Path | None:
    """The newest checkpoint that Ray knows, on a disk of this node."""
    reported = ray.train.get_checkpoint()
    if reported is None:
        return None
    is_mounted = reported.filesystem.type_name == _LOCAL
    path = Path(reported.path if is_mounted else reported.to_directory())
    # Without the state it was written by the user's own call of ray.train.report.
    return path if (path / checkpoint_files.STATE_FILE).is_file() else None


def _is_newer(reported: Path, run_dir: Path) -> bool:
    """Whether the run folder has no checkpoint, or an older one: it is that of a new node, or of an old attempt."""
    own = next(iter(checkpoint_files.whole(run_dir)), None)
    return own is None or _name(reported) > _name(own)


def _name(checkpoint: Path) -> str:
    """The name that Outrider gave to a checkpoint: epoch and samples of it, so that later ones sort behind."""
    state: Mapping[str, Any] = json.loads((checkpoint / checkpoint_files.STATE_FILE).read_text(encoding="utf-8"))
    return f"epoch{state['epoch']:05d}-{state['position']:012d}"
