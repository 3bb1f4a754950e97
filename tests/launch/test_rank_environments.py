"""Ranks in Python environments of their own: what their names mean, and one world of two environments."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

import outrider
from outrider.average.transport.backend_table import choose_backend
from outrider.errors import ConfigError, DeviceError
from outrider.machine.devices import parse_devices
from outrider.machine.rank_environments import (
    RankPython,
    rank_pythons,
    refuse_other_python,
    wanted_environments,
)
from outrider.world.rank_builds import RankBuild, refuse_different_outriders

TWO = parse_devices("cpu,cpu@0.5")
SCRIPT = """
import sys, torch, outrider
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.arange(64) % 2)
with outrider.Session(run_dir="run", policy="cadence") as s:
    s.prepare(model, optimizer)
    for x, y in s.batches(data, batch_size=8):
        s.step(torch.nn.functional.cross_entropy(model(x), y))
    print(s.gather(sys.executable))
"""


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second environment; its libraries are those of this one."""
    folder = tmp_path_factory.mktemp("envs") / "other"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    (folder / "lib" / version / "site-packages" / "shared.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder


def test_an_environment_is_a_folder_a_python_or_here(other: Path) -> None:
    expected = str(other / "bin" / "python")
    for wanted in (f"here,{other}", ["here", expected], {"cpu@0.5": str(other)}):
        pythons = rank_pythons(wanted, TWO)
        assert pythons is not None
        assert [one.interpreter for one in pythons] == [sys.executable, expected]
        assert {one.torch for one in pythons} == {torch.__version__}
    assert rank_pythons(None, TWO) is None


def test_the_command_goes_before_the_program() -> None:
    assert wanted_environments(["a", "b"], {"OUTRIDER_ENVIRONMENTS": "here,c"}) == "here,c"
    assert wanted_environments(["a", "b"], {}) == ["a", "b"]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("here", "1 environments for 2 devices"),
        (["here", "nowhere"], "no environment 'nowhere'"),
        ({"cuda:0": "here"}, "names 'cuda:0', which is no device of this run"),
        (["here", "/bin/true"], "does not answer"),
    ],
)
def test_bad_environments_are_refused(wanted: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rank_pythons(wanted, TWO)  # type: ignore[arg-type]


def test_a_python_without_torch_is_refused(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    with pytest.raises(ConfigError, match="has no torch"):
        rank_pythons(["here", str(tmp_path / "bare")], TWO)


def test_functions_are_not_sent_to_another_minor_version() -> None:
    other = RankPython(interpreter="python3.9", python="3.9.1", torch="2.8.0")
    with pytest.raises(ConfigError, match=r"rank 1 would run in Python 3\.9\.1"):
        refuse_other_python([RankPython(interpreter="x", python=sys.version.split()[0], torch="2.8.0"), other])


def test_different_builds_meet_in_host_memory() -> None:
    cards = parse_devices("cuda:0,cuda:1")
    choice = choose_backend("auto", cards, has_one_torch=False)
    assert choice.backend == "cpu"
    with pytest.raises(DeviceError):
        choose_backend("nccl", cards, has_one_torch=False)


def test_different_versions_of_outrider_are_refused() -> None:
    ours = RankBuild(outrider="0.1.0", torch="2.13.0", python="3.11.7")
    theirs = RankBuild(outrider="0.2.0", torch="2.13.0", python="3.11.7")
    refuse_different_outriders([ours, ours])
    with pytest.raises(ConfigError, match=r"rank 1 runs Outrider 0\.2\.0, rank 0 0\.1\.0"):
        refuse_different_outriders([ours, theirs])


def _train(folder: Path, environments: list[str] | None) -> dict[str, torch.Tensor]:
    return (
        outrider.train(
            lambda: torch.nn.Linear(4, 2),
            lambda parameters: torch.optim.SGD(parameters, 0.1),
            lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
            (torch.linspace(-1, 1, 256).reshape(64, 4), torch.arange(64) % 2),
            batch_size=8,
            epochs=2,
            policy="sync",
            devices="cpu,cpu",
            environments=environments,
            run_dir=folder,
            quiet=True,
        )
        .join()
        .state_dict
    )


@pytest.mark.slow
def test_ranks_of_two_environments_train_the_model_of_one(tmp_path: Path, other: Path) -> None:
    both = _train(tmp_path / "both", ["here", str(other)])
    one = _train(tmp_path / "one", None)
    assert {name: torch.equal(both[name], one[name]) for name in one} == {"weight": True, "bias": True}


@pytest.mark.slow
def test_a_script_runs_in_the_environments_of_its_ranks(tmp_path: Path, other: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    told = subprocess.run(
        [
            sys.executable,
            "-m",
            "outrider",
            "run",
            "--devices",
            "cpu,cpu",
            "--environments",
            f"here,{other}",
            "script.py",
        ],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    assert told.stdout.splitlines()[-1] == str([sys.executable, str(other / "bin" / "python")])


def test_a_loop_on_one_device_says_that_environments_are_not_used(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with outrider.Session(devices="cpu", environments=["nowhere"], run_dir=tmp_path, quiet=True):
        pass
    assert "environments=('nowhere',) is not used: a loop on one device" in capsys.readouterr().err
