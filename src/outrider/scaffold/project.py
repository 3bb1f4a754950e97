"""Writes a new project from a template, whole or not at all, and never over something that is there.

What a project contains is in templates/; whether its name is fit is decided by names. Called by `outrider init`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path, PurePosixPath

from outrider._version import __version__
from outrider.errors import ConfigError, nearest
from outrider.scaffold.names import check_name, package_of

TEMPLATES = ("loop", "train", "flow")
_SUFFIX = ".jinja"
_EXECUTABLE = ".sh"
_RENAMED = {"gitignore": ".gitignore"}


def create_project(name: str, *, parent: Path, template: str) -> Path:
    """A new project folder `parent/name`; an error where it exists or the name is unfit."""
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
    for part in ("common", template):
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
