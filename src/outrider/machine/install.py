"""Makes torch variants: a virtual environment by uv, or a conda environment, whole or not at all.

Knows the commands; that a variant is whole or absent is stage's work, and which build is wanted is decided by resolve
or the user. Called by the command line and setup.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from outrider._version import __version__
from outrider.errors import ConfigError
from outrider.machine import codec
from outrider.machine.stage import inspect_variant, run_step, staging
from outrider.machine.variants import RECORD, Store, Variant
from outrider.machine.wheels import cuda_of

FIND_LINKS = "OUTRIDER_FIND_LINKS"
"""A folder or page of wheels to take torch from, instead of the index of the backend."""
_CONDA_PROGRAMS = ("micromamba", "mamba", "conda")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A variant to make."""

    torch: str | None
    """`2.13`, `2.13.0`, or None for the newest."""
    backend: str
    with_outrider: bool = True

    @property
    def name(self) -> str:
        return f"{self.torch}-{self.backend}" if self.torch else self.backend

    @property
    def is_conda(self) -> bool:
        return self.backend.startswith("conda-")


def find_uv() -> str:
    """The uv program: on PATH, or beside this Python."""
    beside = Path(sys.executable).parent / "uv"
    found = shutil.which("uv") or (str(beside) if beside.exists() else None)
    if found is None:
        raise ConfigError(
            "uv was not found, neither on PATH nor beside this Python",
            hint="install it: pip install uv",
        )
    return found


def find_conda() -> str:
    """A program that makes conda environments."""
    found = next(filter(None, map(shutil.which, _CONDA_PROGRAMS)), None)
    if found is None:
        raise ConfigError(
            f"the conda-forge build needs one of {', '.join(_CONDA_PROGRAMS)}, none is on PATH",
            hint="install micromamba, or take another way: outrider setup --way groups",
        )
    return found


def commands(recipe: Recipe, folder: Path) -> tuple[tuple[str, ...], ...]:
    """The commands that fill `folder`, also for showing; programs by name where they are missing."""
    python = str(folder / "bin" / "python")
    if recipe.is_conda:
        made = [_conda_command(recipe, folder)]
    else:
        made = [
            ("uv", "venv", "--relocatable", "--python", sys.executable, str(folder)),
            ("uv", "pip", "install", "--python", python, *_torch_arguments(recipe)),
        ]
    if recipe.with_outrider:
        made.append(("uv", "pip", "install", "--python", python, *_backend_arguments(recipe), *outrider_requirement()))
    return tuple(made)


def install(recipe: Recipe, store: Store) -> Variant:
    """Make a variant, or raise and leave nothing."""
    programs = {"uv": find_uv()} if not recipe.is_conda else {"uv": find_uv(), "conda": find_conda()}
    with staging(recipe.name, store, is_relocatable=not recipe.is_conda) as folder:
        for command in commands(recipe, folder):
            run_step((programs.get(command[0], command[0]), *command[1:]))
        variant = inspect_variant(folder, name=recipe.name, backend=recipe.backend)
        codec.write(variant, folder / RECORD)
    return variant


def refresh(name: str, store: Store) -> Variant:
    """Ask an installed build again what it is, and write that down."""
    old = store.get(name)
    variant = inspect_variant(store.path(name), name=name, backend=old.backend)
    codec.write(variant, store.path(name) / RECORD)
    return variant


def _torch_arguments(recipe: Recipe) -> tuple[str, ...]:
    return (*_backend_arguments(recipe), _pin("torch", recipe.torch))


def _backend_arguments(recipe: Recipe) -> tuple[str, ...]:
    links = os.environ.get(FIND_LINKS)
    if links:
        return ("--find-links", links)
    return () if recipe.is_conda else ("--torch-backend", recipe.backend)


def _conda_command(recipe: Recipe, folder: Path) -> tuple[str, ...]:
    cuda = cuda_of(recipe.backend)
    python = f"python={sys.version_info.major}.{sys.version_info.minor}"
    packages = (
        python,
        f"pytorch={recipe.torch}.*" if recipe.torch else "pytorch",
        "pytorch-gpu",
        f"cuda-version={cuda}",
    )
    return ("conda", "create", "--yes", "--prefix", str(folder), "--channel", "conda-forge", *packages)


def _pin(package: str, version: str | None) -> str:
    if version is None:
        return package
    return f"{package}=={version}" if version.count(".") >= 2 else f"{package}=={version}.*"


def outrider_requirement() -> tuple[str, ...]:
    """This Outrider, from where it was installed: a checkout stays a checkout."""
    try:
        text = metadata.distribution("outrider").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        text = None
    if text is None:
        return (f"outrider=={__version__}",)
    found = json.loads(text)
    path = found["url"].removeprefix("file://")
    return ("--editable", path) if found.get("dir_info", {}).get("editable") else (path,)
