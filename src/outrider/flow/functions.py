"""Functions of torch by name: they are written into the emitted code as they are, without a module around them.

Decides which functions have a name that every process understands; all others become a `Call` module. For `resolve`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional

_HOMES = {"torch": torch, "torch.nn.functional": torch.nn.functional}


def name_of(function: Any) -> str:
    """The full name of a function of torch, such as torch.relu; empty for anything else."""
    short = getattr(function, "__name__", "")
    if not short:
        return ""
    return next((f"{home}.{short}" for home, held in _HOMES.items() if getattr(held, short, None) is function), "")


def function_at(name: str) -> Callable[..., Any]:
    """The function of a full name."""
    home, _, short = name.rpartition(".")
    function: Callable[..., Any] = getattr(_HOMES[home], short)
    return function
