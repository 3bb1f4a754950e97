"""The lock of a run folder: one run at a time, identified by process, host and start time.

Decides who may write to a folder, and when an abandoned lock no longer counts. Taken by the starter of the ranks, or by
rank 0 under another launcher; held until the run has ended.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from outrider.errors import ConfigError
from outrider.record.checkpoint_files import remove_stale
from outrider.record.run_folder import RunFolder, make_folder

LOCK_FILE = "lock"
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class FolderLock:
    """A lock held from `take` to `release`, or to the end of the process."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor: int | None = descriptor
        self._path = path
        _hold(self)

    @classmethod
    def take(cls, folder: RunFolder) -> FolderLock:
        """Lock a run folder, creating it if needed; raises an error if another run uses it or it has foreign files."""
        folder.refuse_foreign_files()
        make_folder(folder.path)
        path = folder.path / LOCK_FILE
        descriptor = _locked(path)
        try:
            _refuse_living(descriptor, path)
            os.ftruncate(descriptor, 0)
            # The lock works without its content; a full disk is reported when the run writes its first file.
            with contextlib.suppress(OSError):
                os.pwrite(descriptor, json.dumps(_this_process()).encode(), 0)
        except BaseException:
            os.close(descriptor)
            raise
        # No other run writes here now, so partial files belong to a run that died.
        remove_stale(folder.checkpoints)
        return cls(descriptor, path)

    def release(self) -> None:
        """Release the lock; does nothing if it is already released, or in a fork of the owner."""
        if self._descriptor is None:
            return
        _held.remove(self)
        with contextlib.suppress(OSError):
            self._path.unlink()
        self.forget()

    def forget(self) -> None:
        """Close the file, and leave the lock to its owner."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


_held: list[FolderLock] = []
"""The locks of this process."""
_watched_forks: list[bool] = []


def _hold(lock: FolderLock) -> None:
    _held.append(lock)
    if not _watched_forks and hasattr(os, "register_at_fork"):
        # A forked child would keep the lock after its parent has ended.
        os.register_at_fork(after_in_child=_forget_all)
        _watched_forks.append(True)


def _forget_all() -> None:
    while _held:
        _held.pop().forget()


def _locked(path: Path) -> int:
    """Open and lock the lock file, if the file system supports locks."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _flock(descriptor, path)
            # The previous owner may have removed the file between our open and our lock.
            if os.path.exists(path) and os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _flock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _in_use(path, _holder(descriptor)) from None
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise


def _refuse_living(descriptor: int, path: Path) -> None:
    """Without file locks the content decides: the lock counts if its process still runs on this host."""
    holder = _holder(descriptor)
    if holder is None:
        return
    if holder["host"] != socket.gethostname():
        print(
            f"outrider: {path.parent} was locked by pid {holder['pid']} on {holder['host']}, which holds it no longer",
            file=sys.stderr,
        )
    elif _still_runs(holder):
        raise _in_use(path, holder)


def _holder(descriptor: int) -> dict[str, Any] | None:
    """The content of the lock file; None if it is not readable."""
    try:
        content = json.loads(os.pread(descriptor, 4096, 0))
        return {name: content[name] for name in ("pid", "host", "started_at", "process_started_s")}
    except (ValueError, KeyError, TypeError):
        return None


def _still_runs(holder: dict[str, Any]) -> bool:
    try:
        # The pid may belong to another process by now.
        return bool(psutil.Process(holder["pid"]).create_time() == holder["process_started_s"])
    except psutil.Error:
        return False


def _this_process() -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started_at": datetime.now().astimezone().isoformat(timespec="seconds"),
        "process_started_s": psutil.Process().create_time(),
    }


def _in_use(path: Path, holder: dict[str, Any] | None) -> ConfigError:
    who = f"pid {holder['pid']} on {holder['host']}, since {holder['started_at']}" if holder else "another process"
    return ConfigError(
        f"{path.parent} is in use by another run: {who}", hint="wait for that run or end it, or pass another run_dir"
    )
