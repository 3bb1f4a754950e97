"""The examples of the frameworks on two slices of one GPU, on a GPU beside a CPU, and a script on one slice."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SLICES = "cuda:0%60,cuda:0%25"


def run(script: str, *arguments: str, folder: Path, devices: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, str(ROOT / script), *arguments],
        cwd=folder,
        env={**os.environ, "OUTRIDER_DEVICES": devices},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def needs(*names: str) -> pytest.MarkDecorator:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


def accuracies(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"(?:accuracy|mean) ([\d.]+)%", text)]


@needs("timm", "torchvision")
def test_the_timm_style_script_learns_with_the_parts_of_timm(tmp_path: Path) -> None:
    found = accuracies(run("examples/timm_style.py", "--epochs", "2", folder=tmp_path, devices=SLICES).stdout)
    assert len(found) == 4
    assert min(found[-2:]) > 60


@needs("lightning")
@pytest.mark.parametrize("devices", [SLICES, "cuda:0,cpu"])
def test_the_lightning_trainer_learns(tmp_path: Path, devices: str) -> None:
    said = run("examples/lightning_trainer.py", "--epochs", "4", folder=tmp_path, devices=devices).stdout
    assert accuracies(said)[-1] > 75


@needs("lightning")
def test_fabric_learns_with_local_steps(tmp_path: Path) -> None:
    arguments = ["--epochs", "2", "--policy", "async"]
    assert run("examples/lightning_fabric_classifier.py", *arguments, folder=tmp_path, devices=SLICES).stdout


@needs("accelerate", "transformers")
def test_accelerate_learns_in_bfloat16(tmp_path: Path) -> None:
    said = run("examples/accelerate_nlp.py", "--mixed_precision", "bf16", folder=tmp_path, devices=SLICES).stdout
    assert float(re.findall(r"accuracy ([\d.]+)", said)[-1]) > 0.75


@needs("transformers", "peft")
def test_the_trainer_of_transformers_leaves_no_group_behind(tmp_path: Path) -> None:
    arguments = ["--through", "trainer", "--epochs", "2"]
    done = run("examples/gpt2_lora.py", *arguments, folder=tmp_path, devices=SLICES)
    before, after = (float(found) for found in re.findall(r"text \w+: ([\d.]+)", done.stdout))
    assert after < before
    assert "destroy_process_group" not in done.stderr


def test_a_script_runs_on_one_slice(tmp_path: Path) -> None:
    run("tests/session/user_script.py", str(tmp_path), "plain:auto", folder=tmp_path, devices="cuda:0%30")
    record = json.loads((tmp_path / "plain-auto" / "run" / "record.json").read_text())
    assert (record["status"], record["devices"]) == ("finished", ["cuda:0%30"])
