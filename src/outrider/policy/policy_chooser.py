"""Chooses between exact and local steps by the expected learning per second; for the policy `auto`.

Exact steps are those of one device (`balanced`): shared by all ranks, or taken by one of them alone. Local steps
(`async`) use every rank's full speed, but a sample is worth less. Compares throughput times that worth. Every rank
computes the same choice from the same reports.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import fmean, variance
from typing import Any

from outrider.policy.batch_splitter import Splitter
from outrider.policy.effects import AverageReport, Decision
from outrider.policy.sample_worth import effective_ranks, sample_worth
from outrider.policy.window_planner import WindowPlanner

# The worth of a sample differs between tasks by about a tenth either way. If it is less, the same number of epochs ends
# with a worse result (docs/log.md), so a small promise does not count.
LEAST_GAIN = 1.2
"""Local steps are tried if they promise this gain; once measured, they must at least equal exact steps."""
# Assumed before local steps were tried: the cost of averages, and steps of the fastest rank between two averages.
EXPECTED_OVERHEAD = 0.05
EXPECTED_WINDOW = 4
CLEARLY_SLOWER = 0.95
"""If shared steps have at most this part of the fastest rank's speed, the user is advised to train on it alone."""
LEAST_STEPS_LEFT = 48
"""Remaining steps of a run that local steps need to pay for the change."""
# The first windows after a change carry its cost; a judgement needs some more windows.
WINDOWS_SKIPPED = 3
WINDOWS_JUDGED = 12
# Local steps learn worse if their loss exceeds that of the exact steps before by this many standard errors.
LOSSES_KEPT = 32
LEAST_LOSSES = 4
WORSE_BY_ERRORS = 3.0
# Windows until local steps may be tried again after they were given up; four times as many after each time.
WINDOWS_UNTIL_RETRY = 1000
RETRY_GROWTH = 4


class PolicyChooser:
    """Whether the ranks take exact or local steps, and why."""

    def __init__(self, *, world_size: int) -> None:
        self._world_size = world_size
        self.is_exact = True
        self.changed_at = 0
        """The window of the report at which the choice last changed."""
        self.fastest = 0
        """The rank with the highest rate when local steps began."""
        self._exact_rate = 0.0
        self._rate_after_local = 0.0
        """Samples per ms of the exact steps to which local steps would give way."""
        self._samples_until_retry = 0
        self._retry_after = WINDOWS_UNTIL_RETRY
        self._has_told = False
        self._windows: list[AverageReport] = []
        self._paused_before_ms = 0.0
        """The longest pause of any rank's loop in the window before those; others may have waited for it since."""
        self._num_local = 0
        self._exact_losses: deque[float] = deque(maxlen=LOSSES_KEPT)

    # Exact steps

    def learn_exact(self, report: AverageReport, splitter: Splitter, left: int | None) -> list[Decision]:
        """Learn from an exact step or a stretch of them; `left`: samples until the end of the run, if known."""
        self._samples_until_retry -= report.samples
        if report.loss is not None:
            self._exact_losses.append(report.loss)
        if not self.is_exact:
            # Reports on their way when local steps were chosen.
            return []
        if splitter.unshared_reason is not None:
            return self._told_once(splitter.unshared_reason)
        rate, own_rates, rates_alone = splitter.exact_rate, splitter.own_rates, splitter.rates_alone
        if (
            self._world_size == 1
            # The comparison takes a few steps, and its result counts.
            or splitter.compares_wholes
            or rate is None
            or own_rates is None
            or rates_alone is None
            or self._samples_until_retry > 0
        ):
            return []
        self._exact_rate = rate
        worth = sample_worth(EXPECTED_WINDOW, ranks=effective_ranks(own_rates))
        local_rate = sum(own_rates) * (1 - EXPECTED_OVERHEAD)
        # Where the fastest rank may not work alone, as rank 1 in a user's own loop, it may yet beat shared steps.
        fastest = rates_alone.index(max(rates_alone))
        best_rate = rate if splitter.may_work_alone(fastest) else max(rate, *rates_alone)
        gain = local_rate * worth / best_rate
        # Loops of a user's own that have rested lag behind: local steps are chosen before that, or never.
        is_too_late = splitter.stays_alone
        is_nearly_over = left is not None and left < LEAST_STEPS_LEFT * splitter.usual_samples
        if gain < LEAST_GAIN or is_too_late or is_nearly_over:
            if splitter.soon_alone is not None:
                return []
            over = ", but the run is nearly over" if gain >= LEAST_GAIN and is_nearly_over else ""
            return self._told_once(self._stays(splitter, gain) + over)
        self.fastest = fastest
        lone = splitter.lone_after_local
        self._rate_after_local = rate if lone is None else rates_alone[lone]
        is_alone = best_rate > rate or splitter.lone is not None or splitter.soon_alone is not None
        than = "the fastest rank alone" if is_alone else "shared steps"
        reason = _promise(gain, local_rate / best_rate, worth, than=than)
        return [self._change(report, is_exact=False, reason=reason)]

    def _stays(self, splitter: Splitter, gain: float) -> str:
        rates = splitter.rates_alone or (self._exact_rate,)
        fastest = rates.index(max(rates))
        speed = self._exact_rate / rates[fastest]
        how = f"ranks share every step, {speed:.2f}x the fastest rank alone"
        is_other_better = speed < CLEARLY_SLOWER and not splitter.may_work_alone(fastest)
        if splitter.lone is not None:
            # A rank that stays alone was not measured alone before.
            is_faster = "is expected to be" if splitter.stays_alone else "is"
            how = f"rank {splitter.lone} alone {is_faster} faster than sharing"
            if is_other_better:
                how += f": name the device of rank {fastest} first, it is {1 / speed:.2g}x as fast"
        elif is_other_better:
            # Where no rank may work alone, the order of the devices changes nothing.
            how += f": give the run that device only{', or name it first' if splitter.may_work_alone(0) else ''}"
        words = f"{how}; local steps would learn {gain:.2f}x as much per second"
        return words if gain < 1 or gain >= LEAST_GAIN else f"{words}, {LEAST_GAIN:g}x is needed"

    def _told_once(self, reason: str) -> list[Decision]:
        if self._has_told:
            return []
        self._has_told = True
        return [Decision("policy", "exact", reason)]

    # Local steps

    def learn_local(self, report: AverageReport, planner: WindowPlanner) -> list[Decision]:
        """Learn from a window of local steps; returns the decision to go back to exact steps, if any."""
        self._num_local += 1
        if self._num_local <= WINDOWS_SKIPPED or self.is_exact:
            self._paused_before_ms = _longest_pause_ms(report)
            return []
        if planner.is_drifting:
            return [self._give_up(report, "the replicas drift apart although windows were made shorter")]
        self._windows.append(report)
        if len(self._windows) < WINDOWS_JUDGED:
            return []
        windows, self._windows = self._windows, []
        rates = _measured_rates(windows, self._world_size, paused_before_ms=self._paused_before_ms)
        self._paused_before_ms = _longest_pause_ms(windows[-1])
        worth = sample_worth(_mean_window(windows), ranks=effective_ranks(rates))
        throughput = sum(rates) / self._rate_after_local
        worse = self._learns_worse(windows)
        if worse is not None:
            return [self._give_up(report, worse)]
        if throughput * worth >= 1:
            return []
        why = f"local steps have {throughput:.2f}x the samples per second, each worth {worth:.2f}"
        return [self._give_up(report, f"{why}: less than exact steps")]

    def _learns_worse(self, windows: Sequence[AverageReport]) -> str | None:
        """The reason, if the loss has risen above the level that exact steps had reached."""
        before = self._exact_losses
        now = [window.loss for window in windows if window.loss is not None]
        if len(before) < LEAST_LOSSES or len(now) < LEAST_LOSSES:
            return None
        error = math.sqrt(variance(before) / len(before) + variance(now) / len(now))
        if fmean(now) <= fmean(before) + WORSE_BY_ERRORS * error:
            return None
        return f"the loss is {fmean(now):.4g}, exact steps had brought it to {fmean(before):.4g}"

    def _give_up(self, report: AverageReport, reason: str) -> Decision:
        self._samples_until_retry = self._retry_after * max(1, report.samples)
        self._retry_after *= RETRY_GROWTH
        return self._change(report, is_exact=True, reason=reason)

    def _change(self, report: AverageReport, *, is_exact: bool, reason: str) -> Decision:
        self.is_exact = is_exact
        self.changed_at = report.window
        self._windows, self._num_local, self._has_told = [], 0, False
        if is_exact:
            self._exact_losses.clear()
        return Decision("policy", "exact" if is_exact else "local", reason)

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint; an unfinished judgement starts anew."""
        return {
            "is_exact": self.is_exact,
            "fastest": self.fastest,
            "exact_rate": self._exact_rate,
            "rate_after_local": self._rate_after_local,
            "exact_losses": list(self._exact_losses),
            "samples_until_retry": self._samples_until_retry,
            "retry_after": self._retry_after,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.is_exact = state["is_exact"]
        self.fastest = state["fastest"]
        self._exact_rate = state["exact_rate"]
        self._rate_after_local = state.get("rate_after_local", self._exact_rate)
        self._exact_losses = deque(state["exact_losses"], maxlen=LOSSES_KEPT)
        self._samples_until_retry = state["samples_until_retry"]
        self._retry_after = state["retry_after"]


def _measured_rates(
    windows: Sequence[AverageReport], world_size: int, *, paused_before_ms: float = 0.0
) -> tuple[float, ...]:
    """Samples per ms of each rank over some windows, including averages and waits, also those between epochs.

    Waiting for a rank whose user's loop paused, as for an evaluation, is no cost of local steps.
    """
    paused_ms = paused_before_ms + sum(map(_longest_pause_ms, windows))
    rates = []
    for rank in range(world_size):
        facts = [window.ranks[rank] for window in windows]
        waited_ms = sum(own.exposed_ms + own.border_ms for own in facts)
        for_others_ms = max(0.0, paused_ms - sum(own.paused_ms for own in facts))
        spent_ms = sum(own.compute_ms + own.setup_ms for own in facts) + max(0.0, waited_ms - for_others_ms)
        rates.append(sum(own.samples for own in facts) / spent_ms if spent_ms > 0 else 0.0)
    return tuple(rates)


def _longest_pause_ms(window: AverageReport) -> float:
    return max(own.paused_ms for own in window.ranks)


def _mean_window(windows: Sequence[AverageReport]) -> float:
    return fmean(max(facts.batches for facts in window.ranks) for window in windows)


def _promise(gain: float, throughput: float, worth: float, *, than: str) -> str:
    return (
        f"they promise to learn {gain:.2f}x as much per second as {than}: {throughput:.2f}x the samples, "
        f"each worth {worth:.2f} of one in an exact step"
    )
