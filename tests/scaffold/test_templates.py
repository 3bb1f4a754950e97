"""One project of each template, installed offline against this checkout, its tests run, and one epoch trained."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.scaffold.project import create_project

LIMIT_S = 300


def run(project: Path, *arguments: str) -> str:
    """The output of this Python in the project, with the installed copy of it in front."""
    search = os.pathsep.join([str(project / "installed"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": search, "PYTHONWARNINGS": "ignore"}
    ended = subprocess.run(
        [sys.executable, *arguments], cwd=project, env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.skipif(
    importlib.util.find_spec("hatchling") is None, reason="hatchling builds the project, and is missing"
)
@pytest.mark.parametrize("template", ["loop", "train", "flow"])
def test_a_new_project_installs_tests_itself_and_trains(template: str, tmp_path: Path) -> None:
    project = create_project("stripes", parent=tmp_path, template=template)
    offline = ("--no-index", "--no-deps", "--no-build-isolation", "--quiet")
    run(project, "-m", "pip", "install", *offline, "--target", "installed", ".")
    assert "6 passed" in run(project, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    output = run(project, "train.py", "--devices", "cpu,cpu@0.5", "--epochs", "1")
    assert "epoch 0: " in output
