"""Every command of the program, also those to come: it has help, an example, and a section in docs/cli.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from outrider.cli.main import app

DOCUMENT = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
WIDTH = 80


def walk(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from walk(child, (*path, name))


EVERYTHING = dict(walk(typer.main.get_command(app), ("outrider",)))
COMMANDS = {path: command for path, command in EVERYTHING.items() if not hasattr(command, "commands")}
every_command = pytest.mark.parametrize("path", COMMANDS, ids=" ".join)


def help_of(path: tuple[str, ...]) -> str:
    shown = CliRunner().invoke(app, [*path[1:], "--help"], env={"COLUMNS": str(WIDTH)})
    assert shown.exit_code == 0
    return shown.output


def section_of(path: tuple[str, ...]) -> str:
    parts = DOCUMENT.split(f"\n## `{' '.join(path)}`\n")
    assert len(parts) == 2, f"docs/cli.md has {len(parts) - 1} sections ## `{' '.join(path)}`"
    return parts[1].split("\n## ")[0]


def test_the_walk_reaches_commands_and_their_children() -> None:
    assert {("outrider", "demo"), ("outrider", "torch", "install")} <= set(COMMANDS)


@every_command
def test_every_command_says_what_it_does(path: tuple[str, ...]) -> None:
    assert COMMANDS[path].help


@pytest.mark.parametrize("path", [path for path in EVERYTHING if len(path) > 1], ids=" ".join)
def test_every_help_ends_with_an_example_of_that_command(path: tuple[str, ...]) -> None:
    example = EVERYTHING[path].epilog or ""
    assert example.startswith(f"Example: {' '.join(path)}")
    assert re.sub(r"\s+", " ", help_of(path)).strip().endswith(example)


@every_command
def test_every_option_says_what_it_does(path: tuple[str, ...]) -> None:
    shown = [parameter for parameter in COMMANDS[path].params if not getattr(parameter, "hidden", False)]
    assert [parameter.name for parameter in shown if not parameter.help] == []


@every_command
def test_every_help_fits_a_terminal(path: tuple[str, ...]) -> None:
    assert [line for line in help_of(path).splitlines() if len(line) > WIDTH] == []


@every_command
def test_every_command_and_option_has_its_place_in_the_document(path: tuple[str, ...]) -> None:
    section = section_of(path)
    options = [name for parameter in COMMANDS[path].params for name in parameter.opts if name.startswith("--")]
    assert [name for name in options if name != "--help" and f"`{name}" not in section] == []
    assert f"\n{' '.join(path)}" in section.split("```")[1]


def test_the_document_has_no_command_that_does_not_exist() -> None:
    headings = re.findall(r"^## `(outrider[^`]*)`$", DOCUMENT, re.MULTILINE)
    assert set(headings) == {" ".join(path) for path in COMMANDS} | {"outrider"}
