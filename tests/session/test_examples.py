"""The examples of user loops learn: on one rank as they are, and on two that are unequal."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_here(name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("OUTRIDER_DEVICES", "cpu")
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@pytest.mark.slow
def test_the_user_loop_learns_two_spirals_on_two_ranks(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "user_loop.py"), "--epochs", "2", "--policy", "async"],
        cwd=tmp_path,
        env={**os.environ, "OUTRIDER_DEVICES": "cpu,cpu@0.5", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    accuracies = [float(number) for number in re.findall(r"accuracy ([\d.]+)%", done.stdout)]
    shares = [int(number) for number in re.findall(r"(\d+)%[,;]", done.stdout.splitlines()[-1])]
    assert len(accuracies) == 2
    assert accuracies[-1] > 90
    assert sum(shares) in (99, 100, 101)
    assert min(shares) > 0


@pytest.mark.slow
def test_the_gan_learns_to_draw_a_ring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_here("gan.py", ["--epochs", "12"], monkeypatch, tmp_path)
    lines = capsys.readouterr().out.splitlines()
    means, spreads = zip(*([float(n) for n in re.findall(r"\d\.\d+", line)] for line in lines), strict=True)
    assert len(lines) == 12
    assert means[-1] == pytest.approx(1.0, abs=0.15)
    assert spreads[-1] < 0.3 < spreads[1]
