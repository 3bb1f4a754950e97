"""The SLURM job of a project, with stand-ins for `scontrol` and `srun` that start one task per node on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ports import free_port

from outrider.scaffold.project import TEMPLATES, create_project

# As on a large cluster, the second name comes when a reader of the first may have gone.
SCONTROL = """#!/usr/bin/env bash
[ "$*" = "show hostnames two-nodes" ] && echo localhost && sleep 0.2 && echo other
"""
SRUN = """#!/usr/bin/env bash
for node in 0 1; do
    SLURM_STEP_ID=0 SLURM_NTASKS=2 SLURM_PROCID=$node SLURM_LOCALID=0 SLURM_NODEID=$node "$@" &
    tasks+=($!)
done
for task in "${tasks[@]}"; do wait "$task" || exit 1; done
"""
TORCHRUN = f'#!/usr/bin/env bash\nexec {sys.executable} -m torch.distributed.run "$@"\n'


def stand_ins(folder: Path) -> Path:
    folder.mkdir()
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN), ("torchrun", TORCHRUN)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_scripts_of_every_template_are_valid_bash(template: str, tmp_path: Path) -> None:
    project = create_project("stripes", parent=tmp_path, template=template)
    scripts = [*project.glob("jobs/*.sh"), *project.glob("jobs/*.sbatch")]
    assert len(scripts) == 2
    for script in scripts:
        subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.slow
def test_the_slurm_job_trains_one_rank_on_each_of_two_nodes(tmp_path: Path) -> None:
    project = create_project("stripes", parent=tmp_path, template="loop")
    # The port of the rendezvous follows from the number of the job.
    job = (free_port() - 20_000) % 10_000
    variables = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("OUTRIDER_", "SLURM_"))},
        "PATH": f"{stand_ins(tmp_path / 'bin')}{os.pathsep}{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "two-nodes",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": str(job),
        "OMP_NUM_THREADS": "1",
    }
    command = ["bash", "jobs/slurm.sbatch"]
    ended = subprocess.run(command, cwd=project, env=variables, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("epoch 2: accuracy") == 1
    assert (project / "model.safetensors").is_file()
