"""`outrider torch`: torch builds side by side, one active per project.

Parses, calls, prints; the work is in outrider.machine. Needs no working torch.
"""

from __future__ import annotations

import json
import shlex
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli import completion
from outrider.cli.console import error_text, say
from outrider.errors import OutriderError

if TYPE_CHECKING:
    from outrider.machine.build import BuildPlan
    from outrider.machine.install import InstallRecipe
    from outrider.machine.variants import Variant, VariantStore

EPILOG = "Example: outrider torch install auto"

app = typer.Typer(
    no_args_is_help=True, epilog=EPILOG, help="Torch builds side by side, exactly one active per project."
)

_NONE = "no torch variant is installed; see `outrider torch install --help`"
_Name = Annotated[
    str, typer.Argument(metavar="NAME", autocompletion=completion.variants, help="A name of `outrider torch list`.")
]
_Version = Annotated[
    str | None,
    typer.Option(
        "--version", metavar="X.Y", autocompletion=completion.versions, help="The torch version, 2.13 or 2.13.0."
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="One JSON document.")]
_Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be done.")]


@app.command("list", epilog="Example: outrider torch list")
def list_variants(as_json: _Json = False) -> None:
    """List the variants; a star marks the active one."""
    store, project = _places()
    active, variants = _active(project), store.variants()
    if as_json:
        typer.echo(json.dumps([{**_encode(item), "is_active": item.name == active} for item in variants], indent=2))
    elif variants:
        typer.echo("\n".join(_row(item, active) for item in variants))
    else:
        typer.echo(_NONE, err=True)


@app.command(epilog="Example: outrider torch install cu126 --version 2.13")
def install(
    backend: Annotated[
        str,
        typer.Argument(
            metavar="BACKEND",
            autocompletion=completion.backends,
            help="cpu, cu126, cu130, ..., or auto for what fits the cards here.",
        ),
    ],
    version: _Version = None,
    only_torch: Annotated[bool, typer.Option("--only-torch", help="Leave Outrider out of the environment.")] = False,
    dry_run: _DryRun = False,
) -> None:
    """Install a torch build into an environment of its own."""
    from outrider.machine.install import commands
    from outrider.machine.install import install as make

    store, _ = _places()
    recipe = _recipe(backend, version, only_torch)
    if dry_run:
        _show_commands(commands(recipe, store.path(recipe.name)))
        return
    variant = make(recipe, store)
    typer.echo(_row(variant, None))
    typer.echo(f"use it in this project: outrider torch activate {variant.name}", err=True)


@app.command(epilog='Example: outrider torch build --archs "6.1;12.0" --dry-run')
def build(
    archs: Annotated[
        str, typer.Option("--archs", metavar="LIST", help='Compute capabilities of the cards, "6.1;12.0".')
    ],
    version: _Version = None,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", metavar="N", min=1, help="Compiler jobs; what fits in memory if left out."),
    ] = None,
    dry_run: _DryRun = False,
    yes: _Yes = False,
    facts: Annotated[Path | None, typer.Option("--facts", metavar="FILE", help="Check a recorded machine.")] = None,
) -> None:
    """Build torch from source, after checking that it can work.

    A dry run exits with 1 if something is missing.
    """
    from outrider.machine.build import build as make
    from outrider.machine.build import check_met

    store, _ = _places()
    plan = _build_plan(archs, version, jobs, facts)
    if dry_run or facts:
        _show_build(plan, store)
        raise typer.Exit(0 if all(check.is_met for check in plan.checks) else 1)
    check_met(plan)
    if not yes:
        from outrider.cli.setup import ask

        ask(f"build torch {plan.torch} for {', '.join(plan.archs)}, in about {plan.hours:.1f} hours?")
    typer.echo(_row(make(plan, store), None))


@app.command(epilog="Example: outrider torch activate 2.13-cu126")
def activate(name: _Name) -> None:
    """Activate a variant for this project."""
    from outrider.machine.variants import activate as choose

    store, project = _places()
    choose(project, store, name)
    typer.echo(f"{name} is active in this project; `outrider run` uses it", err=True)


@app.command(epilog="Example: outrider torch remove 2.13-cu126")
def remove(name: _Name, yes: _Yes = False) -> None:
    """Remove a variant; asks first if this project uses it."""
    from outrider.machine.variants import deactivate

    store, project = _places()
    store.check(name)
    is_active = _active(project) == name
    if is_active and not yes:
        from outrider.cli.setup import ask

        ask(f"{name} is active in this project, remove it?")
    store.remove(name)
    if is_active:
        deactivate(project)
    typer.echo(f"{name} is removed", err=True)


@app.command(epilog="Example: outrider torch info 2.13-cu126")
def info(name: _Name, as_json: _Json = False) -> None:
    """Show everything about one variant."""
    store, _ = _places()
    variant = store.get(name)
    record = {**_encode(variant), "interpreter": str(store.interpreter(name))}
    if as_json:
        typer.echo(json.dumps(record, indent=2))
        return
    shown = {**record, "size": _size(variant)}
    rows = [(key, value) for key, value in shown.items() if key not in ("schema_version", "size_bytes")]
    typer.echo("\n".join(f"{key:<12} {_shown(value)}" for key, value in rows))


@app.command(epilog="Example: outrider torch refresh")
def refresh() -> None:
    """Ask each variant for the architectures that it supports.

    Shows differences from the wheel table. Exit code 1 if a variant is broken.
    """
    names = _places()[0].names()
    if not names:
        say(_NONE)
    num_broken = 0
    for name in names:
        try:
            _refresh(name)
        except OutriderError as error:
            num_broken += 1
            say(error_text(error))
    raise typer.Exit(1 if num_broken else 0)


def _refresh(name: str) -> None:
    from outrider.machine.install import refresh as ask_again
    from outrider.machine.wheels import load_table, table_difference

    store, project = _places()
    variant = ask_again(name, store)
    typer.echo(_row(variant, _active(project)))
    difference = table_difference(load_table(), torch=variant.torch, backend=variant.backend, archs=variant.archs)
    if difference:
        typer.echo(f"    {difference}")


def _recipe(backend: str, version: str | None, only_torch: bool) -> InstallRecipe:
    from outrider.machine.install import InstallRecipe
    from outrider.machine.wheels import check_backend, check_version, load_table

    table = load_table()
    torch = check_version(version, table) if version else None
    if backend == "auto":
        from outrider.machine.detect import detect_machine
        from outrider.machine.install_plan import single_recipe

        return single_recipe(detect_machine(Path.cwd()), table, torch=torch, with_outrider=not only_torch)
    wanted = torch or (None if backend.startswith("rocm") else table.preferred)
    check_backend(backend, wanted or table.preferred, table)
    return InstallRecipe(torch=wanted, backend=backend, with_outrider=not only_torch)


def _build_plan(archs: str, version: str | None, jobs: int | None, recorded: Path | None) -> BuildPlan:
    from outrider.cli.setup import recorded_or_here
    from outrider.machine.build import parse_archs, plan_build
    from outrider.machine.wheels import check_version, load_table

    table = load_table()
    torch = check_version(version, table) if version else table.preferred
    store, _ = _places()
    known = recorded_or_here(recorded, store)
    return plan_build(known, table, archs=parse_archs(archs), torch=torch, jobs=jobs)


def _show_build(plan: BuildPlan, store: VariantStore) -> None:
    for check in plan.checks:
        _show_check(f"{'ok' if check.is_met else 'missing':<8} {check.what}: {check.detail}")
        if check.hint:
            _show_check(f"{'':<8} hint: {check.hint}")
    typer.echo(f"about {plan.hours:.1f} hours with {plan.jobs} jobs, a rough estimate")
    typer.echo("\n".join(f"export {key}='{value}'" for key, value in plan.environment.items()))
    _show_commands(plan.commands(store.path(plan.name)))


def _show_check(text: str) -> None:
    typer.echo("\n".join(textwrap.wrap(text, 80, subsequent_indent=" " * 9)))


def _show_commands(lines: tuple[tuple[str, ...], ...]) -> None:
    typer.echo("\n".join(shlex.join(line) for line in lines))


def _row(variant: Variant, active: str | None) -> str:
    mark = "*" if variant.name == active else " "
    kind = f"CUDA {variant.cuda}" if variant.cuda else f"ROCm {variant.hip}" if variant.hip else "CPU"
    archs = f"\n    {' '.join(variant.archs)}" if variant.archs else ""
    return f"{mark} {variant.name:<16} torch {variant.torch:<16} {kind:<10} {_size(variant):>9}{archs}"


def _size(variant: Variant) -> str:
    return f"{variant.size_bytes / 2**30:.1f} GiB" if variant.size_bytes is not None else "?"


def _shown(value: object) -> str:
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if text and value is not None else "-"


def _encode(variant: Variant) -> dict[str, object]:
    from outrider.machine.codec import encode

    return dict(encode(variant))


def _active(project: Path) -> str | None:
    from outrider.machine.variants import active_variant

    return active_variant(project)


def _places() -> tuple[VariantStore, Path]:
    from outrider.machine.variants import VariantStore, project_root

    return VariantStore.of_user(), project_root(Path.cwd())
