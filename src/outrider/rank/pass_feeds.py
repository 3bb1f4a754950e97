"""The feed of a pass: that of the data set, or one over the sequence of samples from the user's sampler.

If ranks draw different sequences, rank 0's counts. A resumed pass needs the sequence that it began with. Called at the
start of a pass and of an evaluation.
"""

from __future__ import annotations

from typing import Any, NoReturn

from outrider.data.feed import Feed
from outrider.data.sample_sequence import DrawnSequence, SampleSequence, batching_options
from outrider.data.sequence_feed import SequenceFeed
from outrider.errors import ConfigError
from outrider.policy.policies import WHOLE_BATCH_POLICIES
from outrider.policy.policy_spec import PolicySpec
from outrider.rank.session_feeds import Feeds, Source
from outrider.world.world import World


class PassFeeds:
    """Opens the feeds of training passes on this rank."""

    def __init__(self, world: World, feeds: Feeds, *, policy: PolicySpec, seed: int) -> None:
        self._world = world
        self._feeds = feeds
        self._policy = policy
        self._seed = seed
        self.digest: str | None = None
        """Digest of the user's own sequence of the last pass, for checkpoints; None without one."""
        self.batching: dict[str, Any] = {}
        """The options that describe the batches of a batch sampler, with its last pass; empty without one."""
        self._batch_sizes: set[int] = set()

    def open(self, source: Source, epoch: int, *, before: str | None) -> Feed:
        """Open the feed of a pass; all ranks call this. `before` is the digest of the sequence of a resumed pass."""
        feed = self._feeds.for_training(source)
        self.digest, self.batching = None, {}
        if source.sequence is None:
            return feed
        refuse_to_divide(source.sequence, self._policy, world_size=self._world.size)
        drawn = source.sequence.draw(num_samples=feed.num_samples, seed=self._seed, epoch=epoch)
        drawn = agree_on_sequence(self._world, drawn)
        self.digest = drawn.digest
        self._describe(source, drawn)
        if before is not None and before != drawn.digest:
            refuse_other_sequence(source.sequence.name)
        return SequenceFeed(feed, drawn)

    def _describe(self, source: Source, drawn: DrawnSequence) -> None:
        assert source.sequence is not None
        if source.sequence.has_batches:
            self.batching = batching_options(source.sequence.name, drawn, sizes=self._batch_sizes)
            self._batch_sizes |= set(drawn.batch_sizes)

    def num_positions(self, source: Source, epoch: int) -> int:
        """Samples of a pass, or batches of a batch sampler; no rank waits for another."""
        feed, sequence = self._feeds.for_training(source), source.sequence
        if sequence is None:
            return feed.num_samples
        if hasattr(sequence.source, "__len__"):
            return len(sequence.source)
        return sequence.draw(num_samples=feed.num_samples, seed=self._seed, epoch=epoch).num_positions


def refuse_to_divide(sequence: SampleSequence | None, policy: PolicySpec, *, world_size: int) -> None:
    """Raise if the policy would have to divide batches of a batch sampler."""
    if sequence is not None and sequence.has_batches and policy.batch_is_global and world_size > 1:
        raise ConfigError(
            f"{sequence.name} makes batches that are handed out whole, and policy {policy.name!r} divides each batch "
            "among the ranks",
            hint=f"choose another policy: {', '.join(WHOLE_BATCH_POLICIES)}",
        )


def refuse_other_sequence(name: str) -> NoReturn:
    raise ConfigError(
        f"cannot resume in the middle of an epoch: {name} drew another sequence than before the checkpoint",
        hint="give the sampler a torch.Generator or a set_epoch() method, or pass order=f(epoch), so that an epoch "
        "always has the same sequence; or resume from the end of an epoch",
    )


def agree_on_sequence(world: World, drawn: DrawnSequence) -> DrawnSequence:
    """Rank 0's sequence; all ranks call this. It is sent only if another rank drew a different one."""
    if world.size == 1:
        return drawn
    digests = world.exchange_json(drawn.digest, name="sequences of samples")
    if len(set(digests)) == 1:
        return drawn
    text = drawn.to_text() if world.rank == 0 else None
    return DrawnSequence.from_text(world.exchange_json(text, name="the sequence of rank 0")[0])
