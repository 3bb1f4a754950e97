"""Checkpoints as folders on disk: written under a temporary name, synced, checked, renamed, removed when replaced.

Decides names, checksums and which folder counts as a complete checkpoint. `checkpoint` decides the content; this module
reads and writes no tensors. Called by `checkpoint`, `resume` and `api`.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from outrider.errors import DataError
from outrider.record.run_folder import sync_folder, write_text

SCHEMA_VERSION = 2
STATE_FILE = "state.json"
_NAME = re.compile(r"epoch(\d+)-(\d+)(?:-(\d+))?")
_NOT_THERE = "pass a run folder that was made with checkpoint_every=1"
_DAMAGED = "it is damaged: resume from another checkpoint"


@dataclass(frozen=True, kw_only=True, slots=True)
class FileDigest:
    """Size and checksum of a file of a checkpoint."""

    num_bytes: int
    blake2b: str


Files = Mapping[str, FileDigest]


def digest(path: Path) -> FileDigest:
    with path.open("rb") as file:
        hashed = hashlib.file_digest(file, partial(hashlib.blake2b, digest_size=32))
        return FileDigest(num_bytes=file.tell(), blake2b=hashed.hexdigest())


# Writing


def staging(checkpoints: Path, name: str, nonce: str) -> Path:
    """The folder that collects the parts of a checkpoint; `nonce` is equal on all ranks and new in every run."""
    return checkpoints / f".{name}.{nonce}"


def publish(staged: Path, name: str, *, files: Files, fields: Mapping[str, Any]) -> Path:
    """Turn a complete staging folder into a checkpoint; then remove an older one of the same position."""
    listed = {file: {"num_bytes": one.num_bytes, "blake2b": one.blake2b} for file, one in sorted(files.items())}
    # Convert to the form that is read back: JSON has no integer keys and no tuples.
    content = json.loads(json.dumps({"schema_version": SCHEMA_VERSION, **fields, "files": listed}))
    write_text(staged / STATE_FILE, json.dumps({**content, "digest": _digest_of(content)}, separators=(",", ":")))
    sync_folder(staged)
    before = [one for one in _named(staged.parent) if _key(one)[:2] == _key(staged.parent / name)[:2]]
    number = max((_key(one)[2] for one in before), default=0) + 1
    final = staged.with_name(name if number == 1 else f"{name}-{number}")
    staged.rename(final)
    sync_folder(staged.parent)
    for old in before:
        shutil.rmtree(old, ignore_errors=True)
    return final


def remove_stale(checkpoints: Path) -> None:
    """Remove staging folders of runs that died; only the run that holds the folder's lock may do this."""
    for path in checkpoints.glob(".epoch*"):
        shutil.rmtree(path, ignore_errors=True)


def keep_newest(path: Path, keep: int) -> None:
    """Remove all checkpoints of a run folder but the newest `keep`."""
    for old in whole(path)[keep:]:
        # Renamed first, so that a partly removed checkpoint does not count as one.
        doomed = old.with_name(f".{old.name}.removed")
        old.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def set_aside(checkpoint: Path) -> Path:
    """Rename a damaged checkpoint, so that it no longer counts as a checkpoint; returns its new path."""
    aside = checkpoint.with_name(f"damaged-{checkpoint.name}")
    shutil.rmtree(aside, ignore_errors=True)
    return checkpoint.rename(aside)


# Reading


def whole(path: Path) -> list[Path]:
    """The complete checkpoints of a run folder, newest first: all files exist with their full size."""
    return [one for one in reversed(_named(path / "checkpoints")) if _has_all_files(one)]


def find(path: Path) -> list[Path]:
    """The candidates to resume from, best first: the checkpoint itself, or those of a run folder."""
    found = [path] if (path / STATE_FILE).is_file() else whole(path)
    if not found:
        raise DataError(f"no checkpoint found in {path}", hint=_NOT_THERE)
    return found


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The content of state.json, checked against its own digest."""
    path = checkpoint / STATE_FILE
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        version = content["schema_version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} cannot be read: {type(error).__name__}", hint=_DAMAGED) from error
    if version != SCHEMA_VERSION:
        raise DataError(
            f"{checkpoint} has schema_version {version}, this Outrider reads {SCHEMA_VERSION}",
            hint="resume with the version that wrote it",
        )
    if content.pop("digest", None) != _digest_of(content):
        raise DataError(f"{path} is not as it was written: checksum differs", hint=_DAMAGED)
    return content


def verify(checkpoint: Path, names: Iterable[str]) -> None:
    """Raise a DataError if one of these files has changed since it was written."""
    listed = read_state(checkpoint)["files"]
    for name in names:
        path, expected = checkpoint / name, listed.get(name)
        if expected is None or not path.is_file():
            raise DataError(f"{path} is missing", hint=_DAMAGED)
        found = digest(path)
        if found.num_bytes != expected["num_bytes"]:
            raise DataError(f"{path} has {found.num_bytes} bytes, {expected['num_bytes']} were written", hint=_DAMAGED)
        if found.blake2b != expected["blake2b"]:
            raise DataError(f"{path} is not as it was written: checksum differs", hint=_DAMAGED)


def _has_all_files(checkpoint: Path) -> bool:
    """Quickly check sizes; checksums are compared on resume."""
    try:
        files = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))["files"]
        return all((checkpoint / name).stat().st_size == one["num_bytes"] for name, one in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _named(checkpoints: Path) -> list[Path]:
    """All folders with the name of a checkpoint, oldest first."""
    return sorted((one for one in checkpoints.glob("epoch*") if _NAME.fullmatch(one.name)), key=_key)


def epoch_of(checkpoint: Path) -> int:
    """The epoch with which a run resumed from this checkpoint continues."""
    return _key(checkpoint)[0]


def _key(checkpoint: Path) -> tuple[int, int, int]:
    match = _NAME.fullmatch(checkpoint.name)
    assert match is not None, f"{checkpoint} is not the name of a checkpoint"
    epoch, position, number = match.groups()
    return int(epoch), int(position), int(number or 1)


def _digest_of(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, separators=(",", ":"), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()
