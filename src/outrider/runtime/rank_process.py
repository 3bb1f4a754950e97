"""One rank as the starter's operating system sees it: process, pipes, log.

Reads and signals; does not decide when. Used by Ranks only, from its watching thread.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from outrider.errors import OutriderError
from outrider.machine.devices import DeviceSpec
from outrider.runtime.messages import Message, decode

_NUM_LOG_LINES = 20
_LOG_TAIL_BYTES = 8_192


class Process(Protocol):
    """What is used of a Popen."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    def poll(self) -> int | None: ...
    def wait(self) -> int: ...


class RankProcess:
    """A process that runs one rank, with the starter's ends of its two pipes."""

    def __init__(
        self,
        *,
        rank: int,
        spec: DeviceSpec,
        process: Process,
        messages_fd: int,
        control_fd: int,
        log_path: Path,
    ) -> None:
        self.rank = rank
        self.label = f"rank {rank} ({spec})"
        self.pid = process.pid
        self.messages_fd = messages_fd
        self.done_at_s: float | None = None
        self.has_failed = False
        self.has_ended = False
        self.is_silent = False
        self.last_words: Sequence[Message] = ()
        self._process = process
        self._control_fd = control_fd
        self._log_path = log_path
        self._unfinished = b""
        os.set_blocking(messages_fd, False)

    def read(self) -> list[Message]:
        """The whole messages that are there by now."""
        try:
            while chunk := os.read(self.messages_fd, 65_536):
                self._unfinished += chunk
            self.is_silent = True
        except BlockingIOError:
            pass
        *lines, self._unfinished = self._unfinished.split(b"\n")
        return [decode(line, rank=self.rank) for line in lines]

    def poll(self) -> bool:
        """Whether it has just ended; its last words are read, and processes it leaves behind are ended."""
        if self._process.poll() is None:
            return False
        self.has_ended = True
        self.last_words = self.read()
        # Its own data loading processes outlive a rank that was killed.
        self._signal_group(signal.SIGKILL)
        return True

    def ask_to_stop(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._control_fd, b"stop\n")

    def terminate(self) -> None:
        if not self.has_ended:
            self._signal_group(signal.SIGTERM)

    def kill(self) -> None:
        if not self.has_ended:
            self._signal_group(signal.SIGKILL)

    def close(self) -> None:
        """End it if it still runs, and close the pipes."""
        self.kill()
        self._process.wait()
        os.close(self.messages_fd)
        os.close(self._control_fd)

    def _signal_group(self, number: signal.Signals) -> None:
        # A rank leads a session, and so a group, of its own.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def death(self) -> OutriderError:
        """The error for a rank that ended without a word."""
        code = self._process.returncode
        assert code is not None, "asked of a rank that has ended"
        hint = f"see {self._log_path}" if self._log_path.exists() else "see its output above"
        if code == -signal.SIGKILL:
            hint += "; a system out of memory ends processes this way"
        how = f"died with {_signal_name(-code)}" if code < 0 else f"ended with exit code {code} before it was done"
        return OutriderError(f"{self.label} {how}", hint=hint, rank=self.rank, traceback=self._log_tail())

    def _log_tail(self) -> str | None:
        if not self._log_path.exists():
            return None
        with open(self._log_path, "rb") as file:
            file.seek(max(0, os.path.getsize(self._log_path) - _LOG_TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-_NUM_LOG_LINES:]) or None


def _signal_name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"
