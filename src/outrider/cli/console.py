"""The output of the command line: data on stdout, messages on stderr, errors as two lines and an exit code.

Decides the format and exit code of errors; knows no command. Called by main and by the commands.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

import typer

from outrider.errors import ConfigError, OutriderError, did_you_mean

EXIT_ERROR = 1
EXIT_USAGE = 2
"""The exit code of typer's own usage errors."""
EXIT_INTERRUPTED = 130
EXIT_SIGNAL = 128
"""Plus the number of the signal, as shells count."""
DEBUG = "OUTRIDER_DEBUG"
"""Set it to see the traceback of an error."""


def say(text: str) -> None:
    """Print a message to stderr; data goes to stdout."""
    print(text, file=sys.stderr, flush=True)


def guarded(command: Callable[[], object]) -> int:
    """Run a command; an error of ours becomes two lines and an exit code."""
    try:
        command()
    except OutriderError as error:
        if os.environ.get(DEBUG):
            raise
        say(error_text(error))
        return EXIT_ERROR
    return 0


def end_by_signal(number: int, frame: FrameType | None) -> NoReturn:
    """Exit through every `finally`, so that no partial files and no processes are left behind."""
    raise SystemExit(EXIT_SIGNAL + number)


def error_text(error: OutriderError) -> str:
    lines = [f"error: {error.message}"]
    if error.hint:
        lines.append(f"hint: {error.hint}")
    return "\n".join(lines)


def refuse_option(context: typer.Context, word: str) -> None:
    """End the command if an argument is an option in the wrong place or a misspelt one.

    Commands that leave options to a script get unknown ones as arguments.
    """
    if len(word) < 2 or not word.startswith("-"):
        return
    name, command = word.partition("=")[0], context.command
    known = [option for parameter in command.get_params(context) for option in parameter.opts if option[0] == "-"]
    if name in known:
        problem = ConfigError(f"{name} comes too late", hint=f"{context.command_path} {name} ..., then the arguments")
    else:
        hint = did_you_mean(name, known, otherwise=f"{context.command_path} --help shows the options")
        problem = ConfigError(f"no such option {name}", hint=hint)
    say(error_text(problem))
    raise typer.Exit(EXIT_USAGE)


def check_torch() -> None:
    """Check for torch, for commands that train; the others work without torch."""
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"torch cannot be imported: {error}",
            hint="`outrider diagnose` shows why, `outrider setup` installs one that fits",
        ) from error
