"""Turns a resolution into a plan of steps with reasons, commands, size and time, and carries it out.

Which build fits is decided by resolve; how one is made by install and build. Called by `outrider setup`.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from outrider.errors import ConfigError, DeviceError
from outrider.machine.build import BuildPlan, build, check_met, plan_build
from outrider.machine.install import InstallRecipe, commands, install
from outrider.machine.machine_facts import Facts
from outrider.machine.torch_choice import TorchChoice, TorchEnvironment, Way, resolve
from outrider.machine.variants import VariantStore, activate
from outrider.machine.wheels import WheelTable

_GIB = 2**30
_WIDTH = 80
_DOWNLOAD_BYTES = {"cpu": _GIB // 4, "cuda": 3 * _GIB, "conda": 3 * _GIB, "source": _GIB}
"""Approximate size of a build with its libraries."""
_DISK_BYTES = {"cpu": _GIB, "cuda": 7 * _GIB, "conda": 8 * _GIB, "source": 40 * _GIB}

_TITLES: dict[Way, str] = {
    "cpu": "the CPU build",
    "wheel": "one wheel for all cards",
    "conda": "the conda-forge build, the only prebuilt one for all cards",
    "groups": "one environment per group of cards",
    "build": "a source build, the last resort",
    "none": "nothing can work as it is",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class InstallStep:
    """One environment to create; `build` if it is compiled here."""

    recipe: InstallRecipe
    cards: tuple[str, ...]
    commands: tuple[tuple[str, ...], ...]
    download_bytes: int
    disk_bytes: int
    build: BuildPlan | None = None
    is_installed: bool = False

    @property
    def name(self) -> str:
        return self.build.name if self.build else self.recipe.name


@dataclass(frozen=True, kw_only=True, slots=True)
class InstallPlan:
    """The actions of setup, with reasons; `steps` is empty if nothing can work."""

    resolution: TorchChoice
    steps: tuple[InstallStep, ...]

    @property
    def missing(self) -> tuple[InstallStep, ...]:
        """The environments that are not there yet."""
        return tuple(step for step in self.steps if not step.is_installed)

    @property
    def disk_bytes(self) -> int:
        return sum(step.disk_bytes for step in self.missing)


def make_plan(
    resolution: TorchChoice, *, facts: Facts, table: WheelTable, store: VariantStore, torch: str | None = None
) -> InstallPlan:
    """The steps for a resolution; `torch` is the version that was asked for, to the patch level if so written."""
    exact = [replace(item, torch=torch or item.torch) for item in resolution.environments]
    steps = tuple(_step(item, facts=facts, table=table, store=store) for item in exact)
    return InstallPlan(resolution=resolution, steps=steps)


def single_recipe(facts: Facts, table: WheelTable, *, torch: str | None, with_outrider: bool) -> InstallRecipe:
    """The one build that fits all cards here; an error if there is no such build."""
    resolution = resolve(facts, table=table, torch=torch)
    if resolution.way not in ("cpu", "wheel", "conda"):
        raise ConfigError(
            f"no single build fits the cards here: {'; '.join(resolution.reasons)}",
            hint="run `outrider setup --dry-run`",
        )
    (environment,) = resolution.environments
    version = torch or environment.torch or (table.preferred if environment.backend == "cpu" else None)
    return InstallRecipe(torch=version, backend=environment.backend, with_outrider=with_outrider)


def carry_out(plan: InstallPlan, *, store: VariantStore, project: Path) -> None:
    """Make every environment of the plan that is not there yet, and activate the first for the project."""
    for step in plan.missing:
        _make(step, store)
    activate(project, store, plan.steps[0].name)


def check_possible(plan: InstallPlan, facts: Facts) -> None:
    """An error if the disk is too small for the plan, or a source build lacks what it needs."""
    for step in plan.missing:
        if step.build:
            check_met(step.build)
    free = facts.disk.free_bytes
    if free is not None and free < plan.disk_bytes:
        raise DeviceError(
            f"the plan takes about {_gib(plan.disk_bytes)} of disk, {_gib(free)} are free",
            hint="make room, or set OUTRIDER_HOME to a folder on a larger disk",
        )


def render_plan(plan: InstallPlan) -> str:
    """The plan as text: the kind of installation, the reasons, rejected alternatives, the commands."""
    return "\n".join(_plan_lines(plan)) + "\n"


def _make(step: InstallStep, store: VariantStore) -> None:
    if step.build:
        build(step.build, store)
    else:
        install(step.recipe, store)


def _step(item: TorchEnvironment, *, facts: Facts, table: WheelTable, store: VariantStore) -> InstallStep:
    torch = item.torch or (table.preferred if item.backend == "cpu" else None)
    recipe = InstallRecipe(torch=torch, backend=item.backend)
    kind = next((kind for kind in ("cpu", "conda", "source") if item.backend.startswith(kind)), "cuda")
    plan = None
    if kind == "source":
        plan = plan_build(facts, table, archs=item.archs, torch=torch or table.preferred, jobs=None)
    name = plan.name if plan else recipe.name
    folder = store.path(name)
    return InstallStep(
        recipe=recipe,
        cards=item.cards,
        commands=plan.commands(folder) if plan else commands(recipe, folder),
        download_bytes=_DOWNLOAD_BYTES[kind],
        disk_bytes=_DISK_BYTES[kind],
        build=plan,
        is_installed=name in store.names(),
    )


def _plan_lines(plan: InstallPlan) -> Iterator[str]:
    resolution = plan.resolution
    yield f"plan: {_TITLES[resolution.way]}"
    yield from _bullets("why", resolution.reasons)
    yield from _bullets("not", resolution.rejected)
    yield from _bullets("way out", resolution.ways_out)
    for number, step in enumerate(plan.steps, start=1):
        yield ""
        yield from _step_lines(number, step)


def _step_lines(number: int, step: InstallStep) -> Iterator[str]:
    cards = f" for {' and '.join(dict.fromkeys(step.cards))}" if step.cards else ""
    yield from textwrap.wrap(f"{number}. {step.name}{cards}", _WIDTH, subsequent_indent="   ")
    if step.is_installed:
        yield "   installed already"
        return
    yield f"   about {_gib(step.download_bytes)} to download, {_gib(step.disk_bytes)} on disk"
    if step.build:
        yield f"   about {step.build.hours:.1f} hours with {step.build.jobs} jobs"
        for check in step.build.checks:
            yield f"   {'ok' if check.is_met else 'missing':<8} {check.what}: {check.detail}"
        yield "   " + " ".join(f"{key}={shlex.quote(value)}" for key, value in step.build.environment.items())
    for command in step.commands:
        # Not wrapped, so that commands can be copied.
        yield f"   $ {shlex.join(command)}"


def _bullets(label: str, texts: tuple[str, ...]) -> Iterator[str]:
    for text in texts:
        yield from textwrap.wrap(f"  {label + ':':<9}{text}", _WIDTH, subsequent_indent=" " * 11)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB"
