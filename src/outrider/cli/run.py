"""`outrider run`: run a training script with the project's torch, on the devices named.

Parses, hands over, and passes the exit code on; the script starts its own ranks. Needs no torch itself.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli import completion
from outrider.cli.console import refuse_option
from outrider.errors import ConfigError

EPILOG = "Example: outrider run --devices cpu,cpu@0.4 train.py --epochs 2"
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
"""What follows the script belongs to the script."""
DEVICES = "OUTRIDER_DEVICES"
WATCH = "OUTRIDER_WATCH"


def run(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="The Python script to run; what follows it goes to it.")],
    devices: Annotated[
        str | None,
        typer.Option(
            "--devices",
            metavar="LIST",
            autocompletion=completion.devices,
            help="Devices of the ranks, such as cuda:0,cuda:1 or cpu,cpu@0.4; auto for all.",
        ),
    ] = None,
    environments: Annotated[
        str | None,
        typer.Option(
            "--environments",
            metavar="LIST",
            help="Python environment of each rank, such as here,envs/old; auto: one that serves its card.",
        ),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Serve the live page of every run in it, and print its address.")
    ] = False,
) -> None:
    """Run a script with the active torch variant of this project."""
    from outrider.machine.rank_environments import VARIABLE as ENVIRONMENTS
    from outrider.machine.variants import project_python

    check_script(context, script)
    environment = {**os.environ, **_devices(devices), **({WATCH: "1"} if watch else {})}
    if environments is not None:
        environment[ENVIRONMENTS] = environments
    command = [project_python(), str(script), *context.args]
    sys.stdout.flush()
    # Replaced, not started: signals and the exit code reach the script and the shell unchanged.
    os.execve(command[0], command, environment)


def _devices(devices: str | None) -> dict[str, str]:
    from outrider.machine.devices import parse_devices

    if devices is None:
        return {}
    if devices != "auto":
        parse_devices(devices)
    return {DEVICES: devices}


def check_script(context: typer.Context, script: Path) -> None:
    """Check that the script exists, for the commands that run one."""
    if not script.is_file():
        refuse_option(context, str(script))
        raise ConfigError(
            f"there is no script {script}", hint="outrider's own options come before it, the script's after it"
        )
