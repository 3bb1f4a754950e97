"""`outrider setup`: find the torch that runs on all cards here, explain, ask, install.

Parses, calls, prints; the decision is in outrider.machine. Needs no working torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

if TYPE_CHECKING:
    from outrider.machine.facts import Facts
    from outrider.machine.resolve import Resolution, Way

EPILOG = "Example: outrider setup --dry-run. Exit code 1: nothing can work here, and the ways out are named."
EXIT_NO_WAY = 1


def setup(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan with reasons and commands.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before large steps.")] = False,
    version: Annotated[str | None, typer.Option("--version", metavar="X.Y", help="The torch version wanted.")] = None,
    way: Annotated[str | None, typer.Option("--way", help="Only this way: cpu, wheel, conda, groups, build.")] = None,
    cards: Annotated[str | None, typer.Option("--cards", metavar="0,1", help="Only these cards.")] = None,
    facts: Annotated[Path | None, typer.Option("--facts", metavar="FILE", help="Plan for a recorded machine.")] = None,
) -> None:
    """Decide which torch build fits all cards of this machine, say why, and install it."""
    from outrider.machine import setup as machine
    from outrider.machine.variants import Store, project_root
    from outrider.machine.wheels import load_table

    known, store = _facts(facts), Store.of_user()
    resolution = _resolve(known, version=version, way=way, cards=cards)
    plan = machine.make_plan(resolution, facts=known, table=load_table(), store=store)
    typer.echo(machine.render_plan(plan), nl=False)
    if resolution.way == "none":
        raise typer.Exit(EXIT_NO_WAY)
    if dry_run:
        return
    _check_is_here(facts)
    machine.check_room(plan, known)
    if not yes:
        ask(f"install {' and '.join(step.name for step in plan.steps)}?")
    machine.carry_out(plan, store=store, project=project_root(Path.cwd()))
    typer.echo(f"{plan.steps[0].name} is active in this project; `outrider run` uses it", err=True)


def ask(question: str) -> None:
    """Go on only after a yes; without a terminal there is nobody to ask."""
    import sys

    from outrider.errors import ConfigError

    if not sys.stdin.isatty():
        raise ConfigError(f"{question} there is no terminal to ask on", hint="pass --yes")
    typer.confirm(question, abort=True, err=True)


def _facts(recorded: Path | None) -> Facts:
    from outrider.machine.detect import detect_machine
    from outrider.machine.facts import load_facts

    return load_facts(recorded) if recorded else detect_machine(Path.cwd())


def _resolve(known: Facts, *, version: str | None, way: str | None, cards: str | None) -> Resolution:
    from outrider.machine.resolve import resolve
    from outrider.machine.wheels import check_version, load_table

    table = load_table()
    torch = check_version(version, table) if version else None
    return resolve(known, table=table, torch=torch, way=_way(way), cards=_cards(cards))


def _way(text: str | None) -> Way | None:
    from outrider.errors import ConfigError, nearest
    from outrider.machine.resolve import Way

    ways: tuple[Way, ...] = tuple(name for name in get_args(Way) if name != "none")
    if text is None:
        return None
    for name in ways:
        if name == text:
            return name
    close = nearest(text, ways)
    guess = f"did you mean {close}? " if close else ""
    raise ConfigError(f"unknown way {text!r}", hint=f"{guess}ways are {', '.join(ways)}")


def _cards(text: str | None) -> list[int] | None:
    from outrider.errors import ConfigError

    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--cards takes numbers like 0,1, got {text!r}", hint="see `outrider diagnose`") from error


def _check_is_here(recorded: Path | None) -> None:
    from outrider.errors import ConfigError

    if recorded:
        raise ConfigError(f"{recorded} may be another machine, so nothing is installed", hint="add --dry-run")
