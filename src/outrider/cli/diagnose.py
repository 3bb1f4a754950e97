"""`outrider diagnose`: what this machine has, what works, and what training on all of it would gain.

Parses, calls, prints; the judgement is in outrider.machine. Needs no working torch.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.console import error_text, say
from outrider.errors import OutriderError

if TYPE_CHECKING:
    from outrider.machine.devices import DeviceSpec
    from outrider.machine.machine_facts import Facts

EPILOG = "Example: outrider diagnose --report > report.md"
_COLOURS = {"ok": "green", "warning": "yellow", "failure": "red"}


def diagnose(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document: facts, verdicts, forecast.")] = False,
    report: Annotated[bool, typer.Option("--report", help="A block for an issue, without names or serials.")] = False,
    facts: Annotated[Path | None, typer.Option("--facts", metavar="FILE", help="Judge recorded facts instead.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Skip the all-reduce and speed probes.")] = False,
    devices: Annotated[
        str | None, typer.Option("--devices", metavar="LIST", help="Judge these, such as cuda:0,cuda:1:8GiB.")
    ] = None,
) -> None:
    """List the devices of this machine, check what works, and explain the findings.

    Exit code 0 without a failure, 1 with one, 3 if something cannot be checked.
    """
    from outrider.machine import diagnosis as machine
    from outrider.machine.wheels import load_table
    from outrider.virtual.gain_forecast import forecast

    if as_json and report:
        # A usage error, exit code 2: 1 would say that the machine has a failure.
        raise typer.BadParameter("--json and --report cannot be printed at once")
    specs = _specs(devices)
    found = _gather(facts, quick)
    diagnosis = machine.diagnose(found, load_table(), forecast=forecast(found, specs), devices=specs)
    if as_json:
        text = json.dumps(machine.diagnosis_to_json(diagnosis), indent=2) + "\n"
    elif report:
        text = machine.make_report(diagnosis, machine.this_identity())
    else:
        text = machine.render(diagnosis, paint=_paint)
    typer.echo(text, nl=False)
    raise typer.Exit(diagnosis.exit_code)


def _specs(devices: str | None) -> tuple[DeviceSpec, ...]:
    from outrider.machine.devices import parse_devices

    try:
        return parse_devices(devices) if devices is not None else ()
    except OutriderError as error:
        raise typer.BadParameter(str(error)) from error


def _gather(recorded: Path | None, quick: bool) -> Facts:
    from outrider.machine.diagnosis import EXIT_CANNOT_LOOK
    from outrider.machine.machine_facts import load_facts

    try:
        return load_facts(recorded) if recorded else _look(quick)
    except OutriderError as error:
        say(error_text(error))
        raise typer.Exit(EXIT_CANNOT_LOOK) from error


def _look(quick: bool) -> Facts:
    from outrider.machine.detect import detect
    from outrider.machine.probes import with_probes
    from outrider.machine.variants import VariantStore, project_root

    typer.echo("looking at the machine and its torch builds ...", err=True)
    here = Path.cwd()
    found = detect(here, variants=VariantStore.of_user().interpreters(project_root(here)))
    if quick:
        return found
    typer.echo("trying an all-reduce and measuring each device for 2 s ...", err=True)
    return with_probes(found)


def _paint(word: str) -> str:
    # typer.echo removes colour where stdout is no terminal; NO_COLOR is ours to obey.
    return word if os.environ.get("NO_COLOR") else typer.style(word, fg=_COLOURS[word.strip()])
