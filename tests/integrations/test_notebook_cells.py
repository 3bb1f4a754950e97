"""Training from the cells of a notebook: progress below the cell, the run as its value, the way out of a session."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("notebook_program.py")
WIDGET = "application/vnd.jupyter.widget-view+json"


def cells(folder: Path, *options: str) -> dict[str, Any]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("OUTRIDER_")}
    ended = subprocess.run(
        [sys.executable, str(PROGRAM), *options],
        cwd=folder,
        env={**variables, "OMP_NUM_THREADS": "1", "IPYTHONDIR": str(folder / "ipython")},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return cells(tmp_path_factory.mktemp("notebook"))


def test_train_shows_one_widget_and_then_the_run(shown: dict[str, Any]) -> None:
    train = shown["train"]
    assert train["error"] is None
    assert [WIDGET in formats for formats in train["outputs"]] == [True]
    assert "The run is finished: 3 epochs" in train["html"]
    assert "rank 1 (cpu@0.4)" in train["html"]


def test_a_session_on_one_device_shows_the_same(shown: dict[str, Any]) -> None:
    loop = shown["loop"]
    assert loop["error"] is None
    assert [WIDGET in formats for formats in loop["outputs"]] == [True]
    assert "The run is finished: 1 epoch" in loop["html"]


def test_a_session_on_two_devices_names_cells_as_the_way_out(shown: dict[str, Any]) -> None:
    assert "%%writefile script.py" in shown["two"]["error"]
    assert "`!outrider run --devices cpu,cpu@0.4 script.py`" in shown["two"]["error"]
    assert "outrider.train()" in shown["two"]["error"]


def test_without_widgets_one_line_of_text_is_replaced(tmp_path: Path) -> None:
    train = cells(tmp_path, "--without-widgets")["train"]
    assert train["error"] is None
    assert all(formats == ["text/plain"] for formats in train["outputs"])
    assert train["texts"][0] == "starting 2 ranks"
    assert train["texts"][-1] == ""
