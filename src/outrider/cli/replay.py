"""`outrider replay`: do a recorded run again in one process, and say where it departs.

Parses, and runs the script of the run with the wish in its environment; `train()` in it does the rest.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.errors import ConfigError, DataError

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

    The script runs up to its first train(), which replays the run in this process instead of starting ranks.
    """
    from outrider.api.replay_wish import LOOP_HINT, ReplayWish
    from outrider.machine.variants import project_python
    from outrider.timeline.timeline_files import read_json

    if not run.is_dir():
        raise DataError(f"no run folder {run}", hint="pass the folder of a run, such as runs/20261117-120000-async")
    is_loop = not (run / "config.json").is_file() and (run / "record.json").is_file()
    if is_loop:
        raise DataError(
            f"{run} is the run of a loop of your own, which runs in one process per rank",
            hint=LOOP_HINT,
        )
    config = read_json(run / "config.json")
    if not config.get("options", {}).get("record_schedule"):
        raise DataError(f"{run} was not recorded", hint="pass record_schedule=True to train(), and run it again")
    arguments, folder = ([str(script), *context.args], None) if script is not None else _program(config, is_sure=yes)
    wish = ReplayWish(
        run=str(run.absolute()), losses=None if losses is None else str(losses.absolute()), as_json=as_json
    )
    if folder is not None:
        os.chdir(folder)
    command = [project_python(), *arguments]
    sys.stdout.flush()
    os.execve(command[0], command, {**os.environ, **wish.variables()})


def _program(config: dict[str, Any], *, is_sure: bool) -> tuple[list[str], str]:
    """The recorded program; a run folder may come from anybody, so the user sees it first."""
    program = config.get("program", {"arguments": []})
    if not program["arguments"]:
        raise ConfigError("the run does not say which program made it", hint="name it: outrider replay RUN train.py")
    if not is_sure:
        typer.echo(f"The run was made in {program['folder']} by: python {' '.join(program['arguments'])}", err=True)
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
