"""Decides whether a project name can be a folder, a distribution and a package at once, and what would do instead.

Creates nothing. Called by project.
"""

from __future__ import annotations

import keyword
import re
import sys
import unicodedata

from outrider.errors import ConfigError

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
