"""Creates a project from a template, and checks that its name can be a folder, a distribution and a package at once.

Called by `outrider init`.
"""

from __future__ import annotations

import keyword
import re
import shutil
import sys
import unicodedata
from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path, PurePosixPath

from outrider._version import __version__
from outrider.errors import ConfigError, nearest

_TAKEN = frozenset({"torch", "numpy", "outrider", "train", "tests", "test", "jobs", "pytest"})
_FALLBACK = "my-project"


def check_name(name: str) -> str:
    """The name, if it is fit; else an error that says why and names one that is."""
    problem = _problem(name)
    if problem:
        raise ConfigError(f"{problem}, got {name!r}", hint=f"for example {_suggestion(name)!r}")
    return name


def package_of(name: str) -> str:
    """The package to import, of a fit project name."""
    return name.replace("-", "_").lower()


def _problem(name: str) -> str | None:
    package = package_of(name)
    if not name:
        return "a project needs a name"
    if "/" in name or "\\" in name:
        return "a project name is not a path (see --directory)"
    if re.search(r"\s", name):
        return "a project name has no spaces"
    if not name.isascii():
        return "a project name has only ASCII letters, digits, - and _"
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        return "a project name has only letters, digits, - and _"
    if not re.fullmatch(r"[A-Za-z]([A-Za-z0-9_-]*[A-Za-z0-9])?", name):
        return "a project name starts with a letter and ends with a letter or digit"
    if keyword.iskeyword(package) or keyword.iskeyword(name):
        return "a project name cannot be a Python keyword"
    if package in sys.stdlib_module_names or package in _TAKEN:
        return f"a project name cannot hide the module {package!r}"
    return None


def _suggestion(name: str) -> str:
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    words = re.sub(r"[^A-Za-z0-9_]+", "-", plain).strip("-_0123456789").lower()
    if words and _problem(words) is None:
        return words
    longer = f"my-{words}" if words else _FALLBACK
    return longer if _problem(longer) is None else _FALLBACK


TEMPLATES = ("loop", "train", "flow", "ray")
_PARTS = {"ray": ("common", "ray")}
"""Ray starts the ranks of its template; those of the others start with torchrun."""
_SUFFIX = ".jinja"
_EXECUTABLE = ".sh"
_RENAMED = {"gitignore": ".gitignore"}


def create_project(name: str, *, parent: Path, template: str) -> Path:
    """A new project folder `parent/name`; an error if it exists or the name is unfit."""
    check_name(name)
    _check_template(template)
    target = parent / name
    if target.exists() or target.is_symlink():
        raise ConfigError(
            f"{target} exists already, and nothing is overwritten", hint="choose another name or --directory"
        )
    if not parent.is_dir():
        raise ConfigError(f"there is no folder {parent}", hint="create it first")
    partial = parent / f".{name}.partial"
    try:
        _write_files(partial, name=name, template=template)
        partial.rename(target)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror}", hint="check permissions and free disk") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _check_template(template: str) -> None:
    if template not in TEMPLATES:
        close = nearest(template, TEMPLATES)
        guess = f"did you mean {close}? " if close else ""
        raise ConfigError(f"unknown template {template!r}", hint=f"{guess}templates are {', '.join(TEMPLATES)}")


def _write_files(folder: Path, *, name: str, template: str) -> None:
    from jinja2 import Environment, StrictUndefined

    shutil.rmtree(folder, ignore_errors=True)
    values = {"name": name, "package": package_of(name), "template": template, "outrider_version": __version__}
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True)
    for path, source in _template_files(template):
        target = folder / _target_path(path, values["package"])
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(environment.from_string(source.read_text(encoding="utf-8")).render(values), encoding="utf-8")
        if target.suffix == _EXECUTABLE:
            target.chmod(0o755)


def _template_files(template: str) -> Iterator[tuple[PurePosixPath, Traversable]]:
    root = resources.files("outrider.scaffold").joinpath("templates")
    for part in _PARTS.get(template, ("common", "torchrun", template)):
        yield from _walk(root.joinpath(part), PurePosixPath())


def _walk(folder: Traversable, path: PurePosixPath) -> Iterator[tuple[PurePosixPath, Traversable]]:
    for item in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if item.is_dir():
            yield from _walk(item, path / item.name)
        elif item.name.endswith(_SUFFIX):
            yield path / item.name.removesuffix(_SUFFIX), item


def _target_path(path: PurePosixPath, package: str) -> PurePosixPath:
    parts = [package if part == "package" else _RENAMED.get(part, part) for part in path.parts]
    return PurePosixPath(*parts)
