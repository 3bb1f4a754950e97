"""The script in the style of timm's reference training learns on two unequal ranks, and its mean too."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "timm_style.py"


def run(folder: Path, *arguments: str) -> list[tuple[str, str]]:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--policy", "cadence", *arguments],
        cwd=folder,
        env={**os.environ, "OUTRIDER_DEVICES": "cpu,cpu@0.4", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (folder / "ema.safetensors").exists()
    return re.findall(r"accuracy ([\d.]+)%, of the mean ([\d.]+)%", done.stdout)


def test_the_timm_style_script_learns_on_two_ranks(tmp_path: Path) -> None:
    found = run(tmp_path, "--epochs", "4", "--precision", "fp32")
    assert len(found) == 4
    assert min(float(number) for number in found[-1]) > 60


def test_the_timm_style_script_runs_in_bf16(tmp_path: Path) -> None:
    # Few samples: on a CPU without bf16 instructions a convolution in it takes many times as long.
    assert len(run(tmp_path, "--epochs", "1", "--samples", "200")) == 1
