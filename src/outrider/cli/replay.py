"""`outrider replay`: do a recorded run again in one process, and say where it departs.

Parses, and runs the script of the run with the wish in its environment; `train()` in it does the rest.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.console import EXIT_SIGNAL, refuse_option
from outrider.cli.run import check_script
from outrider.errors import ConfigError, DataError

if TYPE_CHECKING:
    from outrider.api.replay_wish import ReplayWish

EPILOG = "Example: outrider replay runs/20261117-120000-async train.py --lr 0.1"
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
"""What follows the script belongs to the script."""


def replay(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run with record_schedule=True.")],
    script: Annotated[
        Path | None, typer.Argument(help="The script that made it, with its arguments; asked for if left out.")
    ] = None,
    losses: Annotated[
        Path | None, typer.Option("--losses", metavar="CSV", help="Write the loss of every step of every rank.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Run the recorded program without asking.")] = False,
) -> None:
    """Train again exactly as a recorded run did, and compare; the exit code is 3 where it departs.

    The script runs up to its first train(), which replays the run in its own process instead of starting ranks.
    """
    from outrider.api.replay_wish import ReplayWish

    config = _config(context, run)
    if script is not None:
        check_script(context, script)
    if losses is not None:
        _check_losses(losses)
    arguments, folder = ([str(script), *context.args], None) if script is not None else _program(config, is_sure=yes)
    with tempfile.TemporaryDirectory(prefix=f"outrider-{os.getpid()}-replay-") as scratch:
        wish = ReplayWish(
            run=str(run.absolute()),
            answer=str(Path(scratch) / "exit_code"),
            losses=None if losses is None else str(losses.absolute()),
            as_json=as_json,
        )
        if folder is not None:
            os.chdir(folder)
        code = _exit_code(arguments, wish)
    raise typer.Exit(code)


def _config(context: typer.Context, run: Path) -> dict[str, Any]:
    """The configuration of a run that was recorded."""
    from outrider.api.replay_wish import LOOP_HINT
    from outrider.timeline.timeline_files import read_json

    if not run.is_dir():
        refuse_option(context, str(run))
        raise DataError(f"no run folder {run}", hint="pass the folder of a run, such as runs/20261117-120000-async")
    is_loop = not (run / "config.json").is_file() and (run / "record.json").is_file()
    if is_loop:
        raise DataError(
            f"{run} is the run of a loop of your own, which runs in one process per rank",
            hint=LOOP_HINT,
        )
    config: dict[str, Any] = read_json(run / "config.json")
    if not config.get("options", {}).get("record_schedule"):
        raise DataError(f"{run} was not recorded", hint="pass record_schedule=True to train(), and run it again")
    return config


def _check_losses(path: Path) -> None:
    if not path.parent.is_dir():
        raise ConfigError(
            f"there is no folder {path.parent} for the losses", hint="make it, or write --losses losses.csv"
        )
    if path.is_dir():
        raise ConfigError(f"{path} is a folder, not a file for the losses", hint=f"write --losses {path}/losses.csv")


def _program(config: dict[str, Any], *, is_sure: bool) -> tuple[list[str], str]:
    """The recorded program; a run folder may come from anybody, so the user sees it first."""
    program = config.get("program", {"arguments": []})
    if not program["arguments"]:
        raise ConfigError("the run does not say which program made it", hint="name it: outrider replay RUN train.py")
    if not is_sure:
        typer.echo(f"The run was made in {program['folder']} by: {_shown(program['arguments'])}", err=True)
        if not sys.stdin.isatty():
            raise ConfigError(
                "whether to run that program cannot be asked here",
                hint="pass --yes, or name the script: outrider replay RUN train.py",
            )
        typer.confirm("Run it?", abort=True, err=True)
    if not Path(program["folder"]).is_dir():
        raise DataError(
            f"the folder {program['folder']} is not there", hint="name the script: outrider replay RUN train.py"
        )
    return program["arguments"], program["folder"]


def _shown(arguments: Sequence[str]) -> str:
    return shlex.join(["python", *arguments])


def _exit_code(arguments: Sequence[str], wish: ReplayWish) -> int:
    """Run the script; the exit code is that of the replay in it, or else of the script."""
    from outrider.api.replay_wish import DEPARTED
    from outrider.machine.variants import project_python

    code = _run([project_python(), *arguments], {**os.environ, **wish.variables()})
    answer = Path(wish.answer)
    if answer.is_file():
        return int(answer.read_text())
    # Other codes than those of a replay say by themselves that the script failed.
    if code in (0, DEPARTED):
        name = _shown(arguments) if arguments[0].startswith("-") else Path(arguments[0]).name
        raise ConfigError(
            f"{name} ended without calling outrider.train(): nothing was replayed",
            hint="name the script that made the run, with the arguments that make it train",
        )
    return EXIT_SIGNAL - code if code < 0 else code


def _run(command: Sequence[str], variables: Mapping[str, str]) -> int:
    """Run a command with the terminal of this one; whoever stops this process stops the command."""
    sys.stdout.flush()
    process = subprocess.Popen(command, env=variables)
    # A terminal sends Ctrl-C to both processes; what the script does then decides the end.
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, lambda number, frame: None),
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda number, frame: process.send_signal(number)),
    }
    try:
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
