"""A project of the template `ray` trains in two workers on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from outrider.scaffold.project import create_project


def test_a_project_for_ray_trains_two_unequal_workers(tmp_path: Path) -> None:
    project = create_project("stripes", parent=tmp_path, template="ray")
    variables = {name: value for name, value in os.environ.items() if not name.startswith("OUTRIDER_")}
    # Without an address Ray would join any cluster of this machine, such as the one of test_ray.py while it ends.
    variables |= {"RAY_ADDRESS": "local", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
    ended = subprocess.run(
        [sys.executable, "train.py", "--devices", "cpu,cpu@0.5", "--epochs", "1"],
        cwd=project,
        env={**variables, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert "epoch 0: accuracy" in ended.stdout
    assert (project / "runs" / "stripes" / "outrider" / "record.json").is_file()
