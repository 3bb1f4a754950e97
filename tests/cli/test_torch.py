"""`outrider torch`: the commands over variants that stand in for real ones."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.cli.torch import app
from outrider.machine import codec
from outrider.machine.variants import RECORD, Store, Variant, active_variant

FACTS = Path(__file__).parent.parent / "machine" / "facts"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store with a CPU and a CUDA variant, seen from an empty project."""
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("OUTRIDER_FIND_LINKS", raising=False)
    project = tmp_path / "project"
    (project / ".outrider").mkdir(parents=True)
    monkeypatch.chdir(project)
    found = Store.of_user()
    cuda = Variant(
        name="2.13-cu126",
        backend="cu126",
        torch="2.13.0+cu126",
        cuda="12.6",
        archs=("sm_60", "sm_90"),
        size_bytes=2**32,
    )
    for variant in (cuda, Variant(name="2.13-cpu", backend="cpu", torch="2.13.0+cpu", size_bytes=2**29)):
        found.path(variant.name).mkdir(parents=True)
        codec.write(variant, found.path(variant.name) / RECORD)
    return found


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_the_list_shows_version_cuda_architectures_and_size(store: Store) -> None:
    assert call("list").stdout == (
        "  2.13-cpu         torch 2.13.0+cpu       CPU          0.5 GiB\n"
        "  2.13-cu126       torch 2.13.0+cu126     CUDA 12.6    4.0 GiB\n"
        "    sm_60 sm_90\n"
    )


def test_the_list_marks_the_active_variant(store: Store) -> None:
    call("activate", "2.13-cpu")
    assert call("list").stdout.startswith("* 2.13-cpu ")
    assert [item["is_active"] for item in json.loads(call("list", "--json").stdout)] == [True, False]


def test_an_empty_list_is_empty_on_stdout(store: Store) -> None:
    store.remove("2.13-cpu")
    store.remove("2.13-cu126")
    assert call("list").stdout == ""


def test_info_shows_everything(store: Store) -> None:
    record = json.loads(call("info", "2.13-cu126", "--json").stdout)
    assert (record["cuda"], record["archs"]) == ("12.6", ["sm_60", "sm_90"])
    assert record["interpreter"] == str(store.interpreter("2.13-cu126"))
    assert "cuda         12.6\n" in call("info", "2.13-cu126").stdout


def test_removing_the_active_variant_asks_first(store: Store) -> None:
    call("activate", "2.13-cpu")
    result = call("remove", "2.13-cpu")
    assert str(result.exception) == (
        "2.13-cpu is active in this project, remove it? there is no terminal to ask on\nhint: pass --yes"
    )
    assert store.get("2.13-cpu")


def test_removing_the_active_variant_with_a_yes_deactivates_it(store: Store) -> None:
    call("activate", "2.13-cpu")
    assert call("remove", "2.13-cpu", "--yes").exit_code == 0
    assert [variant.name for variant in store.variants()] == ["2.13-cu126"]
    assert active_variant(Path.cwd()) is None


def test_removing_another_variant_does_not_ask(store: Store) -> None:
    call("activate", "2.13-cpu")
    assert call("remove", "2.13-cu126").exit_code == 0


def test_an_install_can_be_shown(store: Store) -> None:
    result = call("install", "cu126", "--version", "2.12", "--only-torch", "--dry-run")
    venv, pip = result.stdout.splitlines()
    assert venv.endswith("/torch/2.12-cu126")
    assert pip.endswith("--torch-backend cu126 'torch==2.12.*'")


def test_a_build_that_cannot_work_exits_with_a_finding(store: Store) -> None:
    facts = str(FACTS / "rtx5060ti-gtx1060-wsl2.json")
    result = call("build", "--archs", "6.1;12.0", "--dry-run", "--facts", facts)
    assert result.exit_code == 1
    assert "missing  CUDA toolkit: none found that targets 6.1, 12.0 (found: none)\n" in result.stdout
    assert "export TORCH_CUDA_ARCH_LIST='6.1;12.0'\n" in result.stdout


def test_ctrl_c_during_an_install_leaves_nothing_and_nobody(store: Store, tmp_path: Path) -> None:
    # A uv that has begun to write and would go on for a minute.
    uv = tmp_path / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text('#!/bin/sh\nfor last; do :; done\nmkdir -p "$last/bin"\nexec sleep 60\n')
    uv.chmod(0o755)
    environment = {**os.environ, "PATH": f"{uv.parent}:{os.environ['PATH']}"}
    program = "from outrider.cli.torch import app; app()"
    command = [sys.executable, "-c", program, "install", "cpu", "--version", "2.12", "--only-torch"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as install:
        wait_for(store.folder / ".partial-2.12-cpu" / "bin")
        install.send_signal(signal.SIGINT)
        assert install.wait(timeout=30) != 0
    assert not (store.folder / ".partial-2.12-cpu").exists()
    assert not store.path("2.12-cpu").exists()


def wait_for(path: Path, timeout_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < deadline_s, f"{path} did not appear within {timeout_s:g} s"
        time.sleep(0.02)


def test_run_uses_the_active_variant(store: Store) -> None:
    python = store.interpreter("2.13-cpu")
    python.parent.mkdir()
    python.write_text('#!/bin/sh\necho "$0 $* $OUTRIDER_DEVICES"\n')
    python.chmod(0o755)
    call("activate", "2.13-cpu")
    Path("train.py").touch()
    program = (
        "import typer; from outrider.cli.run import CONTEXT, run\n"
        "app = typer.Typer(); app.command(context_settings=CONTEXT)(run); app()"
    )
    command = [sys.executable, "-c", program, "--devices", "cpu,cpu@0.5", "train.py", "--epochs", "2"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.stdout == f"{python} train.py --epochs 2 cpu,cpu@0.5\n"
