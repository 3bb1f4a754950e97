"""Pickles the function and data of the ranks into a private file, and reads it in a rank.

Decides which modules are pickled by value (code that a rank could not import). If an option cannot be pickled, the
error names it. Called by the launcher in the starter and by `rank_main` in a rank; nothing else is ever unpickled.
"""

from __future__ import annotations

import errno
import os
import pickle
import site
import stat
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from outrider.errors import ConfigError, OutriderError, named

_SEND_HINT = "pass a function that makes it, or open files and locks inside the rank"


def write_payload(path: Path, target: Callable[..., None], payload: Mapping[str, object]) -> None:
    """Pickle target and payload together, so that shared objects stay shared."""
    try:
        with _unimportable_modules_by_value(), _create_private(path) as file:
            cloudpickle.dump((target, dict(payload)), file)
    except Exception as error:
        raise _explain(error, path, {"target": target, **payload}) from error


def read_payload(path: Path) -> tuple[Callable[..., None], dict[str, Any]]:
    try:
        with open(path, "rb") as file:
            _check_private(path, file.fileno())
            target, payload = pickle.load(file)
    except OutriderError:
        raise
    except Exception as error:
        raise ConfigError(
            f"what the starter sent cannot be read here: {named(error)}",
            hint=f"see that {sys.executable} can import what the starter can",
        ) from error
    return target, payload


def _check_private(path: Path, descriptor: int) -> None:
    """Check that only this user could have written or replaced the file, because loading a pickle runs code."""
    for what, status in ((path, os.fstat(descriptor)), (path.parent, os.stat(path.parent))):
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise ConfigError(
                f"{what} is not private: owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o}",
                hint="set TMPDIR to a folder where you alone may write, on a disk that keeps owners and modes",
            )


def _create_private(path: Path) -> Any:
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def _explain(error: Exception, path: Path, parts: Mapping[str, object]) -> OutriderError:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ConfigError(
            f"no room in {path.parent.parent} for what the ranks need: {error.strerror}",
            hint="set TMPDIR to a folder with room",
        )
    for name, part in parts.items():
        reason = _why_not_sent(part)
        if reason is not None:
            return ConfigError(f"{name} cannot be sent to the ranks: {reason}", hint=_SEND_HINT)
    return ConfigError(f"the options cannot be sent to the ranks: {error}", hint=_SEND_HINT)


def _why_not_sent(part: object) -> str | None:
    try:
        with _unimportable_modules_by_value():
            cloudpickle.dumps(part)
    except Exception as error:
        return str(error)
    return None


@contextmanager
def _unimportable_modules_by_value() -> Iterator[None]:
    """Pickle modules by value if a fresh interpreter would not find them, for example test modules."""
    chosen = cloudpickle.list_registry_pickle_by_value()
    modules = [module for module in _modules_of_user() if module.__name__ not in chosen and not _is_importable(module)]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def _modules_of_user() -> list[ModuleType]:
    """Imported modules, except the standard library and the installed packages, which every rank has."""
    libraries = library_folders()
    return [
        module
        for name, module in list(sys.modules.items())
        if name != "__main__"
        and isinstance(module, ModuleType)
        and name == module.__name__
        and isinstance(getattr(module, "__file__", None), str)
        and not str(module.__file__).startswith(libraries)
    ]


def library_folders() -> tuple[str, ...]:
    """The folders of the standard library and the installed packages of this interpreter."""
    paths = sysconfig.get_paths()
    own = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders = {*own, *site.getsitepackages(), site.getusersitepackages()}
    return tuple(os.path.join(folder, "") for folder in folders)


def _is_importable(module: ModuleType) -> bool:
    """Whether a fresh interpreter with this one's sys.path imports the same file under this name."""
    try:
        spec = _search(module.__name__)
    except (ImportError, AttributeError, KeyError, ValueError):
        return False
    return (
        spec is not None
        and spec.origin is not None
        and os.path.realpath(spec.origin) == os.path.realpath(str(module.__file__))
    )


def _search(name: str) -> ModuleSpec | None:
    """Find the spec of a module without consulting sys.modules, unlike importlib.util.find_spec."""
    parent_name = name.rpartition(".")[0]
    parent = _search(parent_name) if parent_name else None
    if parent_name and (parent is None or parent.submodule_search_locations is None):
        return None
    locations = None if parent is None else list(parent.submodule_search_locations or ())
    for finder in sys.meta_path:
        spec = finder.find_spec(name, locations)
        if spec is not None:
            return spec
    return None
