"""The guides keep their word: every example of docs/session.md runs, both sides of docs/adopting.md learn."""

from __future__ import annotations

import difflib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ADOPTING = (ROOT / "docs" / "adopting.md").read_text()
SESSION = (ROOT / "docs" / "session.md").read_text()
OWN_LOOP = (ROOT / "README.md").read_text().split("\n## Your own loop\n")[1].split("\n## ")[0]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


PREAMBLE, *EXAMPLES = blocks(SESSION, "python")
EXAMPLES += blocks((ROOT / "docs" / "cards.md").read_text(), "python")
DDP, AFTER_DDP, ACCELERATE, AFTER_ACCELERATE = blocks(ADOPTING, "python")
DIFF_OF_DDP, DIFF_OF_ACCELERATE = blocks(ADOPTING, "diff")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OUTRIDER_DEVICES", "cpu")


def run(code: str, *, starter: tuple[str, ...] = ()) -> list[float]:
    """Run a script as a user does; the accuracies that it printed."""
    Path("script.py").write_text(code)
    variables = {**os.environ, "OUTRIDER_DEVICES": "cpu,cpu", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *starter, "script.py"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return [float(number) for number in re.findall(r"accuracy ([\d.]+)%", done.stdout)]


def difference(before: str, after: str) -> str:
    """The lines that went and came, indentation aside."""
    stripped = [[line.strip() for line in text.splitlines()] for text in (before, after)]
    lines = difflib.unified_diff(*stripped, lineterm="", n=0)
    return "".join(f"{line}\n" for line in lines if not line.startswith(("---", "+++", "@@")))


def test_the_guide_has_examples() -> None:
    assert len(EXAMPLES) == 17


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_of_the_guide_runs(number: int) -> None:
    scope: dict[str, Any] = {}
    exec(PREAMBLE, scope)
    exec(EXAMPLES[number], scope)


def test_the_example_of_going_on_goes_on() -> None:
    [example] = [example for example in EXAMPLES if "resume=resume" in example]
    scope: dict[str, Any] = {}
    exec(PREAMBLE, scope)
    exec(example.replace("s.epochs(20)", "s.epochs(14)"), scope)
    exec(example, scope)
    record, timeline = (json.loads(Path(f"runs/long/{name}.json").read_text()) for name in ("record", "timeline"))
    assert [epoch["epoch"] for epoch in record["epochs"]] == list(range(20))
    assert [event["epoch"] for event in timeline["events"] if event["kind"] == "resume"] == [10]


@pytest.mark.parametrize("number", range(2))
def test_an_example_of_the_readme_runs(number: int) -> None:
    scope: dict[str, Any] = {}
    exec(PREAMBLE, scope)
    scope["model"] = scope["graph"] = scope["make_model"]()
    scope["optimizer"] = scope["torch"].optim.SGD(scope["model"].parameters(), lr=0.1)
    exec(blocks(OWN_LOOP, "python")[number], scope)


@pytest.mark.slow
def test_ddp_and_a_session_learn_the_same_thing_on_two_ranks() -> None:
    before, after = run(DDP, starter=TORCHRUN), run(AFTER_DDP)
    assert before[0] < before[2] > 90
    assert after == pytest.approx(before, abs=3)


@pytest.mark.slow
def test_accelerate_and_a_session_learn_the_same_thing() -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed: pip install outrider[peers]")
    before, after = run(ACCELERATE), run(AFTER_ACCELERATE)
    assert before[0] < before[2] > 90
    assert after == pytest.approx(before, abs=3)


@pytest.mark.parametrize(
    ("before", "after", "shown"),
    [(DDP, AFTER_DDP, DIFF_OF_DDP), (ACCELERATE, AFTER_ACCELERATE, DIFF_OF_ACCELERATE)],
    ids=["ddp", "accelerate"],
)
def test_the_difference_is_shown_and_small(before: str, after: str, shown: str) -> None:
    assert difference(before, after) == shown
    assert shown.count("\n+") <= 10
