"""The commands that look after a machine work where no torch is installed, and installing Outrider brings none."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # an import of it fails as if it were not there
sys.argv = ["outrider", *sys.argv[1:]]
from outrider.cli.main import main
main()
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("diagnose", "--quick"),
        ("setup", "--dry-run"),
        ("torch", "list"),
        ("init", "stripes"),
        ("simulate", "--batches", "20"),
    ],
    ids=" ".join,
)
def test_a_command_works_without_torch(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    # 1 is a finding about the machine, where the command is there to make some.
    assert ended.returncode == 0 or (ended.returncode == 1 and arguments[0] in ("diagnose", "setup")), ended.stderr
    assert "Traceback" not in ended.stderr


def test_training_without_torch_ends_with_the_way_out(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, "demo"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 1
    assert ended.stderr.endswith("hint: `outrider diagnose` shows why, `outrider setup` installs one that fits\n")


def test_a_plain_installation_brings_no_torch() -> None:
    assert [name for name in PROJECT["dependencies"] if name.startswith("torch")] == []
    extras = PROJECT["optional-dependencies"]
    assert extras["torch"] == ["torch>=2.8"]
    assert "outrider[torch,bench,peers,watch]" in extras["dev"]
