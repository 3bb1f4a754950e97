"""Plans windows: how many batches each rank does until the next average, so that all arrive together.

Does not measure, lease or average; every rank computes the same plan from the same reports.
Called by the policies cadence (exact leases) and asynchronous (length of its own window).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from outrider.core.anchor import Anchor, batches_at, least_waste, waste
from outrider.core.effects import Decision, RankFacts, Report
from outrider.core.guard import Guard
from outrider.core.pace import Pace
from outrider.core.plan import Plan, PlannerConfig, deal
from outrider.errors import ConfigError

__all__ = ["Plan", "Planner", "PlannerConfig"]

PROBE_BATCHES = 2
# What is left after a full window is merged into it when it is smaller than this part of a window.
STUB = 0.5
# A settled plan is kept while no rank is off by more than a batch (or this part) and a new one saves little.
DEAD_ZONE_PART = 0.05
DEAD_ZONE_WASTE = 0.005
GUARD_SHRINK = 0.5
COSTS_KEPT = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class _Settled:
    """The full window in force, and the tuned anchor it was made for."""

    tuned_anchor: int
    batches: tuple[int, ...]


class Planner:
    """Plans of one world: changes only by reports, so equal reports give equal plans on every rank."""

    def __init__(self, config: PlannerConfig) -> None:
        self._config = config
        self._paces = [Pace() for _ in range(config.world_size)]
        self._has_warmed_up = [False] * config.world_size
        self._anchor = _new_anchor(config)
        self._guard = Guard(config.drift_threshold)
        self._num_reports = 0
        self._costs_ms: list[float] = []
        self._losses_ms: list[float] = []
        self._settled = self._settle(None)
        self._shares = self._speed_shares()

    @property
    def anchor(self) -> int:
        return self._anchor.value

    @property
    def paces(self) -> tuple[float | None, ...]:
        """Measured ms per batch; None for a rank not measured yet."""
        return tuple(pace.ms for pace in self._paces)

    def share(self, rank: int) -> float:
        """The rank's part of the world's speed; equal parts when nothing is known."""
        return self._shares[rank]

    def window(self, remaining: int) -> Plan:
        """The next window, given the samples left in the segment; asking twice changes nothing."""
        full = self._full_window()
        if remaining == full.total or remaining >= full.total * (1 + STUB):
            return full
        return self._last_window(remaining, full.anchor)

    def learn(self, report: Report) -> list[Decision]:
        """Take in what all ranks did since the last report; returns what changed, for the timeline."""
        self._observe_paces(report)
        self._observe_costs(report)
        self._num_reports += 1
        decisions = self._judge(report)
        if not any(decision.kind == "anchor" for decision in decisions):
            decisions += self._tune()
        self._settled = self._settle(self._settled)
        self._shares = self._speed_shares()
        return decisions

    def state(self) -> dict[str, Any]:
        settled = self._settled
        return {
            "paces": [pace.state() for pace in self._paces],
            "has_warmed_up": list(self._has_warmed_up),
            "anchor": self._anchor.state(),
            "guard": self._guard.state(),
            "num_reports": self._num_reports,
            "costs_ms": list(self._costs_ms),
            "losses_ms": list(self._losses_ms),
            "settled": settled and {"tuned_anchor": settled.tuned_anchor, "batches": list(settled.batches)},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what was learned; options given anew for this run stay in force."""
        if len(state["paces"]) != self._config.world_size:
            raise ConfigError(
                f"the saved planner has {len(state['paces'])} ranks, got world_size={self._config.world_size}",
                hint="resume with the same number of devices",
            )
        self._paces = [Pace.restored(entry) for entry in state["paces"]]
        self._has_warmed_up = list(state["has_warmed_up"])
        self._anchor = _new_anchor(self._config, start=state["anchor"]["value"])
        if state["guard"]["threshold"] == self._config.drift_threshold:
            self._guard = Guard.restored(state["guard"])
        self._num_reports = state["num_reports"]
        self._costs_ms = list(state["costs_ms"])
        self._losses_ms = list(state["losses_ms"])
        settled = state["settled"]
        last = settled and _Settled(tuned_anchor=settled["tuned_anchor"], batches=tuple(settled["batches"]))
        self._settled = self._settle(last)
        self._shares = self._speed_shares()

    # What is known of the speeds.

    def _planned_paces(self) -> tuple[float, ...] | None:
        """Paces that plans follow, up to a common factor: given, measured, hinted; None when a probe is needed."""
        if self._config.shares is not None:
            return tuple(1 / share for share in self._config.shares)
        measured = [pace.ms for pace in self._paces if pace.ms is not None]
        if len(measured) == self._config.world_size:
            return tuple(measured)
        if self._config.speed_hints is not None:
            return tuple(1 / speed for speed in self._config.speed_hints)
        return None

    def _guessed_paces(self) -> tuple[float, ...]:
        """As planned; a rank not measured yet is taken for an average one."""
        planned = self._planned_paces()
        if planned is not None:
            return planned
        known = [pace.ms for pace in self._paces if pace.ms is not None]
        typical = fmean(known) if known else 1.0
        return tuple(typical if pace.ms is None else pace.ms for pace in self._paces)

    def _speed_shares(self) -> tuple[float, ...]:
        speeds = [1 / pace for pace in self._guessed_paces()]
        total = math.fsum(speeds)
        return tuple(speed / total for speed in speeds)

    # Plans.

    def _full_window(self) -> Plan:
        if self._settled is None:
            batches = (PROBE_BATCHES,) * self._config.world_size
            return self._plan(batches, self._anchor.value, f"probe of {PROBE_BATCHES} batches each: no pace known yet")
        batches = self._settled.batches
        paces = self._guessed_paces()
        slowest = max(range(len(paces)), key=paces.__getitem__)
        source = "shares" if self._config.shares else "paces" if self._is_measured() else "speed_hints"
        reason = f"rank {slowest} sets the pace by {source}, rounding wastes {waste(batches, paces):.1%}"
        return self._plan(batches, batches[slowest], reason)

    def _plan(self, batches: tuple[int, ...], anchor: int, reason: str) -> Plan:
        samples = tuple(count * self._config.batch_size for count in batches)
        return Plan(batches=batches, samples=samples, anchor=anchor, reason=reason)

    def _last_window(self, remaining: int, anchor: int) -> Plan:
        config = self._config
        samples = deal(remaining, config.batch_size, self._guessed_paces(), max_batch_diff=config.max_batch_diff)
        batches = tuple(math.ceil(count / config.batch_size) for count in samples)
        reason = f"last window: {remaining} samples left, each batch to the rank that finishes it first"
        return Plan(batches=batches, samples=samples, anchor=anchor, reason=reason)

    def _settle(self, last: _Settled | None) -> _Settled | None:
        paces = self._planned_paces()
        if paces is None:
            return None
        tuned, bound = self._anchor.value, self._config.max_batch_diff
        minimum, maximum = _anchor_range(self._config)
        anchor = least_waste(tuned, paces, minimum=minimum, maximum=maximum, max_batch_diff=bound)
        fresh = batches_at(anchor, paces, max_batch_diff=bound)
        if last is not None and last.tuned_anchor == tuned and self._is_good_enough(last.batches, fresh, paces):
            return last
        return _Settled(tuned_anchor=tuned, batches=fresh)

    def _is_good_enough(self, last: tuple[int, ...], fresh: tuple[int, ...], paces: tuple[float, ...]) -> bool:
        """The dead zone: plans that flicker with the jitter of the paces would gain nothing."""
        if waste(last, paces) - waste(fresh, paces) > DEAD_ZONE_WASTE:
            return False
        # Compared at the same anchor, since only the ratios matter here.
        same = batches_at(min(last), paces, max_batch_diff=self._config.max_batch_diff)
        return all(abs(count - kept) <= max(1.0, DEAD_ZONE_PART * kept) for count, kept in zip(same, last, strict=True))

    # Learning.

    def _is_measured(self) -> bool:
        return all(pace.ms is not None for pace in self._paces)

    def _observe_paces(self, report: Report) -> None:
        for rank, facts in enumerate(report.ranks):
            if facts.samples == 0:
                continue
            # A rank's first batches carry its warm-up (kernels, allocator, caches), often ten times a batch.
            if self._has_warmed_up[rank]:
                self._paces[rank].observe(
                    compute_ms=facts.compute_ms, samples=facts.samples, batch_size=self._config.batch_size
                )
            self._has_warmed_up[rank] = True

    def _observe_costs(self, report: Report) -> None:
        # A report tells the cost of the average before it: the first has none, the second that of connecting.
        if self._num_reports < 2:
            return
        cost_of: Callable[[Sequence[float]], float] = min if self._config.is_blocking else fmean
        exposed_ms = [facts.exposed_ms for facts in report.ranks]
        # The last to arrive waits for nobody: where all wait, its cost is that of the average alone.
        self._costs_ms = [*self._costs_ms, cost_of(exposed_ms)][-COSTS_KEPT:]
        self._losses_ms = [*self._losses_ms, fmean(exposed_ms)][-COSTS_KEPT:]

    def _judge(self, report: Report) -> list[Decision]:
        if not self._config.guard:
            return []
        verdict = self._guard.judge(report.drift, anchor=_least_batches(report.ranks))
        shrunk = None
        if self._guard.wants_shrink and verdict is not None:
            shrunk = self._anchor.shrink(GUARD_SHRINK, f"guard: {verdict.reason}")
        return [decision for decision in (verdict, shrunk) if decision is not None]

    def _tune(self) -> list[Decision]:
        planned = self._planned_paces()
        if not self._costs_ms or not self._is_measured() or planned is None:
            return []
        # The cost of an average does not depend on the length of its window, so it is related to what a window
        # of the present anchor takes: probes, last windows and plans still under way cannot mislead.
        batches = batches_at(self._anchor.value, planned, max_batch_diff=self._config.max_batch_diff)
        window_ms = max(count * (pace.ms or 0.0) for count, pace in zip(batches, self._paces, strict=True))
        decision = self._anchor.after(
            exposed_ms=median(self._costs_ms),
            window_ms=window_ms,
            may_grow=not self._guard.blocks_growth,
            lost_ms=median(self._losses_ms),
        )
        return [] if decision is None else [decision]


def _least_batches(ranks: Sequence[RankFacts]) -> int:
    """What the slowest of those that worked really did."""
    return min((facts.batches for facts in ranks if facts.batches > 0), default=1)


def _anchor_range(config: PlannerConfig) -> tuple[int, int]:
    if config.anchor is not None:
        return config.anchor, config.anchor
    return config.min_anchor, config.max_anchor


def _new_anchor(config: PlannerConfig, start: int | None = None) -> Anchor:
    minimum, maximum = _anchor_range(config)
    first = config.start_anchor if start is None else start
    return Anchor(first, minimum=minimum, maximum=maximum, overhead_target=config.overhead_target)
