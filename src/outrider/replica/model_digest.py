"""A digest of a model's bits, which tells whether two models are equal without keeping either.

Called when schedules are recorded, and by the replay that compares.
"""

from __future__ import annotations

import hashlib

import torch
from torch import nn

_BYTES = 8


def digest_of(model: nn.Module) -> str:
    """Sixteen hexadecimal digits that depend on every parameter and buffer; waits for a device."""
    hashed = hashlib.blake2b(digest_size=_BYTES)
    for name, tensor in sorted(model.state_dict().items()):
        hashed.update(name.encode())
        if isinstance(tensor, torch.Tensor):
            flat = tensor.detach().to("cpu").contiguous().reshape(-1)
            hashed.update(flat.view(torch.uint8).numpy().data)
    return hashed.hexdigest()
