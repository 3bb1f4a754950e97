"""Completion: the script for a shell, and what a shell gets when it asks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.cli import completion
from outrider.cli.main import app
from outrider.machine import codec
from outrider.machine.variants import RECORD, Variant, VariantStore


def completed(home: Path, *words: str) -> list[str]:
    """What the program answers a bash that asks about the last of these words."""
    environment = {
        **os.environ,
        "OUTRIDER_HOME": str(home),
        "_OUTRIDER_COMPLETE": "complete_bash",
        "COMP_WORDS": "\n".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }
    program = "import sys; sys.argv[0] = 'outrider'; from outrider.cli.main import main; main()"
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout.split()


def test_commands_are_completed(tmp_path: Path) -> None:
    assert completed(tmp_path, "outrider", "di")[0] == "diagnose"
    assert completed(tmp_path, "outrider", "torch", "inst") == ["install"]


def test_installed_variants_are_completed(tmp_path: Path) -> None:
    store = VariantStore(tmp_path / "torch")
    store.path("2.13-cpu").mkdir(parents=True)
    codec.write(Variant(name="2.13-cpu", backend="cpu", torch="2.13.0+cpu"), store.path("2.13-cpu") / RECORD)
    assert completed(tmp_path, "outrider", "torch", "activate", "2") == ["2.13-cpu"]


def test_devices_are_completed_also_as_the_next_of_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.machine.devices.cuda_devices", lambda: ("cuda:0",))
    assert completion.devices("") == ["auto", "cpu", "cpu@0.5", "cuda:0"]
    assert completion.devices("cuda:0,c") == ["cuda:0,cpu", "cuda:0,cpu@0.5", "cuda:0,cuda:0"]


def test_values_from_tables_are_completed() -> None:
    assert completion.backends("cu13") == ["cu130", "cu132"]
    assert completion.versions("2.13") == ["2.13"]
    assert completion.ways("g") == ["groups"]
    assert completion.templates("fl") == ["flow"]
    assert completion.shells("z") == ["zsh"]


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_every_shell_has_a_script(shell: str) -> None:
    shown = CliRunner().invoke(app, ["--show-completion", shell])
    assert shown.exit_code == 0
    assert "_OUTRIDER_COMPLETE" in shown.stdout


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not on PATH")
def test_bash_takes_the_script() -> None:
    script = CliRunner().invoke(app, ["--show-completion", "bash"]).stdout
    ended = subprocess.run(
        ["bash"], input=f"{script}\ncomplete -p outrider", capture_output=True, text=True, timeout=60
    )
    assert (ended.stdout, ended.stderr) == ("complete -o default -F _outrider_completion outrider\n", "")


def test_an_unknown_shell_gets_the_nearest() -> None:
    shown = CliRunner().invoke(app, ["--show-completion", "bsh"])
    assert str(shown.exception) == "unknown shell 'bsh'\nhint: did you mean bash? shells are bash, zsh, fish, pwsh"
