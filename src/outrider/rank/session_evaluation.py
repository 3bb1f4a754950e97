"""Evaluations in a user's own loop: by one rank alone, or shared by all ranks.

Decides how the ranks' parts become one number. Reports the time of an evaluation to the caller, because it is not
training time. `Session` decides what the user may call when.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from outrider.data.feed import Feed
from outrider.data.leases import LocalLeases
from outrider.data.order import in_order, num_kept
from outrider.data.sequence_feed import SequenceFeed
from outrider.policy.effects import Lease
from outrider.rank.agreement import compare, pass_to_compare
from outrider.rank.epoch_accounting import open_leases
from outrider.rank.pass_feeds import agree_on_sequence
from outrider.rank.session_feeds import Feeds, Source
from outrider.rank.shared_evaluation import EvaluateAll, EvaluationSums, evaluate_all
from outrider.world.world import World

_TOGETHER = "evaluate_together() on all ranks"


class SessionEvaluation:
    """Evaluates the user's models on this rank."""

    def __init__(self, world: World, feeds: Feeds, *, on_evaluated: Callable[[EvaluationSums], None]) -> None:
        self._world = world
        self._feeds = feeds
        self._on_evaluated = on_evaluated
        self._num_together = 0

    def alone(self, function: EvaluateAll, source: Source, models: Sequence[nn.Module]) -> float:
        """The mean of `function` over the whole data set, computed by this rank alone."""
        started_s = time.perf_counter()
        feed = self._feed(source, is_shared=False)
        leases = LocalLeases(_span(feed, source), batch_size=source.batch_size)
        mine = evaluate_all(function, models, feed, leases, batch_size=source.batch_size, share=1.0)
        self._conclude(mine, started_s)
        return mine.total / mine.samples

    def together(self, function: EvaluateAll, source: Source, models: Sequence[nn.Module]) -> float:
        """The mean of `function` over the data set, divided among all ranks; all call this and get the same number."""
        started_s = time.perf_counter()
        self._num_together += 1
        # A rank that waits elsewhere learns at once that this rank cannot join; no rank waits here.
        self._world.announce_exchange("evaluations", what=_TOGETHER)
        feed = self._feed(source, is_shared=True)
        span = _span(feed, source)
        options = pass_to_compare(source, num_samples=span.count)
        leases = open_leases(self._world, self._key(options), span, batch_size=source.batch_size)
        share = 1 / self._world.size
        mine = evaluate_all(function, models, feed, leases, batch_size=source.batch_size, share=share)
        parts = self._world.exchange_json([mine.total, mine.samples, options], name="evaluations", what=_TOGETHER)
        compare(self._world, [part[2] for part in parts])
        self._conclude(mine, started_s)
        total, samples = (sum(part[i] for part in parts) for i in range(2))
        return float(total / samples)

    def _key(self, options: dict[str, Any]) -> str:
        """The name of an evaluation's ledger.

        Ranks with different data would lease each other samples that they do not have. So each gets its own ledger, and
        all see the difference when they compare their options afterwards, without a wait before.
        """
        digest = zlib.crc32(json.dumps(options, sort_keys=True).encode())
        return f"eval/{self._num_together}/{digest:08x}"

    def _feed(self, source: Source, *, is_shared: bool) -> Feed:
        """The feed of the data set, or of the user's own sequence of its samples, at its start."""
        feed = self._feeds.for_evaluation(source)
        if source.sequence is not None:
            drawn = source.sequence.draw(num_samples=feed.num_samples, seed=0, epoch=0)
            feed = SequenceFeed(feed, agree_on_sequence(self._world, drawn) if is_shared else drawn)
        feed.start_epoch(in_order(feed.num_samples), 0)
        return feed

    def _conclude(self, evaluated: EvaluationSums, started_s: float) -> None:
        self._on_evaluated(replace(evaluated, seconds=time.perf_counter() - started_s))


def _span(feed: Feed, source: Source) -> Lease:
    return Lease(0, num_kept(feed.num_samples, drop_last=source.drop_last, unit=source.batch_size))
