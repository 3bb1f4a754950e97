"""The random state of a rank: what torch draws next, on the host and on the rank's device.

Called by the replica and by the checkpoints of a user's own loop.
"""

from __future__ import annotations

from typing import Any

import torch


def random_state(device: torch.device) -> dict[str, Any]:
    state: dict[str, Any] = {"random": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda_random"] = torch.cuda.get_rng_state(device)
    return state


def restore_random(device: torch.device, state: dict[str, Any]) -> None:
    """Draw what the run that stopped would have drawn next."""
    torch.set_rng_state(state["random"])
    if "cuda_random" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda_random"], device)
