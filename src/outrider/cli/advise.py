"""`outrider advise`: is the second device worth it, and which policy; measured with the user's own script.

Parses, calls, prints; the measuring is in outrider.api, the forecast in outrider.virtual.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli import completion
from outrider.cli.console import check_torch, say

EPILOG = "Example: outrider advise train.py --devices cpu,cpu@0.4 -- --lr 0.1"
CONTEXT = {"allow_extra_args": True}
"""What follows `--` belongs to the script."""


def advise(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="The Python script; its own arguments follow after --.")],
    devices: Annotated[
        str,
        typer.Option(
            "--devices",
            metavar="LIST",
            autocompletion=completion.devices,
            help="Devices to ask about, such as cuda:0,cuda:1 or cpu,cpu@0.4.",
        ),
    ] = "auto",
    seconds: Annotated[float, typer.Option("--seconds", help="How long each short run trains, at least.")] = 4.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Measure a script for a moment on each device, and forecast every policy on every choice of them.

    Runs the script unchanged once per device and once per policy, for seconds each.
    """
    check_torch()
    from outrider.api.advising import advise_script
    from outrider.api.script_run import UserCommand
    from outrider.virtual.advice import as_document

    command = UserCommand(script=script, arguments=tuple(context.args))
    advice = advise_script(command, devices=devices, seconds=seconds, tell=say)
    typer.echo(json.dumps(as_document(advice), indent=1) if as_json else str(advice))
