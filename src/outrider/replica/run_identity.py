"""The settings of a recipe that decide which samples and steps come next.

A checkpoint stores them, and a run that resumes from it must have the same. Called by the replica, and before ranks
start.
"""

from __future__ import annotations

from typing import Any

from outrider.replica.recipe import Recipe


def identity_of(recipe: Recipe) -> dict[str, Any]:
    """The settings that a checkpoint must share with the recipe of a run resumed from it."""
    names = ("seed", "lr_scale", "drop_last")
    common = {"policy": recipe.policy_spec.name} | {name: getattr(recipe, name) for name in names}
    if isinstance(recipe.batch_size, dict):
        return common  # sizes by device are compared when ranks know their devices
    # In the form that JSON reads back.
    return common | {
        "batch_size": list(recipe.batch_size) if isinstance(recipe.batch_size, tuple) else recipe.batch_size
    }
