"""`outrider torch`: torch builds side by side, one active per project.

Parses, calls, prints; the work is in outrider.machine. Needs no working torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from outrider.machine.build import BuildPlan
    from outrider.machine.install import Recipe
    from outrider.machine.variants import Store, Variant

app = typer.Typer(no_args_is_help=True, help="Torch builds side by side, exactly one active per project.")

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
        typer.echo("no torch variant is installed; see `outrider torch install --help`", err=True)


@app.command(epilog="Example: outrider torch install cu126 --version 2.13")
def install(
    backend: Annotated[str, typer.Argument(help="cpu, cu126, cu130, ..., or auto for what fits the cards here.")],
    version: Annotated[str | None, typer.Option("--version", metavar="X.Y", help="The torch version.")] = None,
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
    archs: Annotated[str, typer.Option("--archs", help='Compute capabilities, "6.1;12.0".')],
    version: Annotated[str | None, typer.Option("--version", metavar="X.Y", help="The torch version.")] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Compiler jobs; what fits in memory if left out.")
    ] = None,
    dry_run: _DryRun = False,
    yes: _Yes = False,
    facts: Annotated[Path | None, typer.Option("--facts", metavar="FILE", help="Check a recorded machine.")] = None,
) -> None:
    """Build torch from source, after checking that it can work."""
    from outrider.machine.build import build as make

    store, _ = _places()
    plan = _build_plan(archs, version, jobs, facts)
    if dry_run or facts:
        _show_build(plan, store)
        raise typer.Exit(0 if all(check.is_met for check in plan.checks) else 1)
    if not yes:
        from outrider.cli.setup import ask

        ask(f"build torch {plan.torch} for {', '.join(plan.archs)}, about {plan.hours:.1f} hours?")
    typer.echo(_row(make(plan, store), None))


@app.command(epilog="Example: outrider torch activate 2.13-cu126")
def activate(name: Annotated[str, typer.Argument(help="A name of `outrider torch list`.")]) -> None:
    """Make a variant the one that this project uses."""
    from outrider.machine.variants import activate as choose

    store, project = _places()
    choose(project, store, name)
    typer.echo(f"{name} is active in this project; `outrider run` uses it", err=True)


@app.command(epilog="Example: outrider torch remove 2.13-cu126")
def remove(name: Annotated[str, typer.Argument(help="A name of `outrider torch list`.")], yes: _Yes = False) -> None:
    """Remove a variant; asks where this project uses it."""
    from outrider.machine.variants import deactivate

    store, project = _places()
    store.get(name)
    is_active = _active(project) == name
    if is_active and not yes:
        from outrider.cli.setup import ask

        ask(f"{name} is active in this project, remove it?")
    store.remove(name)
    if is_active:
        deactivate(project)
    typer.echo(f"{name} is removed", err=True)


@app.command(epilog="Example: outrider torch info 2.13-cu126")
def info(name: Annotated[str, typer.Argument(help="A name of `outrider torch list`.")], as_json: _Json = False) -> None:
    """Show everything about one variant."""
    store, _ = _places()
    record = {**_encode(store.get(name)), "interpreter": str(store.interpreter(name))}
    if as_json:
        typer.echo(json.dumps(record, indent=2))
    else:
        typer.echo("\n".join(f"{key:<12} {_shown(value)}" for key, value in record.items() if key != "schema_version"))


@app.command(epilog="Example: outrider torch refresh")
def refresh() -> None:
    """Ask each variant what it really supports.

    Where the wheel table says something else, the difference is shown.
    """
    from outrider.machine.install import refresh as ask_again
    from outrider.machine.wheels import load_table, table_difference

    store, project = _places()
    for item in store.variants():
        variant = ask_again(item.name, store)
        typer.echo(_row(variant, _active(project)))
        difference = table_difference(load_table(), torch=variant.torch, backend=variant.backend, archs=variant.archs)
        if difference:
            typer.echo(f"  {difference}")


def _recipe(backend: str, version: str | None, only_torch: bool) -> Recipe:
    from outrider.machine.install import Recipe
    from outrider.machine.wheels import check_backend, check_version, load_table

    table = load_table()
    torch = check_version(version, table) if version else None
    if backend == "auto":
        from outrider.machine.detect import detect_machine
        from outrider.machine.setup import single_recipe

        return single_recipe(detect_machine(Path.cwd()), table, torch=torch, with_outrider=not only_torch)
    wanted = torch or (None if backend.startswith("rocm") else table.preferred)
    check_backend(backend, wanted or table.preferred, table)
    return Recipe(torch=wanted, backend=backend, with_outrider=not only_torch)


def _build_plan(archs: str, version: str | None, jobs: int | None, recorded: Path | None) -> BuildPlan:
    from outrider.machine.build import parse_archs, plan_build
    from outrider.machine.detect import detect_machine
    from outrider.machine.facts import load_facts
    from outrider.machine.wheels import check_version, load_table

    table = load_table()
    torch = check_version(version, table) if version else table.preferred
    known = load_facts(recorded) if recorded else detect_machine(Path.cwd())
    return plan_build(known, table, archs=parse_archs(archs), torch=torch, jobs=jobs)


def _show_build(plan: BuildPlan, store: Store) -> None:
    for check in plan.checks:
        typer.echo(f"{'ok' if check.is_met else 'missing':<8} {check.what}: {check.detail}")
        if check.hint:
            typer.echo(f"         hint: {check.hint}")
    typer.echo(f"about {plan.hours:.1f} hours with {plan.jobs} jobs, a rough estimate")
    typer.echo("\n".join(f"export {key}='{value}'" for key, value in plan.environment.items()))
    _show_commands(plan.commands(store.path(plan.name)))


def _show_commands(lines: tuple[tuple[str, ...], ...]) -> None:
    import shlex

    typer.echo("\n".join(shlex.join(line) for line in lines))


def _row(variant: Variant, active: str | None) -> str:
    mark = "*" if variant.name == active else " "
    kind = f"CUDA {variant.cuda}" if variant.cuda else f"ROCm {variant.hip}" if variant.hip else "CPU"
    size = f"{variant.size_bytes / 2**30:.1f} GiB" if variant.size_bytes is not None else "?"
    archs = f"\n    {' '.join(variant.archs)}" if variant.archs else ""
    return f"{mark} {variant.name:<16} torch {variant.torch:<16} {kind:<10} {size:>9}{archs}"


def _shown(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else "-" if value is None else str(value)


def _encode(variant: Variant) -> dict[str, object]:
    from outrider.machine.codec import encode

    return dict(encode(variant))


def _active(project: Path) -> str | None:
    from outrider.machine.variants import active_variant

    return active_variant(project)


def _places() -> tuple[Store, Path]:
    from outrider.machine.variants import Store, project_root

    return Store.of_user(), project_root(Path.cwd())
