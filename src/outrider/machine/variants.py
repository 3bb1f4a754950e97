"""Torch environments side by side under the user's data folder, exactly one active per project.

Decides where variants are stored, which are complete, and which is active; `install` creates them. A variant exists
when its variant.json does, which is written last. Called by the command line, diagnose and setup.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from outrider.errors import ConfigError, DataError, nearest
from outrider.machine import codec

RECORD = "variant.json"
MARKERS = (".outrider", "pyproject.toml", ".git")


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """An installed torch environment, as it described itself when it was made or last refreshed."""

    name: str
    backend: str
    torch: str
    cuda: str | None = None
    hip: str | None = None
    archs: tuple[str, ...] = ()
    cudnn: str | None = None
    nccl: str | None = None
    python: str | None = None
    size_bytes: int | None = None
    schema_version: int = 1


@dataclass(frozen=True, slots=True)
class VariantStore:
    """The folder that holds all variants of a user."""

    folder: Path

    @classmethod
    def of_user(cls) -> VariantStore:
        """OUTRIDER_HOME, else XDG_DATA_HOME/outrider, else ~/.local/share/outrider."""
        home = os.environ.get("OUTRIDER_HOME")
        data = os.environ.get("XDG_DATA_HOME")
        base = Path(home) if home else (Path(data) if data else Path.home() / ".local" / "share") / "outrider"
        return cls(base / "torch")

    def path(self, name: str) -> Path:
        return self.folder / name

    def interpreter(self, name: str) -> Path:
        return self.path(name) / "bin" / "python"

    def names(self) -> tuple[str, ...]:
        """The names of all whole variants."""
        found = sorted(path.parent.name for path in self.folder.glob(f"*/{RECORD}"))
        return tuple(name for name in found if not name.startswith("."))

    def variants(self) -> tuple[Variant, ...]:
        """Every whole variant, by name."""
        return tuple(map(self.get, self.names()))

    def get(self, name: str) -> Variant:
        """One variant, or an error that names the nearest."""
        self.check(name)
        try:
            return codec.read(Variant, self.path(name) / RECORD)
        except DataError as error:
            raise DataError(
                f"torch variant {name} cannot be read: {error.message}",
                hint=f"take it away and install it again: outrider torch remove {name}",
            ) from error

    def check(self, name: str) -> None:
        """The error for an unknown variant, with the nearest name."""
        known = self.names()
        if name in known:
            return
        close = nearest(name, known)
        listed = f"installed: {', '.join(known)}" if known else "none is installed: outrider torch install auto"
        raise ConfigError(f"no torch variant {name!r}", hint=f"did you mean {close!r}? {listed}" if close else listed)

    def interpreters(self, project: Path) -> dict[str, Path]:
        """Name to interpreter, the project's active variant first."""
        active = active_variant(project)
        names = sorted(self.names(), key=lambda name: (name != active, name))
        return {name: self.interpreter(name) for name in names}

    def remove(self, name: str) -> None:
        """Remove a variant; renamed first, so that a partly removed one is never listed."""
        self.check(name)
        doomed = self.folder / f".removed-{name}-{os.getpid()}"
        self.path(name).rename(doomed)
        shutil.rmtree(doomed)


def existing_folder(path: Path) -> Path:
    """The nearest existing parent folder, whose disk `path` will be on."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())


def project_root(folder: Path) -> Path:
    """The nearest folder upwards that looks like a project, else the folder itself."""
    for candidate in (folder, *folder.parents):
        if any((candidate / marker).exists() for marker in MARKERS):
            return candidate
    return folder


def active_variant(project: Path) -> str | None:
    """The variant that this project uses, by `.outrider/torch`."""
    try:
        return (project / ".outrider" / "torch").read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def activate(project: Path, store: VariantStore, name: str) -> None:
    """Activate a variant for this project."""
    store.check(name)
    folder = project / ".outrider"
    folder.mkdir(exist_ok=True)
    partial = folder / "torch.partial"
    partial.write_text(f"{name}\n", encoding="utf-8")
    partial.replace(folder / "torch")


def deactivate(project: Path) -> None:
    """Make the project use the Python that runs Outrider."""
    (project / ".outrider" / "torch").unlink(missing_ok=True)


def active_interpreter(project: Path, store: VariantStore) -> Path | None:
    """The Python of the active variant; an error if it no longer exists."""
    name = active_variant(project)
    if name is None:
        return None
    if name not in store.names():
        raise ConfigError(
            f"torch variant {name} is active in this project, but not installed",
            hint=f"install it, choose another with `outrider torch activate`, or delete {project / '.outrider/torch'}",
        )
    return store.interpreter(name)


def project_python() -> str:
    """The Python for scripts of the project in the working folder: that of its active variant, or this one."""
    path = active_interpreter(project_root(Path.cwd()), VariantStore.of_user())
    if path is None:
        return sys.executable
    if not path.exists():
        name = path.parent.parent.name
        raise ConfigError(
            f"the Python of torch variant {name} is gone: {path}",
            hint=f"outrider torch remove {name}, then install it again",
        )
    return str(path)


def size_of(folder: Path) -> int:
    """Bytes that a folder takes, hard links counted once."""
    seen: dict[tuple[int, int], int] = {}
    for root, _, files in os.walk(folder):
        for name in files:
            status = os.lstat(os.path.join(root, name))
            seen[(status.st_dev, status.st_ino)] = status.st_size
    return sum(seen.values())
