"""Registers shared memory of ranks with CUDA, so that it can be copied to and from a device without a staging buffer.

Decides nothing about its use. If registration fails, copies are slower but still correct. Called by HostAverager.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def pinned(memories: Sequence[Tensor]) -> Iterator[int]:
    """Register ranges of host memory for the duration of the context; yields how many could be registered."""
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
