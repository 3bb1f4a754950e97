"""Where a rank begins: builds the recipe from its parts, joins the world and trains.

Decides nothing; it is the target that the launcher sends to each rank.
"""

from __future__ import annotations

from typing import Any

from outrider.replica import recipe as recipes
from outrider.replica.recipe import Recipe
from outrider.runtime import config as configs
from outrider.runtime.config import RunConfig
from outrider.runtime.messages import Link
from outrider.runtime.metrics import as_json
from outrider.runtime.rank import RunSetting, train_rank
from outrider.runtime.world import World


def run_rank(
    link: Link, *, settings: dict[str, Any], run_settings: dict[str, Any], setting: RunSetting, **objects: Any
) -> None:
    """Train on this rank and tell the starter of every epoch; `objects` are the user's, each sent by its name."""
    recipe = Recipe(**settings, **{name: objects[name] for name in recipes.OBJECTS if name in objects})
    config = RunConfig(**run_settings, **{name: objects[name] for name in configs.OBJECTS if name in objects})
    with World.join(link, timeout_s=config.timeout_s) as world:
        for metrics in train_rank(link, recipe, config, world=world, setting=setting):
            if world.rank == 0:
                link.send("epoch", **as_json(metrics))
