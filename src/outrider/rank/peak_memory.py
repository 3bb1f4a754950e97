"""The peak memory of a rank.

Decides what is counted: memory allocated by torch on a GPU, resident memory of the process elsewhere. Called by the
accounting of an epoch.
"""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_BYTES_PER_UNIT = 1 if sys.platform == "darwin" else 1024
"""macOS reports resident memory in bytes, other systems in KiB."""


def peak_memory_bytes(device: torch.device) -> int:
    """Peak bytes since the process began."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # On Linux, exec passes getrusage's peak on, so that may be the starter's; VmHWM is the rank's own.
    own = re.search(r"^VmHWM:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE) if _STATUS.is_file() else None
    if own is not None:
        return int(own[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _BYTES_PER_UNIT
