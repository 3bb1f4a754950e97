"""Detects that a device is out of memory, frees the memory of a failed step, and reports how much there was.

Decides nothing about micro-batches. Called by `retaken_step` and by the search for a micro-batch.
"""

from __future__ import annotations

import gc

import torch

# torch has no exception class for host memory: each allocator raises a RuntimeError with its own message.
_HOST_WORDS = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")
HINT = (
    "use a device with more memory, a smaller model or shorter samples, precision='bf16', or activation checkpointing "
    "(torch.utils.checkpoint) in the model"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception, or one of its causes, says that memory ran out."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, torch.OutOfMemoryError | MemoryError) or _is_of_host(cause):
            return True
        cause = cause.__cause__
    return False


def _is_of_host(error: BaseException) -> bool:
    return any(words in str(error) for words in _HOST_WORDS)


def free_memory(device: torch.device) -> None:
    """Free unused memory; call it once the failed step's exception, whose frames hold tensors, is gone."""
    gc.collect()
    if device.type in ("cuda", "xpu", "mps"):
        torch.get_device_module(device).empty_cache()


def memory_words(device: torch.device) -> str:
    """How much memory a device has, as the end of a sentence; empty if torch does not know."""
    if device.type != "cuda":
        return ""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    own_bytes = torch.cuda.memory_allocated(device)
    # Older versions of torch cannot tell the limit that was set.
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)(device)
    allowed = f"{fraction * total_bytes / 2**30:.1f} GiB allowed of " if fraction < 1 else ""
    return (
        f": {allowed}{total_bytes / 2**30:.1f} GiB in all, {free_bytes / 2**30:.1f} GiB free, "
        f"{own_bytes / 2**30:.1f} GiB held by model, optimizer and data"
    )
