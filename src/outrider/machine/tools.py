"""Finds CUDA toolkits, NCCL libraries, docker and a running MPS server.

Decides nothing; each absence is a normal answer. Called by detect.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from outrider.machine import child
from outrider.machine.facts import Docker, Library, Toolkit

_ASK_S = 5.0
_NCCL_PLACES = ("usr/lib", "usr/lib64", "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/local/lib")


def find_toolkits(root: Path) -> tuple[Toolkit, ...]:
    """Every CUDA toolkit with a compiler: CUDA_HOME, PATH and /usr/local."""
    places = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    places += sorted(map(str, (root / "usr/local").glob("cuda*")))
    found = {}
    for folder in filter(None, places):
        toolkit = _toolkit(Path(folder).resolve())
        if toolkit:
            found[toolkit.path] = toolkit
    compiler = shutil.which("nvcc")
    by_path = _toolkit(Path(compiler).resolve().parent.parent) if compiler else None
    # A compiler on PATH may be a wrapper of one that is found already, so its folder is not to be trusted.
    if by_path and by_path.version not in {toolkit.version for toolkit in found.values()}:
        found[by_path.path] = by_path
    return tuple(found.values())


def find_nccl(root: Path) -> tuple[Library, ...]:
    """NCCL on the system; torch brings its own, which its build tells."""
    found = {}
    for place in _NCCL_PLACES:
        for path in sorted((root / place).glob("libnccl.so*")):
            real = path.resolve()
            match = re.search(r"\.so\.(\d+(?:\.\d+)*)$", real.name)
            found[str(real)] = Library(name="nccl", version=match[1] if match else None, path=str(real))
    return tuple(found.values())


def find_docker() -> Docker | None:
    """Docker's version; None where there is no docker command."""
    if shutil.which("docker") is None:
        return None
    ended = child.run(("docker", "--version"), timeout_s=_ASK_S)
    match = re.search(r"version ([\d.]+)", ended.stdout)
    return Docker(
        version=match[1] if match else None,
        has_nvidia_runtime=shutil.which("nvidia-container-runtime") is not None
        or shutil.which("nvidia-ctk") is not None,
        sources={"version": "docker --version", "has_nvidia_runtime": "PATH"},
    )


def is_mps_running() -> bool:
    """Whether an MPS control daemon runs on this machine."""
    import psutil

    return any(
        (process.info["name"] or "").startswith("nvidia-cuda-mps") for process in psutil.process_iter(attrs=["name"])
    )


def _toolkit(folder: Path) -> Toolkit | None:
    compiler = folder / "bin" / "nvcc"
    if not compiler.exists():
        return None
    ended = child.run((str(compiler), "--version"), timeout_s=_ASK_S)
    match = re.search(r"release (\d+\.\d+)", ended.stdout)
    return Toolkit(version=match[1], path=str(folder)) if match else None
