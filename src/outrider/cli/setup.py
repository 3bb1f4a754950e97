"""`outrider setup`: find the torch that runs on all cards here, explain, ask, install.

Parses, calls, prints; the decision is in outrider.machine. Needs no working torch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli import completion
from outrider.errors import ConfigError, one_of

if TYPE_CHECKING:
    from outrider.machine.machine_facts import Facts
    from outrider.machine.torch_choice import TorchChoice, Way
    from outrider.machine.variants import VariantStore

EPILOG = "Example: outrider setup --dry-run"
EXIT_NO_WAY = 1


def setup(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan with reasons and commands.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before large steps.")] = False,
    version: Annotated[
        str | None,
        typer.Option(
            "--version", metavar="X.Y", autocompletion=completion.versions, help="The torch version, 2.13 or 2.13.0."
        ),
    ] = None,
    way: Annotated[
        str | None,
        typer.Option(
            "--way",
            metavar="WAY",
            autocompletion=completion.ways,
            help="Only this way: cpu, wheel, conda, groups or build.",
        ),
    ] = None,
    cards: Annotated[
        str | None,
        typer.Option("--cards", metavar="0,1", help="Only these cards, as `outrider diagnose` numbers them."),
    ] = None,
    facts: Annotated[Path | None, typer.Option("--facts", metavar="FILE", help="Plan for a recorded machine.")] = None,
) -> None:
    """Choose a torch build that fits all cards of this machine, explain the choice, and install it.

    Exit code 1 if no build can work here; the output names the alternatives.
    """
    from outrider.machine import install_plan as machine
    from outrider.machine.variants import VariantStore, project_root
    from outrider.machine.wheels import load_table

    store = VariantStore.of_user()
    known = recorded_or_here(facts, store)
    resolution = _resolve(known, version=version, way=way, cards=cards)
    plan = machine.make_plan(resolution, facts=known, table=load_table(), store=store, torch=version)
    typer.echo(machine.render_plan(plan), nl=False)
    if resolution.way == "none":
        raise typer.Exit(EXIT_NO_WAY)
    if dry_run:
        return
    if facts:
        raise ConfigError(f"{facts} may be another machine, so nothing is installed", hint="add --dry-run")
    machine.check_possible(plan, known)
    if plan.missing and not yes:
        ask(f"install {' and '.join(step.name for step in plan.missing)}?")
    machine.carry_out(plan, store=store, project=project_root(Path.cwd()))
    typer.echo(f"{plan.steps[0].name} is active in this project; `outrider run` uses it", err=True)


def ask(question: str) -> None:
    """Ask for confirmation; without a terminal nothing is installed."""
    if not sys.stdin.isatty():
        raise ConfigError(f"no terminal to ask on: {question}", hint="pass --yes")
    typer.confirm(question, abort=True, err=True)


def recorded_or_here(recorded: Path | None, store: VariantStore) -> Facts:
    """The facts of a file, or of this machine with the disk that the variants are on."""
    from outrider.machine.detect import detect_machine
    from outrider.machine.machine_facts import load_facts
    from outrider.machine.variants import existing_folder

    return load_facts(recorded) if recorded else detect_machine(existing_folder(store.folder))


def _resolve(known: Facts, *, version: str | None, way: str | None, cards: str | None) -> TorchChoice:
    from outrider.machine.torch_choice import resolve
    from outrider.machine.wheels import check_version, load_table

    table = load_table()
    torch = check_version(version, table) if version else None
    return resolve(known, table=table, torch=torch, way=_way(way), cards=_cards(cards))


def _way(text: str | None) -> Way | None:
    from outrider.machine.torch_choice import WAYS

    if text is None:
        return None
    for name in WAYS:
        if name == text:
            return name
    raise ConfigError(f"unknown way {text!r}", hint=one_of(text, WAYS, what="ways"))


def _cards(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--cards takes numbers like 0,1, got {text!r}", hint="see `outrider diagnose`") from error
