"""Opens averages that no policy requests: those of `wrap()` and of running means.

Decides on which device they are summed. The callers decide when to average.
"""

from __future__ import annotations

import torch

from outrider.average.arena import Arena
from outrider.average.primitives import Primitives
from outrider.average.transport.backend_table import BackendChoice
from outrider.world.world import World


def open_averages(arena: Arena, *, world: World, backend: BackendChoice, what: str) -> Primitives | None:
    """Open averages for the arena; returns None in a world of one rank. `what` names the averaged data in errors."""
    if world.size == 1:
        return None
    device = world.device if backend.spec.on_device else torch.device("cpu")
    collective = world.collective_for(backend.spec, what=what)
    return Primitives(arena, collective, rank=world.rank, world_size=world.size, device=device)
