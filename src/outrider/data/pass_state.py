"""The position in a pass over a data set, as `state_dict()` returns it and `load_state_dict()` takes it.

Decides what must be the same when a pass continues: the number of samples and their order. Ranks, batch size and policy
may differ. Created by the session's run; the user saves it with the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from outrider.errors import ConfigError
from outrider.policy.remaining import Remaining

STATE_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class PassState:
    """The positions of an epoch's order that remain."""

    epoch: int
    """The number of the epoch, which decides the order of the samples."""
    num_samples: int | None = None
    """Positions of the whole pass; None if the pass has not begun."""
    remaining: list[list[int]] | None = None
    """Ranges of positions, each as first position and count; None for all positions."""
    order: list[Any] | None = None
    """Values that decide the order, besides the epoch."""
    schema_version: int = STATE_VERSION

    def as_dict(self) -> dict[str, Any]:
        """Return numbers, text and lists only, so that the state can be saved in any format."""
        return asdict(self)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> PassState:
        """Read the output of `as_dict`; raises a ConfigError for anything else."""
        try:
            read = cls(**state)
        except TypeError:
            raise ConfigError(
                f"this is no state of s.batches(): it has the keys {', '.join(map(str, state))}",
                hint="pass what feed.state_dict() returned",
            ) from None
        if read.schema_version != STATE_VERSION:
            raise ConfigError(
                f"the state of s.batches() has schema_version {read.schema_version}, expected {STATE_VERSION}",
                hint="use the release of outrider that wrote it",
            )
        return read

    def rest(self, num_samples: int, *, kept: int, order: list[Any]) -> Remaining:
        """The remaining positions of the pass, of which only the first `kept` count; raises if its data differs."""
        if self.remaining is None:
            return Remaining.whole(kept)
        if self.num_samples != num_samples:
            raise ConfigError(
                f"the state of s.batches() is that of {self.num_samples} samples, the data set has {num_samples}",
                hint="pass the same data set, or leave load_state_dict() out to begin the epoch anew",
            )
        if self.order != order:
            raise ConfigError(
                f"the state of s.batches() is that of another order of the samples: {self.order}, now {order}",
                hint="pass the same seed, shuffle and order; a sampler needs a torch.Generator or a set_epoch() method",
            )
        # With another number of ranks, drop_last drops a different number of samples at the end.
        pieces = [[start, min(count, kept - start)] for start, count in self.remaining if start < kept]
        return Remaining.restored(pieces, end=kept)
