"""A torch is asked in a child process, so that a missing, broken or hanging one is a finding."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from outrider.machine.detect import ask_torch, candidate_interpreters
from outrider.machine.machine_facts import TorchBuild


def interpreter(folder: Path, body: str) -> str:
    """A program that stands in for a Python with some torch."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_an_interpreter_without_torch_has_no_build(tmp_path: Path) -> None:
    python = interpreter(tmp_path, "echo \"ModuleNotFoundError: No module named 'torch'\" >&2; exit 1")
    assert ask_torch(python, origin="PATH") is None


def test_a_torch_that_cannot_be_imported_is_a_finding(tmp_path: Path) -> None:
    python = interpreter(tmp_path, 'echo "OSError: libcudnn.so.9: cannot open shared object file" >&2; exit 1')
    build = ask_torch(python, origin="PATH")
    assert build == TorchBuild(
        interpreter=python, origin="PATH", error="OSError: libcudnn.so.9: cannot open shared object file"
    )


def test_a_torch_that_crashes_is_a_finding(tmp_path: Path) -> None:
    build = ask_torch(interpreter(tmp_path, "kill -SEGV $$"), origin="PATH")
    assert build is not None
    assert build.error == "ended by SIGSEGV, no output"


def test_a_torch_that_hangs_is_a_finding(tmp_path: Path) -> None:
    build = ask_torch(interpreter(tmp_path, "sleep 60"), origin="PATH", timeout_s=0.2)
    assert build is not None
    assert build.error == "no answer within 0.2 s"


def test_an_interpreter_that_cannot_be_started_is_a_finding(tmp_path: Path) -> None:
    build = ask_torch(str(tmp_path / "python"), origin="PATH")
    assert build is not None
    assert build.error == f"cannot start {tmp_path}/python: No such file or directory"


def test_talk_before_the_answer_does_no_harm(tmp_path: Path) -> None:
    answer = '{"version": "2.13.0+cu130", "cuda": "13.0", "archs": ["sm_90"], "cudnn": "9.13.0"}'
    build = ask_torch(interpreter(tmp_path, f"echo welcome; echo '{answer}'"), origin="PATH")
    assert build is not None
    assert (build.version, build.cuda, build.archs) == ("2.13.0+cu130", "13.0", ("sm_90",))


def test_the_torch_of_this_python_describes_itself() -> None:
    pytest.importorskip("torch")
    build = ask_torch(sys.executable, origin="this Python")
    assert build is not None
    assert build.error is None
    assert build.version
    assert build.python == ".".join(map(str, sys.version_info[:3]))


def test_the_active_variant_is_asked_first_and_no_interpreter_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VIRTUAL_ENV", str(Path(sys.executable).parent.parent))
    variant = Path(interpreter(tmp_path, "true"))
    found = candidate_interpreters(tmp_path, {"2.13-cpu": variant})
    assert list(found.values())[:2] == ["variant 2.13-cpu", "this Python"]
    assert "VIRTUAL_ENV" not in found.values()
