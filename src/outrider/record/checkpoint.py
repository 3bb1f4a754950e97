"""Checkpoints: the complete state that a run needs to continue as if it had not stopped.

Decides the content: the model (shared), each rank's optimizer, schedule, random state and outer velocity, and the
planner, split and position (shared). `checkpoint_files` decides the layout on disk; the rank decides when to save. Only
`copied` reads live tensors: `write_part`, `commit` and the other functions may run in a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outrider import faults
from outrider.errors import ConfigError, DataError
from outrider.policy.remaining import Remaining
from outrider.record import checkpoint_files as files
from outrider.record.checkpoint_files import FileDigest
from outrider.record.run_folder import RunFolder, make_folder, save_model, write_whole
from outrider.replica.portable_state import portable, restored

MODEL_FILE = "model.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """The progress of a run, the same on all ranks."""

    epoch: int
    position: int
    """Finished samples of the epoch; in a user's loop those of all its passes."""
    windows: int
    train_s: float
    planner: dict[str, Any]
    splitter: dict[str, Any]
    epochs: list[dict[str, Any]]
    """Metrics of the finished epochs."""
    identity: dict[str, Any]
    """Settings that must be equal in a resumed run."""
    remaining: list[list[int]] | None = None
    """The rest of the epoch as ranges of its permutation; None for everything after `position`."""
    accounts: list[dict[str, Any]] = field(default_factory=list)
    """Each rank's account of the epoch so far, for a checkpoint in the middle of an epoch."""

    passes: int = 0
    """Complete passes of the epoch, for a user's loop with several passes."""
    chooser: dict[str, Any] | None = None
    """Whether ranks take exact or local steps under the policy `auto`."""

    @classmethod
    def of_foreign(cls, epoch: int, *, remaining: list[list[int]]) -> Progress:
        """The place in an epoch given by a framework's own checkpoint."""
        nothing: dict[str, Any] = {}
        return cls(
            epoch=epoch,
            position=0,
            windows=0,
            train_s=0.0,
            planner=nothing,
            splitter=nothing,
            epochs=[],
            identity=nothing,
            remaining=remaining,
        )

    def rest(self, num_samples: int) -> Remaining:
        """The rest of the epoch."""
        state = self.remaining
        return Remaining.restored(
            [[self.position, num_samples - self.position]] if state is None else state, end=num_samples
        )

    @property
    def name(self) -> str:
        return f"epoch{self.epoch:05d}-{self.position:012d}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Copied:
    """One rank's part of a checkpoint, as a copy in host memory."""

    progress: Progress
    rank: int
    device: str
    state: dict[str, Any]
    model: dict[str, Tensor] | None
    """Only on rank 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The files that one rank wrote; sent as JSON to rank 0, which needs all of them to commit."""

    device: str
    """The device as the user wrote it."""
    files: dict[str, FileDigest]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Part:
        files = {name: FileDigest(**one) for name, one in content["files"].items()}
        return cls(device=content["device"], files=files)


# Saving: every rank copies and writes its part, rank 0 commits once it has all parts.


def copied(
    progress: Progress, *, rank: int, device: str, model: Mapping[str, Tensor], rank_state: Mapping[str, Any]
) -> Copied:
    """Copy this rank's part to the host; raises a ConfigError for an object that could not be read back."""
    epochs = list(progress.epochs)
    return Copied(
        # The copy may be written in the background while the run adds its next epoch to the history.
        progress=replace(deepcopy(replace(progress, epochs=[])), epochs=epochs),
        rank=rank,
        device=device,
        state={name: portable(value, name) for name, value in rank_state.items()},
        # Parameters are views of one flat arena and may be tied: the file gets plain copies.
        model={name: tensor.detach().to("cpu", copy=True) for name, tensor in model.items()} if rank == 0 else None,
    )


def merged_model(model: nn.Module, *, is_mid_epoch: bool, undo_merge: Callable[[], None]) -> Mapping[str, Tensor]:
    """The model of a checkpoint; in the middle of an epoch, the ranks afterwards undo the merge made for it."""
    if not is_mid_epoch:
        return model.state_dict()
    merged = {name: tensor.detach().to("cpu", copy=True) for name, tensor in model.state_dict().items()}
    undo_merge()
    return merged


def write_part(folder: RunFolder, part: Copied, *, nonce: str) -> Part:
    """Write this rank's files to the staging folder of a checkpoint."""
    faults.reach("checkpoint")
    path = staging(folder, part.progress, nonce=nonce)
    make_folder(path)
    names = [rank_file(part.rank)]
    write_whole(path / names[0], lambda temporary: _save(temporary, part.state))
    if part.model is not None:
        names.append(MODEL_FILE)
        save_model(path / MODEL_FILE, part.model)
    return Part(device=part.device, files={name: files.digest(path / name) for name in names})


def read_back(folder: RunFolder, part: Copied, *, nonce: str) -> None:
    """Read back the part that was just written, to find unreadable state at the first checkpoint."""
    _load(staging(folder, part.progress, nonce=nonce) / rank_file(part.rank))


def commit(folder: RunFolder, progress: Progress, parts: Sequence[Part], *, nonce: str, keep: int | None) -> Path:
    """Make a checkpoint of the parts of all ranks visible, and remove those older than the newest `keep`."""
    fields = {name: getattr(progress, name) for name in Progress.__slots__}
    written = {name: one for part in parts for name, one in part.files.items()}
    path = files.publish(
        staging(folder, progress, nonce=nonce),
        progress.name,
        files=written,
        fields={"devices": [part.device for part in parts], **fields},
    )
    if keep is not None:
        files.keep_newest(folder.path, keep)
    return path


def unseen_ranks(folder: RunFolder, progress: Progress, parts: Sequence[Part], *, nonce: str) -> list[int]:
    """Ranks whose files are missing in rank 0's staging folder, because their hosts do not share the disk."""
    path = staging(folder, progress, nonce=nonce)
    return [rank for rank, part in enumerate(parts) if not all((path / name).is_file() for name in part.files)]


def staging(folder: RunFolder, progress: Progress, *, nonce: str) -> Path:
    return files.staging(folder.checkpoints, progress.name, nonce)


def rank_file(rank: int) -> str:
    return f"rank{rank}.pt"


def refuse_strangers(folder: RunFolder, *, resume: Path | str | None) -> None:
    """Raise if a folder has checkpoints of another run: a new run must not mix its checkpoints with them."""
    if isinstance(resume, Path) and resume.parent == folder.checkpoints:
        _refuse_later(folder, resume)
    if resume == "auto":
        _refuse_to_repeat(folder)
    is_same_run = resume == "auto" or (isinstance(resume, Path) and folder.path in (resume, *resume.parents))
    if is_same_run or not any(folder.checkpoints.glob("epoch*")):
        return
    raise ConfigError(
        f"{folder.path} holds the checkpoints of another run",
        hint=f'pass resume="{folder.path}" to go on with it, or another run_dir',
    )


def _refuse_to_repeat(folder: RunFolder) -> None:
    """Raise rather than repeat a finished run and replace its model; it can continue only from a checkpoint."""
    record = folder.read_json("record.json") or {}
    if record.get("status") == "finished" and record.get("epochs") and not files.whole(folder.path):
        raise ConfigError(
            f"the run in {folder.path} is finished and has no checkpoint to go on from: it would begin again, and "
            "replace its model",
            hint="pass another run_dir, or remove this one; with checkpoint_every=1 a finished run can go on",
        )


def _refuse_later(folder: RunFolder, resume: Path) -> None:
    """Raise if a folder has later checkpoints, which would be taken for the newest ones of the resumed run."""
    newest = files.whole(folder.path)[:1]
    if newest and newest[0] != resume:
        raise ConfigError(
            f"{folder.path} holds a later checkpoint than {resume.name}: {newest[0].name}",
            hint=f'pass another run_dir to go on from this one, or resume="{folder.path}" for the newest',
        )


# Loading


def load_progress(path: Path, *, identity: dict[str, Any]) -> Progress:
    """Read the progress of a checkpoint; raises if the checkpoint has other settings."""
    fields = files.read_state(path)
    before = fields["identity"]
    for name, value in identity.items():
        # Settings that older checkpoints do not contain cannot be compared.
        if name in before and before[name] != value:
            raise ConfigError(
                f"cannot resume: {name} was {before[name]!r}, now {value!r}",
                hint=f"pass the same {name}, or start a new run",
            )
    planner = _by_batch_size(fields["planner"], before)
    known = {name: fields[name] for name in Progress.__slots__ if name in fields}
    return Progress(**known | {"planner": planner})


def _by_batch_size(planner: dict[str, Any], identity: dict[str, Any]) -> dict[str, Any]:
    """Planner states by batch size; older checkpoints of `train()` hold the state of a single planner."""
    return {str(identity["batch_size"]): planner} if "paces" in planner else planner


def devices(path: Path) -> tuple[str, ...]:
    """The devices of the ranks that wrote a checkpoint."""
    return tuple(files.read_state(path)["devices"])


def load_rank(path: Path, rank: int) -> dict[str, Any]:
    """A rank's own state on the host; a new rank gets rank 0's state, but its own random state."""
    was_there = rank < len(devices(path))
    state: dict[str, Any] = _load(path / rank_file(rank if was_there else 0))
    return state if was_there else {**state, "random": None}


def _load(path: Path) -> Any:
    with _readable(path):
        return restored(torch.load(path, weights_only=True, map_location="cpu"))


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise DataError(
            f"{path} cannot be read: {type(error).__name__}",
            hint="it is damaged, or holds code, which is never loaded: resume from another checkpoint",
        ) from error


def _save(path: Path, state: dict[str, Any]) -> None:
    # torch.save to a path would hide the reason for a failure.
    with path.open("wb") as file:
        torch.save(state, file)
