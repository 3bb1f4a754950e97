"""The examples run, and ResNet-20 as a flow is ResNet-20."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


@pytest.fixture
def resnet() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / "flow_resnet20.py"))


@pytest.mark.slow
def test_resnet20_example_learns(capsys: pytest.CaptureFixture[str]) -> None:
    output = run("flow_resnet20.py", capsys)
    assert output.startswith("269,722 parameters, outputs equal to the hand-written: True")
    assert "accuracy 100%" in output


def test_unet_example_learns(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run("flow_unet.py", capsys).splitlines()
    before, after = (float(line.split()[-1]) for line in lines if line.startswith("overlap"))
    assert after > 0.7 > before


def test_experts_example_learns(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run("flow_experts.py", capsys).splitlines()
    one, soft, hard = (float(line.split()[-1]) for line in lines[:3])
    assert one > soft > hard
    assert lines[3] == "samples of regime 1 reach only experts.branches.1.weight, experts.branches.1.bias"


def test_recurrent_example_learns(capsys: pytest.CaptureFixture[str]) -> None:
    assert "accuracy after:  100%" in run("flow_recurrent.py", capsys)


def test_inputs_example_learns_and_shows_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    output = run("flow_inputs.py", capsys)
    assert "step 120" in output
    assert "takes 3 inputs (image, facts, mask), got 1" in output


def test_resnet20_as_a_flow_has_equal_outputs_and_gradients(resnet: dict[str, Any]) -> None:
    torch.manual_seed(0)
    flow, plain = resnet["resnet20_flow"](), resnet["PlainResNet20"]()
    resnet["copy_weights"](plain, flow)
    images = torch.randn(4, 3, 16, 16)
    ours, theirs = flow(images), plain(images)
    assert torch.equal(ours, theirs)
    ours.square().sum().backward()
    theirs.square().sum().backward()
    pairs = zip(flow.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)


def test_the_guide_shows_the_code_that_runs() -> None:
    guide = (EXAMPLES.parent / "docs" / "flow.md").read_text(encoding="utf-8")
    written, shown = re.findall(r"```(?:python)?\n(.*?)```", guide, re.DOTALL)[:2]
    scope: dict[str, Any] = {}
    exec(written, scope)
    assert scope["model"].code == shown


def test_the_cost_of_a_flow_is_measured_by_a_script(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["flow_cost.py", "--rounds", "2", "--steps", "1", "--batch", "1"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    threads = torch.get_num_threads()
    runpy.run_path(str(EXAMPLES.parent / "benchmarks" / "flow_cost.py"), run_name="__main__")
    torch.set_num_threads(threads)
    assert "flow / hand-written: median" in capsys.readouterr().out
