"""Prepares a source build of torch for a list of architectures, and checks first what would stop it hours later.

Decides nothing about which architectures are wanted. The estimates are rough and say so. Called by
`outrider torch build` and setup.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from outrider.errors import ConfigError
from outrider.machine import codec
from outrider.machine.install import find_uv, inspect_variant, outrider_requirement, run_step, staging
from outrider.machine.machine_facts import Facts, Toolkit
from outrider.machine.variants import RECORD, Variant, VariantStore
from outrider.machine.wheels import WheelTable, version_of

REPOSITORY = "https://github.com/pytorch/pytorch"
JOB_BYTES = 4 * 2**30
"""About what one compiler job takes at its peak on the largest CUDA files."""
DISK_BYTES = 40 * 2**30
BASE_CORE_HOURS = 8.0
CORE_HOURS_PER_ARCH = 4.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One thing that a build needs; `hint` says how to get it."""

    what: str
    is_met: bool
    detail: str
    hint: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildPlan:
    """Everything about a build before it starts."""

    torch: str
    archs: tuple[str, ...]
    jobs: int
    cuda: str
    """The toolkit's version; without one, the version to install."""
    toolkit: Toolkit | None
    hours: float
    checks: tuple[Check, ...]

    @property
    def backend(self) -> str:
        return f"source-cu{self.cuda.replace('.', '')}"

    @property
    def name(self) -> str:
        return f"{self.torch}-{self.backend}-{'-'.join(arch.replace('.', '') for arch in self.archs)}"

    @property
    def environment(self) -> dict[str, str]:
        home = {"CUDA_HOME": self.toolkit.path} if self.toolkit else {}
        return {"TORCH_CUDA_ARCH_LIST": ";".join(self.archs), "MAX_JOBS": str(self.jobs), **home}

    def commands(self, folder: Path) -> tuple[tuple[str, ...], ...]:
        """The commands of the build, in order; the environment goes to the last but one."""
        source, python = str(folder / "source"), str(folder / "bin" / "python")
        pip = ("uv", "pip", "install", "--python", python)
        tag = self.torch if self.torch.count(".") >= 2 else f"{self.torch}.0"
        clone = ("git", "clone", "--depth", "1", "--recurse-submodules", "--shallow-submodules")
        return (
            ("uv", "venv", "--relocatable", "--python", sys.executable, str(folder)),
            (*clone, "--branch", f"v{tag}", REPOSITORY, source),
            (*pip, "--requirement", f"{source}/requirements.txt"),
            (*pip, "--no-build-isolation", "--verbose", source),
            (*pip, *outrider_requirement()),
        )


def parse_archs(text: str) -> tuple[str, ...]:
    """`6.1;12.0`, also with commas or spaces."""
    archs = tuple(filter(None, re.split(r"[;,\s]+", text)))
    wrong = [arch for arch in archs if not re.fullmatch(r"\d{1,2}\.\d", arch)]
    if wrong or not archs:
        shown = ", ".join(wrong) or "nothing"
        raise ConfigError(
            f"architectures look like 6.1;12.0, got {shown}", hint='outrider torch build --archs "6.1;12.0"'
        )
    return archs


def plan_build(facts: Facts, table: WheelTable, *, archs: tuple[str, ...], torch: str, jobs: int | None) -> BuildPlan:
    """What a build would do here, with every check made."""
    chosen = jobs or _fitting_jobs(facts)
    toolkit = _fitting_toolkit(facts, table, archs)
    checks = (_compiler_check(), _git_check(), _toolkit_check(facts, toolkit, archs), *_room_checks(facts, chosen))
    hours = (BASE_CORE_HOURS + CORE_HOURS_PER_ARCH * len(archs)) / chosen
    cuda = toolkit.version if toolkit else next(iter(table.compilers(archs)), None)
    if cuda is None:
        raise ConfigError(f"no CUDA toolkit compiles for {' and '.join(archs)} at once", hint="build for fewer cards")
    return BuildPlan(torch=torch, archs=archs, jobs=chosen, cuda=cuda, toolkit=toolkit, hours=hours, checks=checks)


def check_met(plan: BuildPlan) -> None:
    """An error with everything that this machine lacks for the build."""
    unmet = [check for check in plan.checks if not check.is_met]
    if unmet:
        raise ConfigError(
            "this machine cannot build torch: " + "; ".join(f"{check.what}: {check.detail}" for check in unmet),
            hint="; ".join(check.hint for check in unmet if check.hint),
        )


def build(plan: BuildPlan, store: VariantStore) -> Variant:
    """Run a build whose checks are all met, or raise and leave nothing."""
    check_met(plan)
    uv = find_uv()
    with staging(plan.name, store, is_relocatable=True) as folder:
        for command in plan.commands(folder):
            program = uv if command[0] == "uv" else command[0]
            run_step((program, *command[1:]), environment=plan.environment)
        variant = inspect_variant(folder, name=plan.name, backend=plan.backend)
        shutil.rmtree(folder / "source")
        codec.write(variant, folder / RECORD)
    return variant


def _fitting_jobs(facts: Facts) -> int:
    threads = facts.cpu.usable or facts.cpu.threads or 1
    by_memory = (facts.memory.available_bytes or JOB_BYTES) // JOB_BYTES
    return max(1, min(threads, by_memory))


def _fitting_toolkit(facts: Facts, table: WheelTable, archs: tuple[str, ...]) -> Toolkit | None:
    fitting = [item for item in facts.toolkits if all(table.targets(item.version, arch) for arch in archs)]
    return max(fitting, key=lambda item: version_of(item.version), default=None)


def _toolkit_check(facts: Facts, toolkit: Toolkit | None, archs: tuple[str, ...]) -> Check:
    wanted = ", ".join(archs)
    if toolkit:
        return Check(what="CUDA toolkit", is_met=True, detail=f"{toolkit.version} at {toolkit.path} targets {wanted}")
    found = ", ".join(item.version for item in facts.toolkits) or "none"
    return Check(
        what="CUDA toolkit",
        is_met=False,
        detail=f"none found that targets {wanted} (found: {found})",
        hint="below 7.5 needs CUDA 12.9 or older, from 10.0 on 12.8 or newer: 12.8 and 12.9 do both",
    )


def _compiler_check() -> Check:
    names = (os.environ.get("CXX"), "g++", "clang++")
    found = next((path for path in (shutil.which(name) for name in names if name) if path), None)
    hint = None if found else "install g++ 11 or newer"
    return Check(what="C++ compiler", is_met=found is not None, detail=found or "none found", hint=hint)


def _git_check() -> Check:
    found = shutil.which("git")
    hint = None if found else "install git"
    return Check(what="git", is_met=found is not None, detail=found or "not found", hint=hint)


def _room_checks(facts: Facts, jobs: int) -> tuple[Check, Check]:
    memory, disk = facts.memory.available_bytes, facts.disk.free_bytes
    need = jobs * JOB_BYTES
    fits = memory is None or memory >= need
    has_room = disk is None or disk >= DISK_BYTES
    return (
        Check(
            what="memory",
            is_met=fits,
            detail=f"{jobs} jobs take about {_gib(need)}, {_gib(memory)} available",
            hint=None if fits else f"--jobs {max(1, (memory or 0) // JOB_BYTES)}",
        ),
        Check(
            what="disk",
            is_met=has_room,
            detail=f"about {_gib(DISK_BYTES)} needed, {_gib(disk)} free",
            hint=None if has_room else "make room, or set OUTRIDER_HOME to a larger disk",
        ),
    )


def _gib(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else f"{num_bytes / 2**30:.0f} GiB"
