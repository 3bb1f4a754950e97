"""Runs the user's script again in every rank, for a script that opens a session on several devices.

Decides what counts as a script, and how the end of the script becomes the end of the rank. Sessions ask here whether
this process is such a rank; the starter only waits, like torchrun.
"""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.errors import ConfigError, OutriderError, PeerLostError, WaitError
from outrider.launch.interruption import SignalGuard
from outrider.launch.interruption_report import say_interrupted, say_stopping
from outrider.launch.launcher import Ranks, launch
from outrider.launch.payload import library_folders
from outrider.machine.devices import DeviceSpec
from outrider.record.run_folder import RunFolder
from outrider.record.run_folder_lock import FolderLock
from outrider.record.run_record import close_record
from outrider.record.run_timeline import complete_timeline
from outrider.world.messages import Link

TOOLS = ("pytest", "py.test")
"""Commands that run the user's code together with other code, and so cannot be run again in ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UserScript:
    """The user's program: a file, or a module started with `python -m`."""

    path: str
    module: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptRank:
    """Describes this process as a rank that runs the user's script."""

    link: Link
    run_dir: Path


_script_rank: list[ScriptRank] = []
"""Holds the script rank of this process; empty if we did not start the script."""
_at_end: list[Callable[[], None]] = []


def script_rank() -> ScriptRank | None:
    """This process as a rank that runs the user's script; None otherwise."""
    return _script_rank[0] if _script_rank else None


def at_script_end(call: Callable[[], None]) -> None:
    """Call a function when this process's script has ended: in our ranks before the end is reported, else at exit."""
    if _script_rank:
        _at_end.append(call)
    else:
        atexit.register(call)


def lock_unless_starter_does(folder: RunFolder) -> FolderLock | None:
    """Take the lock of a folder for rank 0 of a session; None if the starter of its ranks already holds it."""
    here = script_rank()
    return None if here is not None and here.run_dir == folder.path else FolderLock.take(folder)


def running_script() -> UserScript | None:
    """The user's script; None in a notebook, at a prompt, or under a tool such as pytest."""
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    if path is None or hasattr(sys, "ps1"):
        return None
    absolute = os.path.abspath(path)
    is_tool = os.path.basename(absolute) in TOOLS or absolute.startswith(library_folders())
    if is_tool or not os.path.isfile(absolute):
        return None
    spec = getattr(main, "__spec__", None)
    return UserScript(path=absolute, module=spec.name if spec is not None else None)


def run_in_ranks(
    script: UserScript,
    *,
    devices: Sequence[DeviceSpec],
    run_dir: Path,
    interpreters: Sequence[str] | None = None,
    num_threads: int | None,
    port: int,
    grace_s: float,
) -> int:
    """Run the script in one new process per device, wait for the end, and return the exit code.

    Rank 0 writes to the output of this process, the other ranks to their logs in `run_dir`. SIGINT and SIGTERM stop the
    ranks in an orderly way within `grace_s`; a second signal kills them at once.
    """
    with launch(
        run_script,
        {"script": script, "run_dir": run_dir},
        devices=devices,
        log_dir=run_dir,
        port=port,
        interpreters=interpreters,
        num_threads=num_threads,
        shown_rank=0,
        grace_s=grace_s,
    ) as ranks:
        exit_codes = _await_end(ranks, grace_s=grace_s)
        try:
            ranks.raise_error()
        except OutriderError as error:
            print(_in_words(error), file=sys.stderr)
            _close_record(RunFolder(run_dir), status="failed", error=error)
            complete_timeline(run_dir)
            return exit_codes[0] if exit_codes else 1
    if ranks.interrupted_by is None:
        return 0
    if _close_record(RunFolder(run_dir), status="interrupted"):
        complete_timeline(run_dir)
    say_interrupted(run_dir)
    return 128 + ranks.interrupted_by


def _await_end(ranks: Ranks, *, grace_s: float) -> list[int]:
    """Wait until all ranks have ended; returns the exit codes that scripts passed to `sys.exit`."""

    def interrupt(number: signal.Signals) -> None:
        ranks.interrupt(number)
        say_stopping(number, within_s=grace_s)

    with SignalGuard(interrupt, on_repeat=lambda number: ranks.end_at_once()):
        return [message.fields["code"] for message in ranks.messages() if message.kind == "exit"]


def _close_record(folder: RunFolder, *, status: str, error: OutriderError | None = None) -> bool:
    """Complete the record if rank 0 could not, or recorded only a lost connection; returns whether it did."""
    record = folder.read_json("record.json")
    is_open = record is not None and record["status"] in ("running", "failed")
    if is_open:
        close_record(folder, status=status, error=error)
    return is_open


def take_part(link: Link, *, run_dir: Path) -> None:
    """Make sessions that are opened in this process use this rank."""
    _script_rank.append(ScriptRank(link=link, run_dir=run_dir))


def run_script(link: Link, *, script: UserScript, run_dir: Path) -> None:
    """Run the whole script in a rank; its session will find this rank."""
    take_part(link, run_dir=run_dir)
    try:
        if script.module is None:
            runpy.run_path(script.path, run_name="__main__")
        else:
            runpy.run_module(script.module, run_name="__main__", alter_sys=True)
        while _at_end:
            _at_end.pop()()
    except SystemExit as end:
        if link.interrupted_by is not None:
            raise
        if end.code not in (None, 0):
            link.send("exit", code=end.code if isinstance(end.code, int) else 1)
            raise ConfigError(
                f"rank {link.rank} ({link.spec}): the script ended with exit code {end.code}", rank=link.rank
            ) from end


def _in_words(error: OutriderError) -> str:
    # Rank 0 has already shown its traceback, except for lost connections.
    is_shown = error.rank == 0 and not isinstance(error, PeerLostError | WaitError)
    lines = [error.traceback.rstrip()] if error.traceback and not is_shown else []
    lines.append(f"error: {error.message}")
    lines += getattr(error, "__notes__", [])
    if error.hint:
        lines.append(f"hint: {error.hint}")
    return "\n".join(lines)
