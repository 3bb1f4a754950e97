"""Runs the user's script once more in every rank, where a script opens a session on several devices by itself.

Decides what counts as a script, and how its end becomes the rank's. Sessions ask here whether this process is such a
rank; the starter of the ranks only waits, as torchrun would.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.errors import ConfigError, OutriderError
from outrider.machine.devices import DeviceSpec
from outrider.runtime.launch import launch
from outrider.runtime.messages import Link
from outrider.runtime.payload import library_folders

TOOLS = ("pytest", "py.test")
"""Commands that run the user's code among other code: a rank that ran them again would do all of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """What the user started: a file, or a module by `python -m`."""

    path: str
    module: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Cast:
    """This process as a rank that runs the user's script."""

    link: Link
    run_dir: Path


_cast: list[Cast] = []
"""Holds the one of this process; empty where the script was not started by us."""


def cast() -> Cast | None:
    """Who this process is, where it runs a script as one of several ranks."""
    return _cast[0] if _cast else None


def running_script() -> Script | None:
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
    return Script(path=absolute, module=spec.name if spec is not None else None)


def run_in_ranks(
    script: Script, *, devices: Sequence[DeviceSpec], run_dir: Path, num_threads: int | None, port: int
) -> int:
    """Run the script in one new process per device and wait for the end; the exit code.

    Rank 0 writes where this process does, the others to their logs in `run_dir`.
    """
    with launch(
        run_script,
        {"script": script, "run_dir": run_dir},
        devices=devices,
        log_dir=run_dir,
        port=port,
        num_threads=num_threads,
        shown_rank=0,
    ) as ranks:
        for _ in ranks.messages():
            pass
        try:
            ranks.raise_error()
        except OutriderError as error:
            print(_in_words(error), file=sys.stderr)
            return 1
    return 0


def take_part(link: Link, *, run_dir: Path) -> None:
    """From here on a session that is opened in this process is this rank."""
    _cast.append(Cast(link=link, run_dir=run_dir))


def run_script(link: Link, *, script: Script, run_dir: Path) -> None:
    """What a rank does: the script from its first line, with the session finding its place."""
    take_part(link, run_dir=run_dir)
    try:
        if script.module is None:
            runpy.run_path(script.path, run_name="__main__")
        else:
            runpy.run_module(script.module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise ConfigError(
                f"rank {link.rank} ({link.spec}): the script ended with exit code {end.code}", rank=link.rank
            ) from end


def _in_words(error: OutriderError) -> str:
    lines = [error.traceback.rstrip()] if error.traceback and error.rank != 0 else []
    lines.append(f"error: {error.message}")
    if error.hint:
        lines.append(f"hint: {error.hint}")
    return "\n".join(lines)
