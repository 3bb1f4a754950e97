"""Checkpoints: everything a run needs to go on as if it had never stopped.

Decides what is in one: the model (shared), each rank's optimizer, schedule, random state and outer velocity, and the
planner, split and position (shared). Taken between segments, when all ranks stand at the same point; in a user's own
loop between epochs.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.errors import ConfigError, DataError
from outrider.replica.loop_replica import LoopReplica
from outrider.replica.randomness import random_state
from outrider.replica.recipe import Recipe
from outrider.runtime.folder import RunFolder, make_folder, save_model, write_text, write_whole

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Where a run stands, the same on all ranks."""

    epoch: int
    position: int
    """Positions of the epoch's permutation that are done."""
    windows: int
    train_s: float
    planner: dict[str, Any]
    splitter: dict[str, Any]
    epochs: list[dict[str, Any]]
    """Metrics of the epochs that ended."""
    identity: dict[str, Any]
    """What must be the same for a resumed run to make sense."""


def identity(recipe: Recipe) -> dict[str, Any]:
    """The settings that decide which samples and steps come next."""
    return {
        "seed": recipe.seed,
        "batch_size": recipe.batch_size,
        "policy": recipe.policy,
        "lr_scale": recipe.lr_scale,
    }


def loop_identity(replica: LoopReplica) -> dict[str, Any]:
    """The same for a user's own loop, whose batches are the user's business."""
    return {
        "seed": replica.recipe.seed,
        "policy": replica.recipe.policy,
        "lr_scale": replica.recipe.lr_scale,
        "optimizers": [type(optimizer).__name__ for optimizer in replica.optimizers],
        "schedulers": [type(scheduler).__name__ for scheduler in replica.schedulers],
    }


def save(
    folder: RunFolder, progress: Progress, *, rank: int, model: dict[str, torch.Tensor], rank_state: dict[str, Any]
) -> Path:
    """This rank's part of a checkpoint; all ranks call it, then `commit` on rank 0 after a barrier."""
    path = _staging(folder, progress)
    make_folder(path)
    write_whole(path / f"rank{rank}.pt", lambda temporary: _save(temporary, rank_state))
    if rank == 0:
        save_model(path / "model.safetensors", model)
        text = json.dumps({"schema_version": SCHEMA_VERSION, **_fields(progress)}, separators=(",", ":"))
        write_text(path / "state.json", text)
    return path


def commit(folder: RunFolder, progress: Progress) -> Path:
    """Make a checkpoint visible under its final name; one with the same name is replaced."""
    final = folder.checkpoints / _name(progress)
    if final.exists():
        shutil.rmtree(final)
    return _staging(folder, progress).rename(final)


def find(path: Path) -> Path:
    """The checkpoint itself, or the newest one of a run folder."""
    if (path / "state.json").is_file():
        return path
    found = _whole(path)
    if not found:
        raise DataError(
            f"no checkpoint found in {path}", hint="pass a run folder that was made with checkpoint_every=1"
        )
    return found[-1]


def keep_newest(path: Path) -> None:
    """Remove all checkpoints of a run folder but the newest."""
    for old in _whole(path)[:-1]:
        shutil.rmtree(old)


def _whole(path: Path) -> list[Path]:
    """The checkpoints of a run folder, oldest first."""
    return sorted(one for one in RunFolder(path).checkpoints.glob("epoch*") if (one / "state.json").is_file())


def refuse_strangers(folder: RunFolder, *, resume: Path | None) -> None:
    """A new run must not leave its checkpoints among those of another: the newest would be anybody's."""
    is_same_run = resume is not None and folder.path in (resume, *resume.parents)
    if is_same_run or not any(folder.checkpoints.glob("epoch*")):
        return
    raise ConfigError(
        f"{folder.path} holds the checkpoints of another run",
        hint=f'pass resume="{folder.path}" to go on with it, or another run_dir',
    )


def load_progress(path: Path, *, identity: dict[str, Any]) -> Progress:
    """Read where the run stood; refuse what would not be the same run."""
    with _readable(path / "state.json"):
        fields = json.loads((path / "state.json").read_text())
    version = fields.pop("schema_version")
    if version != SCHEMA_VERSION:
        raise DataError(
            f"{path} has schema_version {version}, this Outrider reads {SCHEMA_VERSION}",
            hint="resume with the version that wrote it",
        )
    before = fields["identity"]
    for name, value in identity.items():
        # What older checkpoints do not name cannot be compared.
        if name in before and before[name] != value:
            raise ConfigError(
                f"cannot resume: {name} was {before[name]!r}, now {value!r}",
                hint=f"pass the same {name}, or start a new run",
            )
    return Progress(**fields)


def load_rank(path: Path, rank: int) -> dict[str, Any]:
    """A rank's own state; a rank that was not there before starts from rank 0's."""
    own = path / f"rank{rank}.pt"
    file = own if own.is_file() else path / "rank0.pt"
    with _readable(file):
        state: dict[str, Any] = torch.load(file, weights_only=True)
    return state


def loop_state(replica: LoopReplica) -> dict[str, Any]:
    """What a rank alone knows where the user takes the steps: optimizers, schedules, random state, steps."""
    return random_state(replica.device) | {
        "optimizers": [optimizer.state_dict() for optimizer in replica.optimizers],
        "schedulers": [scheduler.state_dict() for scheduler in replica.schedulers],
        "ticks": replica.ticks,
        "steps": replica.steps,
        "rate_factor": replica.rate_factor,
    }


def restore_loop(replica: LoopReplica, state: dict[str, Any]) -> None:
    """All but the random state: the user may draw before the loop goes on."""
    for optimizer, saved in zip(replica.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    for scheduler, saved in zip(replica.schedulers, state["schedulers"], strict=True):
        scheduler.load_state_dict(saved)
    replica.ticks, replica.steps = state["ticks"], state["steps"]
    replica.rate_factor = state["rate_factor"]


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise DataError(
            f"{path} cannot be read: {type(error).__name__}",
            hint="it is damaged, or holds code, which is never loaded: resume from another checkpoint",
        ) from error


def _fields(progress: Progress) -> dict[str, Any]:
    return {name: getattr(progress, name) for name in Progress.__slots__}


def _name(progress: Progress) -> str:
    return f"epoch{progress.epoch:05d}-{progress.position:012d}"


def _staging(folder: RunFolder, progress: Progress) -> Path:
    return folder.checkpoints / f".{_name(progress)}"


def _save(path: Path, state: dict[str, Any]) -> None:
    # Given a path, torch writes it itself and does not say why it failed.
    with path.open("wb") as file:
        torch.save(state, file)
