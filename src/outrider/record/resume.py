"""Finds the checkpoint that all ranks resume from, and reads each rank's part of it.

Decides which checkpoint is used (the one before a damaged one), and what is kept with other devices or another world
size. Called before the first step; all ranks call it in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from outrider.errors import DataError
from outrider.machine.devices import DeviceSpec, parse_devices
from outrider.record import checkpoint, checkpoint_files
from outrider.record.checkpoint import Progress
from outrider.record.run_folder import RunFolder
from outrider.timeline.recorder import Recorder
from outrider.world.messages import Link
from outrider.world.world import World


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """The state from which a rank resumes."""

    path: Path
    progress: Progress
    state: dict[str, Any]
    """The state of this rank."""
    devices: tuple[str, ...]
    """The devices of the ranks that wrote the checkpoint."""
    is_same_world: bool
    """Whether world size and kinds of devices are the same, so that measured speeds still apply."""

    @property
    def needs_common_optimizer(self) -> bool:
        """Whether ranks with different optimizer states begin with shared steps, because another world chooses anew."""
        chooser = self.progress.chooser
        return not self.is_same_world and chooser is not None and not chooser["is_exact"]

    @property
    def average(self) -> dict[str, Any] | None:
        """The state of the averages; None if the run had one rank."""
        average: dict[str, Any] | None = self.state["average"]
        return average


class Resuming(Protocol):
    """A run of `train()` or of a session, before its first step."""

    link: Link
    world: World
    folder: RunFolder
    recorder: Recorder


def where_to_resume(run: Resuming, resume: Path | str | None) -> Path | None:
    """The path to resume from; for "auto" this run's folder if rank 0 finds a checkpoint there. All ranks call this."""
    if resume is None or isinstance(resume, Path):
        return resume
    newest = checkpoint_files.whole(run.folder.path)[:1]
    (has_any, *_) = run.world.exchange_json(bool(newest), name="checkpoints found")
    if run.world.rank == 0:
        found = f"going on from {newest[0].name}" if newest else "no checkpoint yet, starting from the beginning"
        run.link.warn(f'resume="auto": {found} ({run.folder.path})')
    return run.folder.path if has_any else None


def read_checkpoint(run: Resuming, *, resume: Path, identity: dict[str, Any]) -> Resumed:
    """Read this rank's part of the newest checkpoint that is complete on all ranks."""
    world = run.world
    path = _agreed(run.link, world, run.folder, checkpoint_files.find(resume))
    progress = checkpoint.load_progress(path, identity=identity)
    before = checkpoint.devices(path)
    resumed = Resumed(
        path=path,
        progress=progress,
        state=_state(path, world),
        devices=before,
        is_same_world=_same(parse_devices(before), world.specs),
    )
    if world.rank == 0:
        run.recorder.event("resume", epoch=progress.epoch, position=progress.position, path=path.name)
        if not resumed.is_same_world:
            run.link.warn(_told(resumed, world))
    return resumed


def _state(path: Path, world: World) -> dict[str, Any]:
    state = checkpoint.load_rank(path, world.rank)
    # The factor of the learning rate depends on the world size, and a single rank never computes it again.
    is_same_size = len(checkpoint.devices(path)) == world.size
    return state if is_same_size else {**state, "rate_factor": None}


def _agreed(link: Link, world: World, folder: RunFolder, candidates: Sequence[Path]) -> Path:
    """The first candidate whose files are undamaged on every rank."""
    first: DataError | None = None
    for number, path in enumerate(candidates):
        troubles = world.exchange_json(_trouble(path, world.rank), name="checks of a checkpoint")
        trouble = next((one for one in troubles if one is not None), None)
        if trouble is None:
            return path
        first = first or DataError(trouble, hint="it is damaged: resume from another checkpoint")
        if world.rank == 0 and number + 1 < len(candidates):
            _tell_damage(link, folder, path, trouble=trouble, instead=candidates[number + 1])
    assert first is not None, "find() returns at least one"
    raise first


def _trouble(path: Path, rank: int) -> str | None:
    """The problem with the files that this rank needs, if any."""
    try:
        own = checkpoint.rank_file(rank if rank < len(checkpoint.devices(path)) else 0)
        checkpoint_files.verify(path, [own, checkpoint.MODEL_FILE] if rank == 0 else [own])
    except DataError as error:
        return error.message
    return None


def _tell_damage(link: Link, folder: RunFolder, path: Path, *, trouble: str, instead: Path) -> None:
    # The folder of another run is read-only for this run.
    if path.parent == folder.checkpoints:
        checkpoint_files.set_aside(path)
    link.warn(f"the newest checkpoint is damaged, {instead.name} is used instead: {trouble}")


def _same(before: Sequence[DeviceSpec], now: Sequence[DeviceSpec]) -> bool:
    return [(one.kind, one.speed, one.share) for one in before] == [(one.kind, one.speed, one.share) for one in now]


def _told(resumed: Resumed, world: World) -> str:
    """The message for a run that is resumed on other devices."""
    now, before = [str(spec) for spec in world.specs], list(resumed.devices)
    where = f"resumed from epoch {resumed.progress.epoch} on {','.join(now)}, saved on {','.join(before)}: "
    done = ["speeds are measured anew"]
    if resumed.needs_common_optimizer and len(now) > 1:
        done.insert(0, "rank 0's optimizer state serves all ranks")
    elif len(now) > len(before):
        done.insert(0, f"rank 0's optimizer state also serves {_ranks(len(before), len(now))}")
    elif len(now) < len(before):
        done.insert(0, f"the optimizer state of {_ranks(len(now), len(before))} is left out")
    return where + ", ".join(done)


def _ranks(start: int, stop: int) -> str:
    if stop - start == 1:
        return f"rank {start}"
    return f"ranks {', '.join(str(rank) for rank in range(start, stop))}"
