"""`outrider init`: the path on stdout, the next command on stderr."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from outrider.cli.init import EPILOG, init

app = typer.Typer()
app.command(epilog=EPILOG)(init)


def test_the_path_of_the_project_is_the_output(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["stripes", "--directory", str(tmp_path)])
    assert result.exit_code == 0
    assert result.stdout == f"{tmp_path / 'stripes'}\n"
    assert (tmp_path / "stripes" / "train.py").exists()


def test_the_next_command_can_be_pasted(tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    result = CliRunner().invoke(app, ["stripes", "--directory", str(tmp_path / "a b")])
    assert result.stderr == f"next: make -C '{tmp_path}/a b/stripes' train\n"


def test_an_unknown_template_gets_the_nearest(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["stripes", "--directory", str(tmp_path), "--template", "flows"])
    assert str(result.exception) == (
        "unknown template 'flows'\nhint: did you mean flow? templates are loop, train, flow, ray"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_project_for_ray_says_that_ray_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["stripes", "--directory", str(tmp_path), "--template", "ray"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = CliRunner().invoke(app, command)
    assert result.stderr.splitlines()[0] == 'ray is not installed here: pip install "outrider[ray]"'
