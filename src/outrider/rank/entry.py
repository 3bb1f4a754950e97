"""The entry point of a rank: builds the recipe from its parts, joins the world and trains.

Decides nothing; the launcher runs it in each rank.
"""

from __future__ import annotations

from typing import Any

from outrider.rank.rank_life import RunSetting
from outrider.rank.train_run import train_rank
from outrider.record import run_config as configs
from outrider.record.epoch_metrics import as_json
from outrider.record.run_config import RunConfig
from outrider.replica import recipe as recipes
from outrider.replica.recipe import Recipe
from outrider.world.messages import Link
from outrider.world.world import World


def run_rank(
    link: Link, *, settings: dict[str, Any], run_settings: dict[str, Any], setting: RunSetting, **objects: Any
) -> None:
    """Train on this rank and report every epoch to the starter; `objects` are the user's, each sent by its name."""
    recipe = Recipe(**settings, **{name: objects[name] for name in recipes.SENT_BY_NAME if name in objects})
    config = RunConfig(**run_settings, **{name: objects[name] for name in configs.SENT_BY_NAME if name in objects})
    with World.join(link, timeout_s=config.timeout_s) as world:
        for metrics in train_rank(link, recipe, config, world=world, setting=setting):
            if world.rank == 0:
                link.send("epoch", **as_json(metrics))
