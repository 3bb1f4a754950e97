"""Runs a user's unchanged script in its own process, with some of the script's options replaced.

Decides how the script is started, stopped and watched, and how its failure is reported. Used by `outrider advise` for
short runs and by `outrider compare` for whole ones; `outrider run` replaces its own process instead.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from outrider.errors import ConfigError, OutriderError
from outrider.machine.variants import project_python
from outrider.world.environment import script_variables

STOP_S = 60.0
"""A script that was asked to stop is killed after this time, and its ranks end with it."""
_SHOWN_LINES = 12
_OUR_ERROR = re.compile(
    r"^(?:outrider\.errors\.\w+|error): (?P<message>[^\n]+)\nhint: (?P<hint>[^\n]+)\s*\Z", re.MULTILINE
)


@dataclass(frozen=True, kw_only=True, slots=True)
class UserCommand:
    """A script with its arguments."""

    script: Path
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.script.is_file():
            raise ConfigError(
                f"there is no script {self.script}",
                hint="the script comes first, then outrider's options, then -- and the script's own arguments",
            )

    @property
    def words(self) -> list[str]:
        return [project_python(), str(self.script), *self.arguments]

    @property
    def shown(self) -> str:
        """The command as a user types it."""
        return shlex.join(["python", str(self.script), *self.arguments])


class ScriptRun:
    """One run of the script: `with ScriptRun(...) as run:`; its output goes to a log."""

    def __init__(
        self,
        command: UserCommand,
        options: Mapping[str, Any],
        *,
        devices: Sequence[str],
        log: Path,
        is_trial: bool = False,
    ) -> None:
        self._command, self._log = command, log
        self._setting = f"policy={options['policy']} on {','.join(devices)}"
        self._variables = script_variables(options, devices=",".join(devices), is_trial=is_trial)
        self._is_stopped = False

    def __enter__(self) -> ScriptRun:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command.words, env=self._variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait(self, seconds: float) -> None:
        """Wait for the end, but no longer than this."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def stop(self) -> None:
        """Ask the run to stop at its next average and wait for the script to end; kill it if it takes too long."""
        if not self.is_running:
            return
        self._is_stopped = True
        self._process.send_signal(signal.SIGTERM)
        self.wait(STOP_S)
        if self.is_running:
            self._process.kill()
            self._process.wait()

    def raise_failure(self) -> None:
        """Raise an error if the script ended by itself with a non-zero exit code."""
        code = self._process.returncode
        if self._is_stopped or code in (None, 0):
            return
        refusal = self._refusal()
        if refusal is not None:
            raise OutriderError(f"{self._command.script.name} with {self._setting}: {refusal[0]}", hint=refusal[1])
        raise OutriderError(
            f"{self._command.script.name} ended with exit code {code}; its last lines:\n{self.last_lines()}",
            hint=f"does it run by itself? {self._command.shown}",
        )

    def _refusal(self) -> tuple[str, str] | None:
        """The message and the hint of the Outrider error that ended the script, if any."""
        text = self._log.read_text(encoding="utf-8", errors="replace").rstrip()
        found = _OUR_ERROR.search(text)
        return None if found is None else (found["message"], found["hint"])

    def last_lines(self) -> str:
        """The last lines of the script's output."""
        text = self._log.read_text(encoding="utf-8", errors="replace").rstrip()
        return "\n".join(f"  {line}" for line in text.splitlines()[-_SHOWN_LINES:])


def refuse_stranger(command: UserCommand) -> None:
    """Raise the error of a script that trained nothing through outrider."""
    raise ConfigError(
        f"{command.script.name} ended without training through outrider: no outrider.Session was opened and "
        "outrider.train() was not called",
        hint="put its loop into `with outrider.Session() as s:` first (docs/adopting.md), and check that its arguments "
        "after -- make it train",
    )
