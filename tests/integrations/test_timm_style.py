"""The script in the style of timm's reference training learns on two unequal ranks, and its mean too."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "timm_style.py"


def test_the_timm_style_script_learns_on_two_ranks(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--epochs", "4", "--policy", "cadence"],
        cwd=tmp_path,
        env={**os.environ, "OUTRIDER_DEVICES": "cpu,cpu@0.4", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"accuracy ([\d.]+)%, of the mean ([\d.]+)%", done.stdout)
    assert len(found) == 4
    assert min(float(number) for number in found[-1]) > 60
    assert (tmp_path / "ema.safetensors").exists()
