"""The starter's access to one rank through the operating system: process, pipes, log.

Reads messages and sends signals; Ranks decides when. Used only by the watching thread of Ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import psutil

from outrider.errors import OutriderError
from outrider.machine.devices import DeviceSpec
from outrider.world.messages import Message, decode

_NUM_LOG_LINES = 20
_LOG_TAIL_BYTES = 8_192


class Process(Protocol):
    """The part of Popen that RankProcess uses."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    def poll(self) -> int | None: ...
    def wait(self) -> int: ...


class RankProcess:
    """The process of one rank, with the starter's ends of its two pipes."""

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
        self.heard_at_s = 0.0
        """Time of the last message, on the clock of the watching thread."""
        self.is_watched = False
        """Whether the rank is training, so that a long silence means that it hangs."""
        self.done_at_s: float | None = None
        self.has_started = False
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
        """Return the complete messages received so far."""
        try:
            while chunk := os.read(self.messages_fd, 65_536):
                self._unfinished += chunk
            self.is_silent = True
        except BlockingIOError:
            pass
        *lines, self._unfinished = self._unfinished.split(b"\n")
        return [decode(line, rank=self.rank) for line in lines]

    def poll(self) -> bool:
        """Whether the rank has just ended; reads its last messages and kills the processes that it left behind."""
        if self._process.poll() is None:
            return False
        self.has_ended = True
        self.last_words = self.read()
        # Data loading processes outlive a rank that was killed.
        self._signal_group(signal.SIGKILL)
        return True

    @property
    def is_stopped(self) -> bool:
        """Whether the process is stopped, as after SIGSTOP."""
        try:
            return bool(psutil.Process(self.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP))
        except psutil.NoSuchProcess:
            return False

    @property
    def log(self) -> str:
        return str(self._log_path) if self._log_path.exists() else "its output above"

    def ask_to_stop(self) -> None:
        self._tell("stop")

    def interrupt(self, number: signal.Signals) -> None:
        """Ask the rank to stop because of a signal, which the record names as the reason."""
        self._tell(f"interrupt {number.value}")

    def _tell(self, request: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._control_fd, f"{request}\n".encode())

    def ask_for_stacks(self) -> None:
        """Ask the rank to log the stacks of its threads; before it has started, the signal would kill it."""
        if self.has_started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGUSR1)

    def terminate(self) -> None:
        """End the rank with SIGHUP, because SIGTERM means an orderly stop."""
        if not self.has_ended:
            self._signal_group(signal.SIGHUP)

    def kill(self) -> None:
        if not self.has_ended:
            self._signal_group(signal.SIGKILL)

    def close(self) -> None:
        """Kill the rank if it is still running, and close the pipes."""
        self.kill()
        self._process.wait()
        os.close(self.messages_fd)
        os.close(self._control_fd)

    def _signal_group(self, number: signal.Signals) -> None:
        # A rank is the leader of its own session and process group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def death(self) -> OutriderError:
        """The error for a rank that ended without reporting one."""
        code = self._process.returncode
        assert code is not None, "asked of a rank that has ended"
        hint = f"see {self.log}"
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
