"""Rules that keep the package readable: unique names, no import cycles, short functions."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "outrider"
MOST_LINES = 60
LONG_FUNCTIONS: dict[str, str] = {}
"""By `path:name`, with the reason why it may be longer."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def modules() -> dict[str, Path]:
    return {_module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def _module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def nodes(kind: type | tuple[type, ...]) -> Iterator[tuple[str, ast.AST]]:
    for path in modules().values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, kind):
                yield str(path.relative_to(PACKAGE)), node


def repeated(names: Iterator[str]) -> list[str]:
    return sorted(name for name, count in Counter(names).items() if count > 1)


def imports_of(module: str, path: Path, known: dict[str, Path]) -> set[str]:
    """Modules of the package that one imports anywhere in its text, for types and inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            # `from package import module` needs the module, not what else the package holds.
            found |= {name if name in known else node.module for name in inner}
    return (found & known.keys()) - {module}


def cycle(imports: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle; empty where no module does."""
    left = {module: set(needed) for module, needed in imports.items()}
    while free := [module for module, needed in left.items() if not needed & left.keys()]:
        for module in free:
            del left[module]
    return sorted(left)


def test_no_file_name_occurs_twice() -> None:
    names = (path.name for path in modules().values() if path.name not in ("__init__.py", "__main__.py"))
    assert repeated(names) == []


def test_no_class_name_occurs_twice() -> None:
    assert repeated(node.name for _, node in nodes(ast.ClassDef) if isinstance(node, ast.ClassDef)) == []


def test_no_module_imports_itself_by_a_detour() -> None:
    known = modules()
    assert cycle({module: imports_of(module, path, known) for module, path in known.items()}) == []


def test_a_circle_of_imports_is_found() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]


def test_functions_are_short() -> None:
    long = {
        f"{path}:{node.name}"
        for path, node in nodes((ast.FunctionDef, ast.AsyncFunctionDef))
        if isinstance(node, Function) and (node.end_lineno or 0) - node.lineno + 1 > MOST_LINES
    }
    assert long == set(LONG_FUNCTIONS)


def test_examples_and_guides_name_modules_that_exist() -> None:
    root, known = PACKAGE.parents[1], modules()
    texts = [path for folder in ("examples", "benchmarks", "docs") for path in (root / folder).rglob("*")]
    named = {
        (path.name, name)
        for path in texts
        if path.suffix in (".ipynb", ".md", ".py", ".sh")
        for name in re.findall(r"(?:from|import|-m) (outrider(?:\.\w+)+)", path.read_text())
    }
    assert sorted(one for one in named if one[1] not in known) == []


def test_the_oldest_versions_are_the_lowest_that_the_package_allows() -> None:
    root = PACKAGE.parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    # Frameworks are tested at their lowest versions as they are; the rest are tools of ours.
    extras = {
        name: wanted
        for name, wanted in project["optional-dependencies"].items()
        if name not in ("torch", "hf", "lightning", "ray", "peers", "dev", "integrations")
    }
    wanted = [*project["dependencies"], *(one for each in extras.values() for one in each)]
    bounds = dict(one.split(">=") for one in wanted if ">=" in one)
    pins = dict(line.split("==") for line in (root / "oldest.txt").read_text().splitlines() if "==" in line)
    assert pins.keys() == bounds.keys()
    assert {name: version for name, version in pins.items() if not f"{version}.".startswith(f"{bounds[name]}.")} == {}
