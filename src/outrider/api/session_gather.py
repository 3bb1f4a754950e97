"""Gathers a value of the user over all ranks of a session.

Decides which values may be sent: only JSON, because other programs can write to the store of another launcher, and
unpickling their bytes could run code. Used by the session.
"""

from __future__ import annotations

import json
from typing import Any

from outrider.errors import ConfigError
from outrider.world.world import World


def gather(world: World, value: Any) -> list[Any]:
    """Gather the values of all ranks in rank order; all ranks call this."""
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"gather() takes numbers, text, lists and dicts, got {type(value).__name__}: {error}",
            hint="pass tensor.tolist(); torch.distributed.all_gather_object sends other objects",
        ) from error
    return world.exchange_json(value, name="gathered values", what="gather() on all ranks")
