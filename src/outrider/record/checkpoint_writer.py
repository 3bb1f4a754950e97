"""Saves checkpoints on one rank: writes its own part, and on rank 0 commits all parts, now or in the background.

A checkpoint that cannot be written causes a warning and does not end the run. Ranks of one host report finished files
by small files in the staging folder, because their connections belong to the training thread. `checkpoint` decides the
content; the rank decides when one is due, and calls this on all ranks in the same order.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from torch import Tensor

from outrider.errors import ConfigError, DataError, WaitError
from outrider.record import checkpoint, checkpoint_files
from outrider.record.checkpoint import Copied, Part, Progress
from outrider.record.checkpoint_schedule import DEFAULT_EVERY
from outrider.record.disk_space import refuse_if_full
from outrider.record.run_config import RunConfig
from outrider.record.run_folder import RunFolder, write_text
from outrider.replica.portable_state import num_bytes, portable
from outrider.timeline.recorder import Recorder
from outrider.world.messages import Link
from outrider.world.world import World

_LOOK_S = 0.02
_SHORT_S = 5.0
_TOLD = "told-rank{}.json"


class Behind:
    """Runs one job at a time in a thread; `finish` raises its exception."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def start(self, work: Callable[[], None]) -> None:
        assert self._thread is None, "finish() comes first"
        self._thread = threading.Thread(target=self._run, args=(work,), name=self._name, daemon=True)
        self._thread.start()

    def finish(self, timeout_s: float) -> None:
        """Wait until the job is done."""
        if self._thread is None:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise WaitError(
                f"a checkpoint was not written within {timeout_s:g} s",
                hint="see whether the disk of run_dir still answers",
            )
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._error = error


def as_told(written: Part | DataError) -> dict[str, Any]:
    """A rank's report about its part, as JSON."""
    return {"error": written.message} if isinstance(written, DataError) else {"part": written.as_json()}


def tell_part(staging: Path, rank: int, written: Part | DataError) -> None:
    """Write the report for rank 0; an empty file means that the disk is full."""
    path = staging / _TOLD.format(rank)
    try:
        write_text(path, json.dumps(as_told(written)))
    except DataError:
        with contextlib.suppress(OSError):
            path.touch()


def hear_parts(staging: Path, own: Part | DataError, *, world_size: int, timeout_s: float) -> list[Mapping[str, Any]]:
    """The reports of all ranks, in order, on rank 0; a rank that does not report in time has failed."""
    # If rank 0 itself has failed, a long wait gains nothing.
    deadline_s = time.monotonic() + (min(timeout_s, _SHORT_S) if isinstance(own, DataError) else timeout_s)
    paths = [staging / _TOLD.format(rank) for rank in range(1, world_size)]
    while not all(path.exists() for path in paths) and time.monotonic() < deadline_s:
        time.sleep(_LOOK_S)
    told = [as_told(own), *(_read(path) for path in paths)]
    for path in paths:
        path.unlink(missing_ok=True)
    return told


def _read(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        return {"error": "its part was not written in time"}
    text = path.read_text()
    return json.loads(text) if text else {"error": "the disk did not take its part"}


CLOSE_S = 5.0
MEMORY_SPARED = 2
"""Background writing needs this many times the size of the copy as free memory."""


class Checkpoints:
    """One rank's part in the checkpoints of a run."""

    def __init__(self, link: Link, world: World, folder: RunFolder, *, config: RunConfig, recorder: Recorder) -> None:
        self._link = link
        self._world = world
        self._folder = folder
        self._keep = config.keep
        self._is_asked_for = config.checkpoint_every not in (None, DEFAULT_EVERY)
        self._recorder = recorder
        self._nonce: str | None = None
        self._was_read_back = False
        self._behind = Behind("outrider-checkpoint")

    def save(
        self, progress: Progress, *, model: Mapping[str, Tensor], rank_state: Mapping[str, Any], is_last: bool = False
    ) -> None:
        """Save a checkpoint; all ranks call this. Unless it `is_last`, files may be written in the background."""
        started_s = time.perf_counter()
        self.finish()
        part = self._copy_or_reason(progress, model=model, rank_state=rank_state)
        if not is_last and self._all_can_write_behind(part):
            assert isinstance(part, Copied)
            self._behind.start(partial(self._write_behind, part, started_s=started_s))
        else:
            self.publish(progress, self.write(part) if isinstance(part, Copied) else part)
        self._recorder.event("checkpoint saved", name=progress.name, ms=_ms_since(started_s))

    def _copy_or_reason(self, progress: Progress, **content: Any) -> Copied | DataError:
        try:
            return self.copy(progress, **content)
        except ConfigError as error:
            # If the user asked for no checkpoints, a failure here must not end the run.
            if self._is_asked_for:
                raise
            return DataError(error.message)

    def finish(self) -> None:
        """Wait for a checkpoint in the background, if any; raises its error."""
        self._behind.finish(self._world.timeout_s)

    def close(self) -> None:
        """Like `finish`, at the end of a failed run; does not raise, to keep the run's own error."""
        with contextlib.suppress(Exception):
            self._behind.finish(CLOSE_S)

    def _all_can_write_behind(self, part: Copied | DataError) -> bool:
        """Whether all ranks have a part, have already read one back, and have enough memory for the copy.

        All ranks call this, because each rank knows only its own disk and memory.
        """
        can = isinstance(part, Copied) and self._was_read_back and self._has_room(part)
        return self._world.is_one_host and all(self._world.exchange_json(can, name="checkpoints in the background"))

    def _has_room(self, part: Copied) -> bool:
        needed = num_bytes(part.state) + num_bytes(part.model)
        return bool(psutil.virtual_memory().available > MEMORY_SPARED * needed * self._world.size)

    def _write_behind(self, part: Copied, *, started_s: float) -> None:
        """Runs in a thread of each rank; rank 0 learns from files, not messages, that the other ranks are done."""
        assert self._nonce is not None
        staging = checkpoint.staging(self._folder, part.progress, nonce=self._nonce)
        written = self.write(part)
        if part.rank != 0:
            tell_part(staging, part.rank, written)
            return
        told = hear_parts(staging, written, world_size=self._world.size, timeout_s=self._world.timeout_s)
        self._conclude(part.progress, told)
        self._recorder.event("checkpoint written", name=part.progress.name, ms=_ms_since(started_s))

    def check_can_save(self, rank_state: Mapping[str, Any]) -> None:
        """Raise an error before the first step if the state contains an object that could not be read back."""
        if self._is_asked_for:
            for name, value in rank_state.items():
                portable(value, name)

    # Three phases: the first needs the rank's tensors, the second may run in a thread, the third synchronises ranks.

    def copy(self, progress: Progress, *, model: Mapping[str, Tensor], rank_state: Mapping[str, Any]) -> Copied:
        """Copy this rank's part; all ranks call this before the first `write`, to agree on a name."""
        if self._nonce is None:
            self._nonce = self._world.exchange_json(_new_nonce(), name="nonces")[0]
        world = self._world
        return checkpoint.copied(progress, rank=world.rank, device=str(world.spec), model=model, rank_state=rank_state)

    def write(self, part: Copied) -> Part | DataError:
        """Write this rank's part; returns the reason if that fails."""
        assert self._nonce is not None
        try:
            # All ranks write about the same amount to the same disk.
            refuse_if_full(self._folder, num_bytes(part.state) * self._world.size + num_bytes(part.model))
            written = checkpoint.write_part(self._folder, part, nonce=self._nonce)
        except DataError as error:
            return error
        if not self._was_read_back:
            checkpoint.read_back(self._folder, part, nonce=self._nonce)
            self._was_read_back = True
        return written

    def publish(self, progress: Progress, written: Part | DataError) -> Path | None:
        """Make the checkpoint visible if all ranks wrote their part; all ranks call this."""
        told = self._world.exchange_json(as_told(written), name="parts of a checkpoint")
        return self._conclude(progress, told)

    def _conclude(self, progress: Progress, told: Sequence[Mapping[str, Any]]) -> Path | None:
        failures = [(rank, one["error"]) for rank, one in enumerate(told) if "error" in one]
        if failures:
            self._give_up(progress, f"rank {failures[0][0]}: {failures[0][1]}")
            return None
        return self._commit(progress, [Part.from_json(one["part"]) for one in told]) if self._world.rank == 0 else None

    def _commit(self, progress: Progress, parts: list[Part]) -> Path | None:
        assert self._nonce is not None
        unseen = checkpoint.unseen_ranks(self._folder, progress, parts, nonce=self._nonce)
        if unseen:
            hosts = self._world.hosts
            self._give_up(
                progress,
                f"rank {unseen[0]} on {hosts[unseen[0]]} wrote its part to a folder that rank 0 on {hosts[0]} does not "
                "see: pass a run_dir on a disk that all hosts share",
            )
            return None
        try:
            path = checkpoint.commit(self._folder, progress, parts, nonce=self._nonce, keep=self._keep)
        except DataError as error:
            self._give_up(progress, f"rank 0: {error.message}")
            return None
        self._recorder.event("checkpoint", epoch=progress.epoch, position=progress.position, path=path.name)
        return path

    def _give_up(self, progress: Progress, why: str) -> None:
        """Warn that a checkpoint failed; the run continues with the existing ones."""
        if self._world.rank != 0:
            return
        assert self._nonce is not None
        shutil.rmtree(checkpoint.staging(self._folder, progress, nonce=self._nonce), ignore_errors=True)
        newest = checkpoint_files.whole(self._folder.path)[:1]
        kept = f"the newest is {newest[0].name}" if newest else "there is none yet"
        self._recorder.event("checkpoint failed", epoch=progress.epoch, position=progress.position, reason=why)
        self._link.warn(f"no checkpoint {progress.name}, {kept}; {why}")


def _ms_since(started_s: float) -> float:
    return round((time.perf_counter() - started_s) * 1e3, 3)


def _new_nonce() -> str:
    return f"{os.getpid()}-{secrets.token_hex(4)}"
