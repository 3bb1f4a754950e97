"""The README keeps its word: every file is in its tree, and its first example is valid."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
MODULES = sorted(path for path in (ROOT / "src" / "outrider").rglob("*.py") if path.name != "__init__.py")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT / "src")))
def test_the_file_tree_names_every_module(path: Path) -> None:
    folder = f"src/{path.parent.relative_to(ROOT / 'src')}/"
    section = README.split(f"\n{folder} ")[1].split("\nsrc/")[0]
    assert re.search(rf"^  {re.escape(path.name)} +\S", section, re.MULTILINE)


def test_the_first_example_is_python() -> None:
    example = README.split("```python\n")[1].split("```")[0]
    assert len(example.strip().splitlines()) <= 13
    ast.parse(example)
