"""Makes torch variants, whole or not at all: a virtual environment by uv, or a conda environment.

Decides the commands of an installation. A staging folder and a lock per name keep a half-made variant out of sight, and
the finished torch is imported once before it counts. Called by `setup`, `torch install` and the source build.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from outrider._version import __version__
from outrider.errors import ConfigError, DeviceError
from outrider.machine import child_process, codec
from outrider.machine.detect import ask_torch
from outrider.machine.machine_facts import TorchBuild
from outrider.machine.variants import RECORD, Variant, VariantStore, size_of
from outrider.machine.wheels import cuda_of


@contextmanager
def staging(name: str, store: VariantStore, *, is_relocatable: bool) -> Iterator[Path]:
    """A folder that becomes the variant if the block succeeds, and is removed otherwise."""
    store.folder.mkdir(parents=True, exist_ok=True)
    with _locked(name, store):
        sweep(store, name)
        if (store.path(name) / RECORD).exists():
            raise ConfigError(f"torch variant {name} is installed already", hint=f"outrider torch remove {name}")
        # Conda writes its prefix into files, so it must be created at its final place; its record is written last.
        folder = store.folder / f".partial-{name}" if is_relocatable else store.path(name)
        try:
            yield folder
            if is_relocatable:
                folder.rename(store.path(name))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


def sweep(store: VariantStore, name: str) -> None:
    """Remove the remains of a killed install of this name; the caller holds its lock."""
    shutil.rmtree(store.folder / f".partial-{name}", ignore_errors=True)
    if store.path(name).exists() and not (store.path(name) / RECORD).exists():
        shutil.rmtree(store.path(name))


@contextmanager
def _locked(name: str, store: VariantStore) -> Iterator[None]:
    with open(store.folder / f".lock-{name}", "a+", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            raise ConfigError(
                f"torch variant {name} is being installed by process {lock.read().strip() or '?'}",
                hint="wait for it to end",
            ) from error
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def run_step(
    command: Sequence[str], *, folder: Path | None = None, environment: Mapping[str, str] | None = None
) -> None:
    """Run one command of an install and show its output; an error if it fails."""
    code = child_process.run_shown(command, folder=folder, environment=environment)
    if code != 0:
        raise ConfigError(
            f"`{shlex.join(command)}` ended with exit code {code}",
            hint="its own message is above; nothing was installed",
        )


def inspect_variant(folder: Path, *, name: str, backend: str) -> Variant:
    """Ask the torch in this environment for its facts; an error if it is broken or another build."""
    build = ask_torch(str(folder / "bin" / "python"), origin=name)
    if build is None or build.error is not None or build.version is None:
        why = build.error if build else "it was not installed"
        raise DeviceError(
            f"the torch of {name} cannot be imported: {why}", hint="install it again, or take another build"
        )
    _check_backend(backend, build)
    return Variant(
        name=name,
        backend=backend,
        torch=build.version,
        cuda=build.cuda,
        hip=build.hip,
        archs=build.archs,
        cudnn=build.cudnn,
        nccl=build.nccl,
        python=build.python,
        size_bytes=size_of(folder),
    )


def _check_backend(backend: str, build: TorchBuild) -> None:
    """An index or a folder of wheels may hold another build than its name says."""
    wanted = cuda_of(backend) or None
    is_right = (build.hip is not None) if backend.startswith("rocm") else build.cuda == wanted
    if not is_right:
        got = f"CUDA {build.cuda}" if build.cuda else "no CUDA"
        raise DeviceError(
            f"{backend} was asked for, torch {build.version} with {got} came",
            hint="check OUTRIDER_FIND_LINKS and uv's index settings; nothing was installed",
        )


FIND_LINKS = "OUTRIDER_FIND_LINKS"
"""A folder or page of wheels to take torch from, instead of the index of the backend."""
_CONDA_PROGRAMS = ("micromamba", "mamba", "conda")


@dataclass(frozen=True, kw_only=True, slots=True)
class InstallRecipe:
    """A variant to install."""

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
    """A program that creates conda environments."""
    found = next(filter(None, map(shutil.which, _CONDA_PROGRAMS)), None)
    if found is None:
        raise ConfigError(
            f"the conda-forge build needs one of {', '.join(_CONDA_PROGRAMS)}, none is on PATH",
            hint="install micromamba, or take another way: outrider setup --way groups",
        )
    return found


def commands(recipe: InstallRecipe, folder: Path) -> tuple[tuple[str, ...], ...]:
    """The commands that fill `folder`, also for display; missing programs are given by name."""
    python = str(folder / "bin" / "python")
    if recipe.is_conda:
        made = [_conda_command(recipe, folder)]
    else:
        made = [
            ("uv", "venv", "--relocatable", "--python", sys.executable, str(folder)),
            ("uv", "pip", "install", "--python", python, *_backend_arguments(recipe), _pin("torch", recipe.torch)),
        ]
    if recipe.with_outrider:
        made.append(("uv", "pip", "install", "--python", python, *_backend_arguments(recipe), *outrider_requirement()))
    return tuple(made)


def install(recipe: InstallRecipe, store: VariantStore) -> Variant:
    """Install a variant, or raise an error and leave nothing behind."""
    programs = {"uv": find_uv()} if not recipe.is_conda else {"uv": find_uv(), "conda": find_conda()}
    with staging(recipe.name, store, is_relocatable=not recipe.is_conda) as folder:
        for command in commands(recipe, folder):
            run_step((programs.get(command[0], command[0]), *command[1:]))
        variant = inspect_variant(folder, name=recipe.name, backend=recipe.backend)
        codec.write(variant, folder / RECORD)
    return variant


def refresh(name: str, store: VariantStore) -> Variant:
    """Ask an installed build for its facts again, and store them."""
    old = store.get(name)
    variant = inspect_variant(store.path(name), name=name, backend=old.backend)
    codec.write(variant, store.path(name) / RECORD)
    return variant


def _backend_arguments(recipe: InstallRecipe) -> tuple[str, ...]:
    links = os.environ.get(FIND_LINKS)
    if links:
        return ("--find-links", links)
    return () if recipe.is_conda else ("--torch-backend", recipe.backend)


def _conda_command(recipe: InstallRecipe, folder: Path) -> tuple[str, ...]:
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
    """The source of this Outrider installation: a checkout stays a checkout."""
    try:
        text = metadata.distribution("outrider").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        text = None
    if text is None:
        return (f"outrider=={__version__}",)
    found = json.loads(text)
    path = found["url"].removeprefix("file://")
    return ("--editable", path) if found.get("dir_info", {}).get("editable") else (path,)
