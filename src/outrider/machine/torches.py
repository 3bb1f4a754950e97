"""Finds the interpreters that may hold a torch and asks each one in a child process what its torch is.

A torch that is missing, crashes or hangs becomes a fact with its error. Called by detect and variants.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from outrider.machine import child
from outrider.machine.devices import CARD_ORDER
from outrider.machine.facts import TorchBuild

ASK_S = 60.0


def candidate_interpreters(folder: Path, variants: dict[str, Path]) -> dict[str, str]:
    """Interpreter to where it was found; the one that training here would use comes first."""
    candidates: list[tuple[str, Path | None]] = [(f"variant {name}", path) for name, path in variants.items()]
    candidates.append(("this Python", Path(sys.executable)))
    candidates += [(variable, _python_in(os.environ.get(variable))) for variable in ("VIRTUAL_ENV", "CONDA_PREFIX")]
    candidates.append((".venv", _python_in(str(folder / ".venv"))))
    candidates.append(("PATH", _on_path("python3")))
    # By folder and not resolved: python and python3 of one environment are one, while the environments of one Python
    # all link to the same file.
    found: dict[str, tuple[str, str]] = {}
    for origin, path in candidates:
        if path is not None and path.exists():
            absolute = os.path.abspath(path)
            found.setdefault(os.path.dirname(absolute), (absolute, origin))
    return dict(found.values())


def ask_torch(interpreter: str, *, origin: str, timeout_s: float = ASK_S) -> TorchBuild | None:
    """What this interpreter's torch says of itself; None where it has no torch at all."""
    command = (interpreter, str(child.script("torch_info.py")))
    ended = child.run(command, timeout_s=timeout_s, environment=CARD_ORDER)
    found = child.answer(ended)
    if found is not None:
        return _build(interpreter, origin, found)
    if "No module named 'torch'" in ended.last_line:
        return None
    return TorchBuild(interpreter=interpreter, origin=origin, error=ended.reason or ended.last_line)


def find_torches(folder: Path, variants: dict[str, Path]) -> tuple[TorchBuild, ...]:
    """Every torch build that an interpreter here can import, or fails to."""
    candidates = candidate_interpreters(folder, variants)
    builds = [ask_torch(interpreter, origin=origin) for interpreter, origin in candidates.items()]
    return tuple(build for build in builds if build is not None)


def _build(interpreter: str, origin: str, found: dict[str, Any]) -> TorchBuild:
    return TorchBuild(interpreter=interpreter, origin=origin, **{**found, "archs": tuple(found.get("archs") or ())})


def _python_in(prefix: str | None) -> Path | None:
    return Path(prefix) / "bin" / "python" if prefix else None


def _on_path(name: str) -> Path | None:
    found = shutil.which(name)
    return Path(found) if found else None
