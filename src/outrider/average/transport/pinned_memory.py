"""Registers memory that ranks share with CUDA, so that copies between it and a device need no copy in between.

Decides nothing about its use; where registration fails, copies are slower and right. Called by HostAverager.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def pinned(memories: Sequence[Tensor]) -> Iterator[int]:
    """Yield how many of these ranges of host memory could be registered; they are until the end of the context."""
    runtime = torch.cuda.cudart()
    registered = []
    for memory in memories:
        if int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0:
            registered.append(memory)
    try:
        yield len(registered)
    finally:
        for memory in registered:
            runtime.cudaHostUnregister(memory.data_ptr())
