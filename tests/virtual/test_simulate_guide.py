"""docs/simulate.md keeps its word: its examples run, and its table is what the command prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.cli.main import app

GUIDE = (Path(__file__).parents[2] / "docs" / "simulate.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE)
_, COMMAND, _, TABLE, *_ = GUIDE.split("\n```\n")


def test_the_guide_has_examples() -> None:
    assert len(EXAMPLES) == 3


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_of_the_guide_runs(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(EXAMPLES[number], f"example {number}", "exec"), {"__name__": "__main__"})
    assert len(capsys.readouterr().out.splitlines()) == (4, 3, 2)[number]


def test_the_table_of_the_guide_is_what_the_command_prints() -> None:
    assert CliRunner().invoke(app, shlex.split(COMMAND)[1:]).stdout == f"{TABLE}\n"
