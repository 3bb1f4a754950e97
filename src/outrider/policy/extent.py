"""The length of a run: in passes over the data, steps or samples; its last epoch may be cut.

Decides where each epoch of a run ends, and the progress of a run. Called by the rank and the lab.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.policy.effects import Lease


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """Samples of the whole world, in a whole epoch and in the run."""

    epoch_samples: int
    total: int

    @property
    def num_epochs(self) -> int:
        return -(-self.total // self.epoch_samples)

    def stop(self, epoch: int) -> int:
        """The position at which this epoch ends."""
        return max(0, min(self.epoch_samples, self.total - epoch * self.epoch_samples))

    def seen(self, epoch: int, position: int) -> int:
        """Samples since the start of the run."""
        return epoch * self.epoch_samples + position

    def is_done(self, epoch: int, position: int) -> bool:
        return self.seen(epoch, position) >= self.total

    def progress(self, epoch: int, position: int) -> float:
        """From 0 to 1."""
        return min(1.0, self.seen(epoch, position) / self.total)

    def cut(self, epoch: int, spans: list[Lease]) -> list[Lease]:
        """Cut the segments of an epoch at its end."""
        stop = self.stop(epoch)
        return [Lease(span.start, min(span.stop, stop) - span.start) for span in spans if span.start < stop]
