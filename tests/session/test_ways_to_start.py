"""The same script, unchanged, alone, with `outrider run`'s devices, under torchrun, and where there is no script."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider.launch.script_launcher import running_script

pytestmark = pytest.mark.slow

ONE_DEVICE = """
import outrider, torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = torch.utils.data.TensorDataset(torch.randn(20, 2))
with outrider.Session({options}) as s:
    s.prepare(model, optimizer)
    for (x,) in s.batches(data, batch_size=4):
        s.step(model(x).square().mean())
    print(s.world_size, s.metrics)
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, script_runner: Any) -> Any:
    return script_runner(tmp_path_factory.mktemp("alone"), "plain:cadence")


@pytest.fixture(scope="module")
def started(on_two_ranks: Any) -> Any:
    return on_two_ranks("plain:sync")


@pytest.fixture(scope="module")
def under_torchrun(tmp_path_factory: pytest.TempPathFactory, script_runner: Any) -> Any:
    starter = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    return script_runner(tmp_path_factory.mktemp("torchrun"), "plain:sync", starter=starter)


def facts(ended: Any, name: str) -> dict[str, object]:
    content: dict[str, object] = json.loads((ended.folder / f"{name}.json").read_text())
    return content


def test_a_script_alone_is_a_world_of_one(alone: Any) -> None:
    assert alone.code == 0, alone.stderr
    assert alone.stdout == "main is rank 0\n"
    assert facts(alone, "plain0")["world"] == 1


def test_a_script_starts_the_other_ranks_itself(started: Any) -> None:
    assert started.code == 0, started.stderr
    assert facts(started, "plain0")["world"] == 2
    assert facts(started, "plain1")["rank"] == 1


def test_only_rank_zero_writes_to_the_terminal(started: Any) -> None:
    assert set(started.stdout.splitlines()) == {"main is rank 0"}


def test_torchrun_gives_the_same_parameters_to_the_bit(started: Any, under_torchrun: Any) -> None:
    assert under_torchrun.code == 0, under_torchrun.stderr
    ours, theirs = (load_file(run.folder / "plain1.safetensors") for run in (started, under_torchrun))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_an_evaluation_is_the_same_alone_and_together(started: Any) -> None:
    assert facts(started, "plain0")["alone"] == pytest.approx(facts(started, "plain1")["together"])


def test_a_session_leaves_its_record(started: Any) -> None:
    record = json.loads((started.folder / "run" / "record.json").read_text())
    assert (record["status"], record["policy"], len(record["epochs"])) == ("finished", "sync", 2)
    assert [epoch["samples"] for epoch in record["epochs"]] == [331, 331]
    assert record["epochs"][0]["logged"]["size"] == pytest.approx(7.9, abs=0.1)


def test_rank_zero_samples_all_ranks_of_its_host(started: Any, under_torchrun: Any) -> None:
    for run, devices in ((started, ["cpu", "cpu@0.5"]), (under_torchrun, ["cpu", "cpu"])):
        timeline = json.loads((run.folder / "run" / "timeline.json").read_text())
        assert [device["device"] for device in timeline["utilization"]["devices"]] == devices


def test_sessions_may_follow_each_other_in_one_script(on_two_ranks: Any) -> None:
    ended = on_two_ranks("two_sessions:sync")
    assert ended.code == 0, ended.stderr
    assert len(facts(ended, "session1-1")["reached"]) == 2  # type: ignore[arg-type]
    first, second = (load_file(ended.folder / f"session{n}-0.safetensors") for n in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_without_a_script_two_devices_are_refused_with_a_way_out(tmp_path: Path) -> None:
    done = _python(tmp_path, ONE_DEVICE.format(options="devices='cpu,cpu'"))
    assert done.returncode == 1
    assert "2 devices asked for, but there is no script to run on each: a notebook, a prompt or a test" in done.stderr
    assert "outrider run --devices cpu,cpu script.py" in done.stderr


def test_without_a_script_one_device_works(tmp_path: Path) -> None:
    done = _python(tmp_path, ONE_DEVICE.format(options="devices='cpu'"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1 ")


@pytest.mark.parametrize(("name", "is_script"), [("train.py", True), ("train-my-model", True), ("pytest", False)])
def test_a_users_program_is_run_again_but_no_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_script: bool
) -> None:
    program = ModuleType("__main__")
    program.__file__ = str(tmp_path / name)
    (tmp_path / name).touch()
    monkeypatch.setitem(sys.modules, "__main__", program)
    assert (running_script() is not None) is is_script


def _python(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
