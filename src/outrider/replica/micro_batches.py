"""The sizes of the micro-batches in which a rank computes its batches, so that each fits the memory of its device.

Decides how many samples are computed at once: as given, or whole batches until memory runs out. For any sizes, the
gradient is that of the whole batch. Does not cut data and does not free memory. Called by the replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from outrider.errors import ConfigError
from outrider.policy.batch_splitter import even

MicroBatch = int | Literal["auto"] | tuple[int | Literal["auto"], ...]
"""Samples computed at once: on every rank, or one value per rank."""


class MicroBatches:
    """The current limit of one rank; it only ever shrinks."""

    def __init__(self, *, limit: int | None = None, accumulate: int = 1, batch_size: int = 1) -> None:
        """At least `accumulate` micro-batches, of at most `limit` samples; no limit while it is None."""
        self.limit = limit
        self._accumulate = accumulate
        # No single sample unless requested: BatchNorm cannot train on one.
        self._least = min(2, max(1, batch_size // accumulate))

    def counts(self, samples: int) -> tuple[int, ...]:
        """The samples of each micro-batch of a batch: nearly equal, so that the last one is not much shorter."""
        parts = max(1, min(self._accumulate, samples // self._least))
        if self.limit is not None:
            parts = max(parts, -(-samples // self.limit))
        return (samples,) if parts == 1 else even(samples, parts)

    def can_shrink(self, samples: int) -> bool:
        return self.counts(samples)[0] > 1

    def shrink(self, samples: int) -> int:
        """Halve the micro-batches of a batch that did not fit; returns the new limit."""
        self.limit = self.counts(samples)[0] // 2
        return self.limit


def check_micro_batch(value: object) -> None:
    """Raise for anything but a whole number, "auto", or a tuple of them."""
    values = value if isinstance(value, tuple) else (value,)
    for one in values:
        is_number = isinstance(one, int) and not isinstance(one, bool) and one >= 1
        if one != "auto" and not is_number:
            raise ConfigError(
                f"micro_batch must be a whole number >= 1 or 'auto', got {one!r}",
                hint="leave micro_batch out: each rank then computes as much at once as fits its memory",
            )


def check_one_per_rank(name: str, values: Sequence[object], *, world_size: int) -> None:
    """Raise if a list does not have one value per rank."""
    if len(values) != world_size:
        raise ConfigError(
            f"{name} has {len(values)} values for {world_size} rank{'' if world_size == 1 else 's'}",
            hint=f"pass one value per device, in the order of devices, or one {name} for all",
        )


def limit_of(micro_batch: MicroBatch, rank: int) -> int | None:
    """The limit that a rank starts with; None for whole batches."""
    own = micro_batch[rank] if isinstance(micro_batch, tuple) else micro_batch
    return None if own == "auto" else own
