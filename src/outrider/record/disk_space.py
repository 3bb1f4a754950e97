"""Handles full disks: checks free space early, and saves a model elsewhere if its folder is full.

Decides how much space a run needs, and the alternative place for a model. Called by the ranks at the start, before each
checkpoint and at the end.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from outrider.errors import ConfigError, DataError
from outrider.record.run_folder import RunFolder, save_model
from outrider.record.run_record import Recorded, write_record
from outrider.replica.portable_state import num_bytes
from outrider.replica.rank_replica import RankReplica
from outrider.world.messages import Link
from outrider.world.world import World

_HINT = "free some space there, or pass run_dir=another_folder"
_COPIES_KEPT = {"SGD": 1, "Adam": 2, "AdamW": 2}
"""Estimated state tensors per parameter of an optimizer."""


class _Run(Recorded, Protocol):
    """A run of `train()` or of a session."""

    link: Link
    folder: RunFolder
    world: World


def free_bytes(path: Path) -> int | None:
    """Free space for this user on the disk of a folder, which need not exist yet; None if unknown."""
    there = next((one for one in (path, *path.parents) if one.exists()), None)
    try:
        return None if there is None else shutil.disk_usage(there).free
    except OSError:
        return None


def in_units(size: float) -> str:
    """Format a number of bytes: 1.5 GB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1_000:
            return f"{size:.3g} {unit}"
        size /= 1_000
    return f"{size:.3g} TB"


def check_room(run: _Run, replica: RankReplica) -> None:
    """Check disk space at the start: raise if the model does not fit, warn if two checkpoints do not fit."""
    _refuse_other_state(replica.model)
    folder, world_size = run.folder, run.world.size
    free, size = free_bytes(folder.path), num_bytes(replica.model.state_dict())
    if free is None:
        return
    if free < size:
        raise DataError(f"{folder.path} has {in_units(free)} free, the model alone needs {in_units(size)}", hint=_HINT)
    # Every rank saves its optimizer state and the common point of averages; both belong to trained parameters.
    trained = sum(parameter.nbytes for parameter in replica.arena.parameters)
    copies = max(_COPIES_KEPT.get(type(one).__name__, 2) for one in replica.optimizers) + (1 if world_size > 1 else 0)
    needed = 2 * (size + trained * world_size * copies)
    if run.config.checkpoint_every is not None and free < needed:
        run.link.warn(
            f"{folder.path} has {in_units(free)} free, two checkpoints need about {in_units(needed)}: "
            "those that do not fit will be left out"
        )


def _refuse_other_state(model: nn.Module) -> None:
    """Raise before training if the model could not be written after it."""
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"the model's state has {name}, a {type(value).__name__} and not a tensor, which cannot be saved",
                hint="return a tensor from get_extra_state(), such as torch.frombuffer of its bytes",
            )


def refuse_if_full(folder: RunFolder, needed: int) -> None:
    """Raise before a checkpoint that would fill the disk; it is then skipped."""
    free = free_bytes(folder.path)
    if free is not None and free < needed:
        raise DataError(f"{folder.path} has {in_units(free)} free, the checkpoint needs {in_units(needed)}", hint=_HINT)


@contextmanager
def or_warned(link: Link, what: str) -> Iterator[None]:
    """Context manager for optional files: a failed write prints one line and does not end the run."""
    try:
        yield
    except DataError as error:
        link.warn(f"{what}: {error.message}")


def keep_record(run: _Run, *, status: str) -> None:
    """Update the record of a run, or warn that it could not be written."""
    with or_warned(run.link, "record.json is not up to date"):
        write_record(run.folder, run, status=status)


def keep_model(link: Link, folder: RunFolder, state: Mapping[str, Tensor]) -> Path:
    """Write the trained model to the run folder, or elsewhere if that fails; returns its path."""
    try:
        folder.write_model(state)
        return folder.model_file
    except DataError as error:
        path = save_elsewhere(state, error)
        link.warn(f"{error.message}; the trained model was written to {path} instead")
        return path


def save_or_keep(path: Path, state: Mapping[str, Tensor]) -> None:
    """Write a model to the user's path; if that fails, the error says where it was saved instead."""
    try:
        save_model(path, state)
    except DataError as error:
        kept = save_elsewhere(state, error)
        raise DataError(f"{error.message}; the model was kept in {kept}", hint=error.hint) from error


def save_elsewhere(state: Mapping[str, Tensor], reason: DataError) -> Path:
    """Write a model to the system's temporary folder or the home folder, in a new folder readable only by this user."""
    for place in (Path(tempfile.gettempdir()), Path.home()):
        try:
            path = Path(tempfile.mkdtemp(prefix=f"outrider-{os.getpid()}-model-", dir=place)) / "model.safetensors"
        except OSError:
            continue
        try:
            save_model(path, state)
        except DataError:
            shutil.rmtree(path.parent, ignore_errors=True)
        else:
            return path
    raise DataError(
        f"{reason.message}; nor was there room for the model ({in_units(num_bytes(dict(state)))}) in "
        f"{tempfile.gettempdir()} or {Path.home()}",
        hint=reason.hint,
    ) from reason
