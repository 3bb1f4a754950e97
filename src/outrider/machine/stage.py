"""Keeps a variant whole or absent: a staging folder, a lock per name, and a look at the finished torch.

What an interrupted install left is swept by the next of the same name. Knows no commands. Called by install and build.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from outrider.errors import ConfigError, DeviceError
from outrider.machine import child, torches
from outrider.machine.facts import TorchBuild
from outrider.machine.variants import RECORD, Store, Variant, size_of
from outrider.machine.wheels import cuda_of


@contextmanager
def staging(name: str, store: Store, *, is_relocatable: bool) -> Iterator[Path]:
    """A folder that becomes the variant when the block ends well, and goes when it does not."""
    store.folder.mkdir(parents=True, exist_ok=True)
    with _locked(name, store):
        sweep(store, name)
        if (store.path(name) / RECORD).exists():
            raise ConfigError(f"torch variant {name} is installed already", hint=f"outrider torch remove {name}")
        # Conda writes its prefix into files, so it must be made where it will live; its record comes last.
        folder = store.folder / f".partial-{name}" if is_relocatable else store.path(name)
        try:
            yield folder
            if is_relocatable:
                folder.rename(store.path(name))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


def sweep(store: Store, name: str) -> None:
    """Remove what a killed install of this name left; the caller holds its lock."""
    shutil.rmtree(store.folder / f".partial-{name}", ignore_errors=True)
    if store.path(name).exists() and not (store.path(name) / RECORD).exists():
        shutil.rmtree(store.path(name))


@contextmanager
def _locked(name: str, store: Store) -> Iterator[None]:
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
    """Run one command of an install, its talk shown; an error where it fails."""
    code = child.run_shown(command, folder=folder, environment=environment)
    if code != 0:
        raise ConfigError(
            f"`{shlex.join(command)}` ended with exit code {code}",
            hint="its own message is above; nothing was installed",
        )


def inspect_variant(folder: Path, *, name: str, backend: str) -> Variant:
    """What the torch in this environment says of itself; an error where it is broken or another build."""
    build = torches.ask_torch(str(folder / "bin" / "python"), origin=name)
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
