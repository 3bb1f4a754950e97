"""`outrider diagnose`: what this machine has, what works, and what training on all of it would gain.

Parses, calls, prints; the judgement is in outrider.machine. Needs no working torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from outrider.machine.diagnose import Diagnosis
    from outrider.machine.facts import Facts

EPILOG = "Example: outrider diagnose --report > report.md"
_COLOURS = {"ok": "green", "warning": "yellow", "failure": "red"}


def diagnose(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document: facts, verdicts, forecast.")] = False,
    report: Annotated[bool, typer.Option("--report", help="A block for an issue, without names or serials.")] = False,
    facts: Annotated[Path | None, typer.Option("--facts", metavar="FILE", help="Judge recorded facts instead.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Skip the all-reduce and speed probes.")] = False,
) -> None:
    """Find out what this machine has and what works on it, and say why.

    Exit code 0 without a failure, 1 with one, 3 where something cannot be looked at.
    """
    from outrider.machine.diagnose import diagnose as judge
    from outrider.machine.wheels import load_table

    if as_json and report:
        # A usage error, exit code 2: 1 would say that the machine has a failure.
        raise typer.BadParameter("--json and --report cannot be printed at once")
    diagnosis = judge(_gather(facts, quick), load_table())
    typer.echo(_document(diagnosis) if as_json else _report(diagnosis) if report else _text(diagnosis), nl=False)
    raise typer.Exit(diagnosis.exit_code)


def _gather(recorded: Path | None, quick: bool) -> Facts:
    from outrider.cli.console import error_text, say
    from outrider.errors import OutriderError
    from outrider.machine.diagnose import EXIT_CANNOT_LOOK
    from outrider.machine.facts import load_facts

    try:
        return load_facts(recorded) if recorded else _look(quick)
    except OutriderError as error:
        say(error_text(error))
        raise typer.Exit(EXIT_CANNOT_LOOK) from error


def _look(quick: bool) -> Facts:
    from outrider.machine.detect import detect
    from outrider.machine.probes import with_probes
    from outrider.machine.variants import Store, project_root

    typer.echo("looking at the machine and its torch builds ...", err=True)
    here = Path.cwd()
    found = detect(here, variants=Store.of_user().interpreters(project_root(here)))
    if quick:
        return found
    typer.echo("trying an all-reduce and measuring each device for 2 s ...", err=True)
    return with_probes(found)


def _document(diagnosis: Diagnosis) -> str:
    from outrider.machine.diagnose import diagnosis_to_json

    return json.dumps(diagnosis_to_json(diagnosis), indent=2) + "\n"


def _report(diagnosis: Diagnosis) -> str:
    from outrider.machine.report import make_report, this_identity

    return make_report(diagnosis, this_identity())


def _text(diagnosis: Diagnosis) -> str:
    from outrider.machine.render import render

    return render(diagnosis, paint=_paint)


def _paint(word: str) -> str:
    # typer.echo removes colour where stdout is no terminal; NO_COLOR is ours to obey.
    import os

    return word if os.environ.get("NO_COLOR") else typer.style(word, fg=_COLOURS[word.strip()])
