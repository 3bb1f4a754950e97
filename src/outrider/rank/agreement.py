"""Compares the options of all ranks before training, because all must follow one schedule.

Decides which options may differ between ranks; every other option is compared. Called when ranks have joined, and at
the start of a pass over a data set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

from outrider.data.augmented_feed import AugmentedFeed
from outrider.data.feed import Feed
from outrider.data.stream_feed import StreamFeed
from outrider.errors import ConfigError
from outrider.rank.session_feeds import Source
from outrider.rank.training_length import Goal
from outrider.record.run_config import RunConfig
from outrider.replica.loop_replica import LoopReplica
from outrider.replica.option_info import options_where
from outrider.replica.recipe import LoopRecipe, Recipe
from outrider.world.world import World

MAY_DIFFER = frozenset(
    name for kind in (Recipe, RunConfig) for name in options_where(kind, lambda info: info.may_differ)
)
"""Options that need not be equal on all ranks."""
_GIVEN = "given"


def options_to_compare(recipe: LoopRecipe, config: RunConfig) -> dict[str, Any]:
    """The options that must be equal on all ranks, in JSON types."""
    return to_compare(recipe) | to_compare(config)


def pass_to_compare(source: Source, *, num_samples: int, goal: Goal | None = None) -> dict[str, Any]:
    """What must be equal on all ranks in a pass over a data set; `goal` is the argument of `epochs()`."""
    source_options = to_compare(source, apart_from=MAY_DIFFER | {"dataset", "loading", "order_seed"})
    length = {} if goal is None else asdict(goal)
    order = {"the seed of the DataLoader's generator": source.order_seed}
    return {**length, "the number of samples": num_samples, **order} | source_options


def stream_to_compare(feed: Feed) -> dict[str, Any]:
    """What can be compared of a stream before it is read: its first sample."""
    plain = feed.plain if isinstance(feed, AugmentedFeed) else feed
    return {"the first sample of the stream": plain.first_sample()} if isinstance(plain, StreamFeed) else {}


def steps_to_compare(replica: LoopReplica) -> dict[str, Any]:
    """What a prepared schedule needs: an equal number of batches per optimizer step on all ranks that have stepped."""
    per_step = replica.counts.per_step.seen
    is_needed = replica.schedulers and replica.counts.per == "optimizer-step" and per_step is not None
    return {"the number of batches per optimizer step": per_step} if is_needed else {}


def compare(world: World, values: Sequence[Mapping[str, Any]]) -> None:
    """Raise the same error on all ranks if an option differs; all ranks call this with the `values` of all."""
    try:
        check_equal(values)
    except ConfigError:
        # Every rank raises this, so rank 0 can wait until the others have finished reading from its store.
        world.await_leave()
        raise


def check_data(world: World, feeds: Sequence[Feed]) -> None:
    """Compare the data sets of all ranks, for training and for evaluation; called by all ranks.

    A rank without an evaluation reports no evaluation data set.
    """
    sizes = world.exchange_json([feed.num_samples for feed in feeds], name="data set sizes")
    for place, name in enumerate(("the number of samples", "the number of evaluation samples")):
        compare(world, [{name: own[place]} if place < len(own) else {} for own in sizes])


def to_compare(options: Any, *, apart_from: frozenset[str] = MAY_DIFFER) -> dict[str, Any]:
    """The fields of a dataclass; for the user's own objects only whether they are given."""
    names = [field.name for field in fields(options) if field.name not in apart_from]
    return {name: _plain(getattr(options, name)) for name in names}


def check_equal(values: Sequence[Mapping[str, Any]]) -> None:
    """Raise if an option differs; `values` holds the options of each rank, in order."""
    names = dict.fromkeys(name for own in values for name in own)
    by_rank = {name: {rank: own[name] for rank, own in enumerate(values) if name in own} for name in names}
    details = [f"{name} is {_told(given)}" for name, given in by_rank.items() if _differ(list(given.values()))]
    if details:
        raise ConfigError(
            f"the ranks disagree: {'; '.join(details)}",
            hint="start every rank with the same options and the same data, or some samples are used twice and others "
            "never",
        )


def _differ(values: Sequence[Any]) -> bool:
    return any(value != values[0] for value in values)


def _told(given: Mapping[int, Any]) -> str:
    """Each value with its ranks, as in "0 on ranks 0, 2 and 1 on rank 1"."""
    ranks: dict[str, list[str]] = {}
    for rank, value in given.items():
        ranks.setdefault(_GIVEN if value == _GIVEN else repr(value), []).append(str(rank))
    return " and ".join(
        f"{text} on rank{'' if len(those) == 1 else 's'} {', '.join(those)}" for text, those in ranks.items()
    )


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Path):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return to_compare(value, apart_from=frozenset())
    if isinstance(value, (tuple, list)):
        return [_plain(part) for part in value]
    return _GIVEN
