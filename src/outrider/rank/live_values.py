"""The values that trackers get within an epoch: those of the last seconds, from the reports of averages.

Decides how often; causes no exchange or wait of its own. Called by `RankLife` on rank 0.
"""

from __future__ import annotations

import time

from outrider.policy.effects import AverageReport

LIVE_EVERY_S = 10.0


class LiveValues:
    """Sums the reports of averages; `take()` returns the values since the last call."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self.restart()

    def restart(self) -> None:
        """Reset the sums, for example at the start of an epoch."""
        self._since_s = time.perf_counter()
        self._samples = [0] * self._world_size
        self._loss_sum, self._loss_samples = 0.0, 0

    def saw(self, report: AverageReport) -> None:
        for rank, facts in enumerate(report.ranks):
            self._samples[rank] += facts.samples
            self._loss_sum += facts.loss_sum
            self._loss_samples += facts.loss_samples

    @property
    def is_due(self) -> bool:
        return time.perf_counter() - self._since_s >= LIVE_EVERY_S

    def take(self) -> dict[str, float]:
        seconds = time.perf_counter() - self._since_s
        values = {f"rank{rank}/live_samples_per_s": samples / seconds for rank, samples in enumerate(self._samples)}
        values["live/samples_per_s"] = sum(self._samples) / seconds
        if self._loss_samples:
            values["live/loss"] = self._loss_sum / self._loss_samples
        self.restart()
        return values
