"""PEFT's adapters on a frozen, packed model: ranks average the adapters only."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from integrations.hf_ranks import run_ranks

UNEQUAL = "cpu,cpu@0.4"
EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt2_lora.py"
MOST_FACTS_BYTES = 512
"""What ranks tell each other beside parameters, with a checksum."""


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    timeline = json.loads((run / "timeline.json").read_text())
    return [event for event in timeline["events"] if event["kind"] == kind]


@pytest.fixture(scope="module")
def balanced_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("balanced")


@pytest.fixture(scope="module")
def balanced(balanced_folder: Path) -> list[dict[str, Any]]:
    return run_ranks("lora", folder=balanced_folder, devices=UNEQUAL, policy="balanced")


def test_adapters_of_a_packed_model_end_as_on_one_device(balanced: list[dict[str, Any]], tmp_path: Path) -> None:
    plain = run_ranks("lora", folder=tmp_path, policy=None)[0]
    assert balanced[0]["weights"] == balanced[1]["weights"]
    assert balanced[0]["weights"] == pytest.approx(plain["weights"], abs=1e-3)
    assert balanced[1]["packed"] == plain["packed"]


def test_the_trainer_averages_gradients_of_adapters_only(balanced: list[dict[str, Any]], balanced_folder: Path) -> None:
    trained = balanced[0]["trained"]
    assert trained < balanced[0]["all"] / 10
    (layout,) = events(balanced_folder / "run", "layout")
    assert layout["trained"] == trained
    assert 4 * trained < layout["gradient_bytes"] < 4 * trained + MOST_FACTS_BYTES
    assert (balanced_folder / "final" / "adapter_model.safetensors").exists()


def test_a_run_of_adapters_goes_on_from_a_checkpoint(
    balanced: list[dict[str, Any]], balanced_folder: Path, tmp_path: Path
) -> None:
    checkpoint = str(balanced_folder / "out" / "checkpoint-8")
    resumed = run_ranks("lora", folder=tmp_path, devices=UNEQUAL, policy="balanced", resume=checkpoint)
    assert resumed[0]["weights"] == pytest.approx(balanced[0]["weights"], abs=1e-3)


def test_averages_of_an_own_loop_send_adapters_only(tmp_path: Path) -> None:
    ranks = run_ranks("lora_loop", folder=tmp_path, devices=UNEQUAL, policy="cadence")
    assert ranks[0]["weights"] == ranks[1]["weights"]
    assert ranks[0]["packed"] == ranks[1]["packed"]
    sent = {event["bytes"] for event in events(tmp_path / "run", "average end")}
    trained = ranks[0]["trained"]
    assert sent
    assert all(4 * trained <= number < 4 * trained + MOST_FACTS_BYTES for number in sent), (sent, trained)
    assert (tmp_path / "final" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize(("through", "policy"), [("loop", "cadence"), ("trainer", "balanced")])
def test_the_example_learns_on_two_ranks(through: str, policy: str, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the slow device sets the pace of the column; the fast ones ride ahead and rejoin. " * 60)
    arguments = ["--through", through, "--policy", policy, "--text", str(text)]
    printed, nothing = run_ranks("script", folder=tmp_path, devices=UNEQUAL, path=str(EXAMPLE), arguments=arguments)
    assert "held-out" not in nothing
    before, after = (float(number) for number in re.findall(r"loss of the held-out text [a-z]+: ([\d.]+)", printed))
    assert after < before - 0.5
    assert (tmp_path / "adapters" / "adapter_model.safetensors").exists()


def test_the_group_that_training_arguments_make_ends_with_the_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nimport torch.distributed as dist\n"
        "from outrider.launch.script_launcher import at_script_end\n"
        "at_script_end(lambda: dist.is_initialized() and print('a group is left'))\n"
        "sys.argv[1:] = ['--through', 'trainer', '--epochs', '1']\n"
        f"sys.path.append({str(EXAMPLE.parent)!r})\nimport gpt2_lora\ngpt2_lora.main()\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "OUTRIDER_DEVICES": UNEQUAL},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "held-out" in done.stdout
    assert "left" not in done.stdout
