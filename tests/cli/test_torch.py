"""`outrider torch`: the commands over variants that stand in for real ones, and over one real torch."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.cli.main import app as everything
from outrider.cli.torch import app
from outrider.machine import codec
from outrider.machine.variants import RECORD, Variant, VariantStore, active_variant

FACTS = Path(__file__).parent.parent / "machine" / "facts"
INSTALL = [sys.executable, "-m", "outrider", "torch", "install", "cpu", "--version", "2.12", "--only-torch"]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> VariantStore:
    """A store with a CPU and a CUDA variant, seen from an empty project."""
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("OUTRIDER_FIND_LINKS", raising=False)
    project = tmp_path / "project"
    (project / ".outrider").mkdir(parents=True)
    monkeypatch.chdir(project)
    found = VariantStore.of_user()
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


def test_the_list_shows_version_cuda_architectures_and_size(store: VariantStore) -> None:
    assert call("list").stdout == (
        "  2.13-cpu         torch 2.13.0+cpu       CPU          0.5 GiB\n"
        "  2.13-cu126       torch 2.13.0+cu126     CUDA 12.6    4.0 GiB\n"
        "    sm_60 sm_90\n"
    )


def test_the_list_marks_the_active_variant(store: VariantStore) -> None:
    call("activate", "2.13-cpu")
    assert call("list").stdout.startswith("* 2.13-cpu ")
    assert [item["is_active"] for item in json.loads(call("list", "--json").stdout)] == [True, False]


def test_an_empty_list_is_empty_on_stdout(store: VariantStore) -> None:
    store.remove("2.13-cpu")
    store.remove("2.13-cu126")
    assert call("list").stdout == ""


def test_info_shows_everything(store: VariantStore) -> None:
    record = json.loads(call("info", "2.13-cu126", "--json").stdout)
    assert (record["cuda"], record["archs"]) == ("12.6", ["sm_60", "sm_90"])
    assert record["interpreter"] == str(store.interpreter("2.13-cu126"))
    assert "cuda         12.6\n" in call("info", "2.13-cu126").stdout


def test_removing_the_active_variant_asks_first(store: VariantStore) -> None:
    call("activate", "2.13-cpu")
    result = call("remove", "2.13-cpu")
    assert str(result.exception) == (
        "no terminal to ask on: 2.13-cpu is active in this project, remove it?\nhint: pass --yes"
    )
    assert store.get("2.13-cpu")


def test_removing_the_active_variant_with_a_yes_deactivates_it(store: VariantStore) -> None:
    call("activate", "2.13-cpu")
    assert call("remove", "2.13-cpu", "--yes").exit_code == 0
    assert [variant.name for variant in store.variants()] == ["2.13-cu126"]
    assert active_variant(Path.cwd()) is None


def test_removing_another_variant_does_not_ask(store: VariantStore) -> None:
    call("activate", "2.13-cpu")
    assert call("remove", "2.13-cu126").exit_code == 0


def test_an_install_can_be_shown(store: VariantStore) -> None:
    result = call("install", "cu126", "--version", "2.12", "--only-torch", "--dry-run")
    venv, pip = result.stdout.splitlines()
    assert venv.endswith("/torch/2.12-cu126")
    assert pip.endswith("--torch-backend cu126 'torch==2.12.*'")


def test_a_build_that_cannot_work_exits_with_a_finding(store: VariantStore) -> None:
    facts = str(FACTS / "rtx5060ti-gtx1060-wsl2.json")
    result = call("build", "--archs", "6.1;12.0", "--dry-run", "--facts", facts)
    assert result.exit_code == 1
    assert "missing  CUDA toolkit: none found that targets 6.1, 12.0 (found: none)\n" in result.stdout
    assert "export TORCH_CUDA_ARCH_LIST='6.1;12.0'\n" in result.stdout


def test_a_build_that_cannot_work_is_refused_before_anyone_is_asked(store: VariantStore, tmp_path: Path) -> None:
    result = call("build", "--archs", "6.1;12.0", "--jobs", "10000")
    assert str(result.exception).startswith("this machine cannot build torch: ")
    assert "memory: 10000 jobs take about 40000 GiB, " in str(result.exception)


def test_a_refresh_goes_on_after_a_broken_variant(store: VariantStore) -> None:
    python = store.interpreter("2.13-cu126")
    python.parent.mkdir()
    answer = {"python": "3.12.3", "version": "2.13.0+cu126", "cuda": "12.6", "archs": ["sm_60"], "num_devices": 0}
    python.write_text(f"#!/bin/sh\necho '{json.dumps(answer)}'\n")
    python.chmod(0o755)
    result = call("refresh")
    assert result.exit_code == 1
    assert "error: the torch of 2.13-cpu cannot be imported: cannot start " in result.stderr
    assert result.stdout.splitlines()[1:] == [
        "    sm_60",
        "    differs from the wheel table of 2026-11-15: lacks sm_50 sm_70 sm_75 sm_80 sm_86 sm_90",
    ]


def test_a_variant_whose_record_is_spoilt_can_be_removed(store: VariantStore) -> None:
    (store.path("2.13-cpu") / RECORD).write_text("{}")
    result = call("list")
    assert str(result.exception) == (
        "torch variant 2.13-cpu cannot be read: variant.json: missing name, backend, torch\n"
        "hint: take it away and install it again: outrider torch remove 2.13-cpu"
    )
    assert call("remove", "2.13-cpu").exit_code == 0
    assert store.names() == ("2.13-cu126",)


@pytest.fixture
def slow_install(store: VariantStore, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """An install of 2.12-cpu whose uv has begun to write and would go on for a minute."""
    uv = tmp_path / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text('#!/bin/sh\nfor last; do :; done\nmkdir -p "$last/bin"\nexec sleep 60\n')
    uv.chmod(0o755)
    environment = {**os.environ, "PATH": f"{uv.parent}:{os.environ['PATH']}"}
    with subprocess.Popen(INSTALL, env=environment, stderr=subprocess.PIPE, text=True) as install:
        wait_for(store.folder / ".partial-2.12-cpu" / "bin")
        yield install
        install.send_signal(signal.SIGTERM)


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_install_leaves_nothing_and_nobody(
    store: VariantStore, slow_install: subprocess.Popen[str], number: signal.Signals, exit_code: int
) -> None:
    slow_install.send_signal(number)
    assert slow_install.wait(timeout=30) == exit_code
    assert not (store.folder / ".partial-2.12-cpu").exists()
    assert not store.path("2.12-cpu").exists()


def test_a_second_install_of_the_same_name_is_told_to_wait(
    store: VariantStore, slow_install: subprocess.Popen[str]
) -> None:
    second = subprocess.run(INSTALL, capture_output=True, text=True, timeout=60)
    assert (second.returncode, second.stdout) == (1, "")
    assert second.stderr == (
        f"error: torch variant 2.12-cpu is being installed by process {slow_install.pid}\nhint: wait for it to end\n"
    )
    assert (store.folder / ".partial-2.12-cpu").exists()


def wait_for(path: Path, timeout_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < deadline_s, f"{path} did not appear within {timeout_s:g} s"
        time.sleep(0.02)


def outrider(*arguments: str) -> str:
    """The stdout of the program in a process of its own."""
    command = [sys.executable, "-m", "outrider", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_a_real_torch_is_installed_used_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    let_uv_find_torch(monkeypatch)
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text("import torch; print(torch.__version__, torch.ones(3).sum().item())\n")

    installed = outrider("torch", "install", "cpu", "--version", "2.13.0", "--only-torch")
    outrider("torch", "activate", "2.13.0-cpu")

    assert installed.startswith("  2.13.0-cpu ")
    assert outrider("torch", "list").startswith("* 2.13.0-cpu ")
    assert outrider("run", "script.py") == "2.13.0+cpu 3.0\n"
    assert json.loads(outrider("torch", "info", "2.13.0-cpu", "--json"))["torch"] == "2.13.0+cpu"
    outrider("torch", "remove", "2.13.0-cpu", "--yes")
    assert outrider("torch", "list") == ""


def let_uv_find_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the CPU build from the folder of wheels that pip uses, else from its index; skip where there is neither."""
    folder = Path(os.environ.get("PIP_FIND_LINKS", "nowhere"))
    if any(folder.glob("torch-2.13.0*.whl")):
        monkeypatch.setenv("OUTRIDER_FIND_LINKS", str(folder))
        return
    monkeypatch.delenv("OUTRIDER_FIND_LINKS", raising=False)
    try:
        socket.create_connection(("download.pytorch.org", 443), timeout=5).close()
    except OSError:
        pytest.skip("no torch 2.13.0 wheel in PIP_FIND_LINKS, and the index of its CPU builds cannot be reached")


def test_run_uses_the_active_variant(store: VariantStore) -> None:
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


def test_run_says_where_the_active_variant_is_gone(store: VariantStore) -> None:
    call("activate", "2.13-cpu")
    store.remove("2.13-cpu")
    Path("train.py").touch()
    result = CliRunner().invoke(everything, ["run", "train.py"])
    assert str(result.exception) == (
        "torch variant 2.13-cpu is active in this project, but not installed\n"
        "hint: install it, choose another with `outrider torch activate`, or delete "
        f"{Path.cwd() / '.outrider' / 'torch'}"
    )


def test_run_says_where_the_python_of_the_active_variant_is_gone(store: VariantStore) -> None:
    call("activate", "2.13-cpu")
    Path("train.py").touch()
    result = CliRunner().invoke(everything, ["run", "train.py"])
    assert str(result.exception) == (
        f"the Python of torch variant 2.13-cpu is gone: {store.interpreter('2.13-cpu')}\n"
        "hint: outrider torch remove 2.13-cpu, then install it again"
    )


def test_run_says_which_script_is_missing(store: VariantStore) -> None:
    result = CliRunner().invoke(everything, ["run", "tran.py"])
    assert str(result.exception) == (
        "there is no script tran.py\nhint: outrider's own options come before it, the script's after it"
    )


def test_run_names_the_nearest_option(store: VariantStore) -> None:
    result = CliRunner().invoke(everything, ["run", "--device", "cpu", "tran.py"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "error: no such option --device\nhint: did you mean '--devices'?\n"


def test_run_shows_the_way_to_its_options(store: VariantStore) -> None:
    result = CliRunner().invoke(everything, ["run", "-q=1", "tran.py"])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: no such option -q\nhint: ")
    assert result.stderr.endswith(" run --help shows the options\n")
