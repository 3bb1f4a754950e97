"""Prints facts about the torch of this interpreter as one line of JSON.

Needs nothing but the standard library and that torch, which it imports late: the interpreter may not be Outrider's.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import platform
from typing import Any


def describe(torch: Any) -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": getattr(torch.version, "hip", None),
        "archs": arch_list(torch),
        "cudnn": dotted(torch.backends.cudnn.version()),
        "nccl": nccl_version(torch),
        "num_devices": torch.cuda.device_count(),
    }


def arch_list(torch: Any) -> list[str]:
    # get_arch_list() is empty without a usable card; the build's own flags are not.
    flags = torch._C._cuda_getArchFlags() if hasattr(torch._C, "_cuda_getArchFlags") else None
    return (flags or "").split() or list(torch.cuda.get_arch_list())


def dotted(version: int | None) -> str | None:
    """cuDNN 9 writes 91002 for 9.10.2, earlier ones 8902 for 8.9.2."""
    if version is None:
        return None
    scale = 10_000 if version >= 10_000 else 1_000
    return f"{version // scale}.{version % scale // 100}.{version % 100}"


def nccl_version(torch: Any) -> str | None:
    with contextlib.suppress(Exception):
        version = torch.cuda.nccl.version()
        return ".".join(map(str, version)) if isinstance(version, tuple) else str(version)
    return None


if __name__ == "__main__":
    print(json.dumps(describe(importlib.import_module("torch"))))
