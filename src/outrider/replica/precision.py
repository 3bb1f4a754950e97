"""The precision of forward and backward on each rank: fp32, bf16, or fp16 with loss scaling.

Decides what "auto" means on a device, and rejects fp16 if torch cannot compute it. Parameters, optimizer state and
averages stay in the model's own dtype, so ranks may differ. Called when a replica is created.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from outrider.errors import ConfigError, nearest
from outrider.policy.effects import Decision

PRECISIONS = ("fp32", "bf16", "fp16", "auto")
NATIVE_BF16 = (8, 0)
"""Cards compute bf16 natively from this compute capability on."""
FP16_TENSOR_CORES = (7, 0)

Precision = str | tuple[str, ...]
"""One name for all ranks, or one per rank."""


def check_precision(value: Any) -> None:
    """Raise for unknown names."""
    for one in value if isinstance(value, tuple) else (value,):
        if one not in PRECISIONS:
            close = nearest(str(one), PRECISIONS)
            hint = f"did you mean {close!r}?" if close else f"choose one of {', '.join(PRECISIONS)}"
            raise ConfigError(f"unknown precision {one!r}", hint=hint)


def choose_precision(value: Precision, *, rank: int, device: torch.device, name: str) -> Decision:
    """The precision of one rank, and the reason."""
    asked = value[rank] if isinstance(value, tuple) else value
    if asked == "auto":
        return _best(device, name)
    if asked == "fp16" and not _has_fp16(device):
        raise ConfigError(
            f"rank {rank} ({name}): torch {torch.__version__} has no fp16 autocast for {device.type} devices",
            hint="pass precision='auto', or one per rank such as precision=['fp16', 'fp32']",
            rank=rank,
        )
    return Decision("precision", asked, f"precision={asked} was given")


def _best(device: torch.device, name: str) -> Decision:
    if device.type != "cuda":
        return Decision("precision", "fp32", f"{name} is no CUDA device")
    capability = torch.cuda.get_device_capability(device)
    words = f"{name} has compute capability {capability[0]}.{capability[1]}"
    if capability >= NATIVE_BF16:
        return Decision("precision", "bf16", f"{words}: it computes bf16 natively")
    if capability >= FP16_TENSOR_CORES:
        return Decision("precision", "fp16", f"{words}: tensor cores for fp16, no native bf16")
    return Decision("precision", "fp32", f"{words}: neither native bf16 nor tensor cores")


def _has_fp16(device: torch.device) -> bool:
    """Whether torch has fp16 autocast on this device; if not, it only warns and computes without autocast."""
    if not torch.amp.is_autocast_available(device.type):
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return bool(torch.autocast(device.type, dtype=torch.float16)._enabled)
