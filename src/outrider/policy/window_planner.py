"""Plans windows: how many batches each rank takes until the next average, so that all ranks arrive together.

Does not measure, lease or average; every rank computes the same plan from the same reports.
Called by the policies cadence (exact leases) and asynchronous (length of its own window).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from statistics import fmean, median_low
from typing import Any

from outrider.errors import ConfigError
from outrider.policy.anchor import Anchor, AverageCost, batches_at, least_waste, smallest_within, waste
from outrider.policy.effects import AverageReport, Decision, RankFacts, num_batches
from outrider.policy.guard import Guard
from outrider.policy.pace import Pace
from outrider.policy.uneven_batches import deal_by_size
from outrider.policy.weights import proportions
from outrider.policy.window_plan import PlannerConfig, WindowPlan, deal

__all__ = ["PlannerConfig", "WindowPlan", "WindowPlanner"]

PROBE_BATCHES = 2
# A remainder smaller than this part of a window is merged into the full window before it.
STUB = 0.5
# A short measurement of the devices cannot tell speeds apart that differ by less than this factor.
LEAST_HINT = 1.5
# A settled plan is kept while no rank is off by more than a batch (or this part) and a new plan saves little.
DEAD_ZONE_PART = 0.05
DEAD_ZONE_WASTE = 0.005
GUARD_SHRINK = 0.5
COSTS_KEPT = 5
# A single cost may be an outlier, and a window that is far too long is a large part of a short run.
COSTS_NEEDED = 2
# Drift grows at least with the square root of the window: beyond this factor old and new windows are not compared.
OTHER_LENGTH = 2
# No window is longer than this part of the rest of the run, so that ranks are close to each other when the run ends.
# For that, averages may cost this multiple of the target.
END_PART = 1 / 3
END_COST = 2.0
# One rank has nothing to average; windows end only so that it can stop or save a checkpoint.
ALONE_ANCHOR = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class _CurrentPlan:
    """The current full window, and the tuned anchor that it was made for."""

    tuned_anchor: int
    batches: tuple[int, ...]


class WindowPlanner:
    """Plans windows for one world; only reports change it, so equal reports give equal plans on every rank."""

    def __init__(self, config: PlannerConfig) -> None:
        self._config = config
        self._paces = [Pace() for _ in range(config.world_size)]
        self._has_warmed_up = [False] * config.world_size
        self._anchor = _new_anchor(config)
        self._guard = Guard(config.drift_threshold)
        self._num_reports = 0
        self._costs: list[AverageCost] = []
        self._rough_paces: tuple[float, ...] | None = None
        self._settled = self._settle(None)
        self._shares = self._speed_shares()

    @property
    def anchor(self) -> int:
        return self._anchor.value

    @property
    def paces(self) -> tuple[float | None, ...]:
        """Measured ms per batch; None for a rank not measured yet."""
        return tuple(pace.ms for pace in self._paces)

    @property
    def is_drifting(self) -> bool:
        """Whether the drift of the replicas still rises when windows cannot become any shorter."""
        return self._guard.blocks_growth and self._anchor.value == 1

    @property
    def is_bounded(self) -> bool:
        """Whether the user bounds the lead of fast ranks in a window."""
        return self._config.max_batch_diff is not None

    def share(self, rank: int) -> float:
        """The rank's part of the speed of all ranks; equal parts while nothing is known."""
        return self._shares[rank]

    def window(
        self, remaining: int, *, run_left: int | None = None, done: int = 0, may_stay_open: bool = False
    ) -> WindowPlan:
        """The next window, given the samples left in the segment; repeated calls change nothing.

        `run_left` is the number of samples left in the whole run, None if unknown: windows get shorter towards its end.
        `done` is the number of samples that all ranks took in this window before the segment. With `may_stay_open` a
        window that does not fit continues in the next segment.
        """
        full = self._full_window(run_left)
        if done:
            full = self._rest_of(full, done)
        left = remaining - full.total
        # A bound on the lead of fast ranks would have to be counted across segments.
        may_stay_open = may_stay_open and not self.is_bounded
        if may_stay_open and left < 0:
            reason = f"{remaining} samples of the epoch are left, the window goes on in the next one"
            return replace(self._last_window(remaining, full.anchor), stays_open=True, reason=reason)
        # Never leave a single sample, unless batches have one: its window would have no other batch to add it to.
        least_left = min(2, *self._config.sizes)
        if left == 0 or left >= (least_left if may_stay_open else max(full.total * STUB, least_left)):
            return full
        return self._last_window(remaining, full.anchor)

    def _rest_of(self, full: WindowPlan, done: int) -> WindowPlan:
        """Plan the rest of a window of this length, at least one batch.

        All ranks start the segment together. So each batch goes to the rank that finishes it first, whatever the ranks
        did before: waiting for a slow rank to do its own part would take longer than an average saves.
        """
        samples = self._dealt(max(1, full.total - done))
        batches = tuple(num_batches(count, size) for count, size in zip(samples, self._config.sizes, strict=True))
        reason = f"{full.reason}; the rest of a window that had {done} samples in epochs before"
        return self._plan(batches, full.anchor, reason)

    def hint(self, speeds: Sequence[float]) -> None:
        """Probe with batches in proportion to speeds that were measured, not given by the user.

        With equal batches, a fast rank waits for the slow ones; if it is ten times as fast, for most of the probe.
        """
        if max(speeds) >= LEAST_HINT * min(speeds):
            self._rough_paces = self._paces_at(proportions("speeds", speeds, world_size=self._config.world_size))
            self._shares = self._speed_shares()

    def learn(self, report: AverageReport) -> list[Decision]:
        """Learn from what all ranks did since the last report; returns the changes, for the timeline."""
        self._observe_paces(report)
        self._observe_costs(report)
        self._num_reports += 1
        decisions = self._judge(report)
        if not any(decision.kind == "anchor" for decision in decisions):
            before = self._anchor.value
            decisions += self._tune()
            if not 1 / OTHER_LENGTH <= self._anchor.value / before <= OTHER_LENGTH:
                self._guard.relearn()
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
            "costs": [asdict(cost) for cost in self._costs],
            "settled": settled and {"tuned_anchor": settled.tuned_anchor, "batches": list(settled.batches)},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what was learned; options given for this run take precedence."""
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
        # Older checkpoints lack this entry: costs are measured again.
        self._costs = [AverageCost(**cost) for cost in state.get("costs", [])]
        settled = state["settled"]
        last = settled and _CurrentPlan(tuned_anchor=settled["tuned_anchor"], batches=tuple(settled["batches"]))
        self._settled = self._settle(last)
        self._shares = self._speed_shares()

    # Speeds.

    def _planned_paces(self) -> tuple[float, ...] | None:
        """Paces for plans, up to a common factor: given, measured or hinted; None if a probe is needed."""
        if self._config.shares is not None:
            return self._paces_at(self._config.shares)
        measured = [pace.ms for pace in self._paces if pace.ms is not None]
        if len(measured) == self._config.world_size:
            return tuple(measured)
        if self._config.speed_hints is not None:
            return self._paces_at(self._config.speed_hints)
        return None

    def _paces_at(self, speeds: Sequence[float]) -> tuple[float, ...]:
        """Paces of ranks with these speeds in samples, up to a common factor; a larger batch takes longer."""
        unit = self._config.batch_size
        return tuple(size / unit / speed for size, speed in zip(self._config.sizes, speeds, strict=True))

    def _guessed_paces(self) -> tuple[float, ...]:
        """The planned paces; a rank not measured yet is assumed to be average."""
        planned = self._planned_paces()
        if planned is not None:
            return planned
        known = [pace.ms for pace in self._paces if pace.ms is not None]
        if not known and self._rough_paces is not None:
            return self._rough_paces
        typical = fmean(known) if known else 1.0
        return tuple(typical if pace.ms is None else pace.ms for pace in self._paces)

    def _speed_shares(self) -> tuple[float, ...]:
        unit = self._config.batch_size
        speeds = [size / unit / pace for size, pace in zip(self._config.sizes, self._guessed_paces(), strict=True)]
        total = math.fsum(speeds)
        return tuple(speed / total for speed in speeds)

    # Plans.

    def _full_window(self, run_left: int | None) -> WindowPlan:
        if self._settled is None:
            return self._probe()
        paces = self._guessed_paces()
        slowest = max(range(len(paces)), key=paces.__getitem__)
        batches = self._near_end(self._settled.batches, paces, slowest=slowest, run_left=run_left)
        source = "shares" if self._config.shares else "paces" if self._is_measured() else "speed_hints"
        reason = f"rank {slowest} sets the pace by {source}, rounding wastes {waste(batches, paces):.1%}"
        if batches != self._settled.batches:
            reason += f"; shorter, since {run_left} samples of the run are left"
        return self._plan(batches, batches[slowest], reason)

    def _probe(self) -> WindowPlan:
        """The first window, when at most a short measurement of the devices is known."""
        if self._rough_paces is None:
            batches = (PROBE_BATCHES,) * self._config.world_size
            reason = f"probe of {PROBE_BATCHES} batches each: no pace known yet"
        else:
            batches = batches_at(PROBE_BATCHES, self._rough_paces, max_batch_diff=self._config.max_batch_diff)
            reason = "probe, in proportion to a short measurement of the devices"
        return self._plan(batches, self._anchor.value, reason)

    def _near_end(
        self, batches: tuple[int, ...], paces: tuple[float, ...], *, slowest: int, run_left: int | None
    ) -> tuple[int, ...]:
        """The batches of a window, fewer near the end of the run."""
        config = self._config
        minimum, maximum = _anchor_range(config)
        if run_left is None or minimum == maximum or config.world_size == 1:
            return batches
        windows_left = run_left / sum(count * size for count, size in zip(batches, config.sizes, strict=True))
        wanted = math.floor(batches[slowest] * windows_left * END_PART)
        if wanted >= batches[slowest]:
            return batches
        anchor = min(batches[slowest], max(wanted, minimum, self._affordable_anchor()))
        return batches_at(anchor, paces, max_batch_diff=config.max_batch_diff)

    def _affordable_anchor(self) -> int:
        """The shortest window at the end of a run, as far as costs are known."""
        batch_ms = self._batch_ms()
        if not self._costs or not batch_ms:
            return 1
        cost, part = self._typical_cost(), min(0.5, END_COST * self._config.overhead_target)
        # An average still in the background when its window ends is exposed.
        return smallest_within(part, cost_ms=max(cost.exposed_ms, cost.background_ms), batch_ms=batch_ms)

    def _plan(self, batches: tuple[int, ...], anchor: int, reason: str) -> WindowPlan:
        samples = tuple(count * size for count, size in zip(batches, self._config.sizes, strict=True))
        return WindowPlan(batches=batches, samples=samples, anchor=anchor, reason=reason)

    def _last_window(self, remaining: int, anchor: int) -> WindowPlan:
        samples = self._dealt(remaining)
        batches = tuple(num_batches(count, size) for count, size in zip(samples, self._config.sizes, strict=True))
        reason = f"last window: {remaining} samples left, each batch to the rank that finishes it first"
        return WindowPlan(batches=batches, samples=samples, anchor=anchor, reason=reason)

    def _dealt(self, samples: int) -> tuple[int, ...]:
        """Samples per rank if each batch goes to the rank that finishes it first."""
        config = self._config
        paces, bound = self._guessed_paces(), config.max_batch_diff
        if config.batch_sizes is None:
            return deal(samples, config.batch_size, paces, max_batch_diff=bound)
        return deal_by_size(samples, config.batch_sizes, paces, max_batch_diff=bound)

    def _settle(self, last: _CurrentPlan | None) -> _CurrentPlan | None:
        paces = self._planned_paces()
        if paces is None:
            return None
        tuned, bound = self._anchor.value, self._config.max_batch_diff
        minimum, maximum = _anchor_range(self._config)
        anchor = least_waste(tuned, paces, minimum=minimum, maximum=maximum, max_batch_diff=bound)
        fresh = batches_at(anchor, paces, max_batch_diff=bound)
        if last is not None and last.tuned_anchor == tuned and self._is_good_enough(last.batches, fresh, paces):
            return last
        return _CurrentPlan(tuned_anchor=tuned, batches=fresh)

    def _is_good_enough(self, last: tuple[int, ...], fresh: tuple[int, ...], paces: tuple[float, ...]) -> bool:
        """The dead zone: plans that follow the jitter of the paces would gain nothing."""
        if waste(last, paces) - waste(fresh, paces) > DEAD_ZONE_WASTE:
            return False
        # Compared at the same anchor, since only the ratios matter here.
        same = batches_at(min(last), paces, max_batch_diff=self._config.max_batch_diff)
        return all(abs(count - kept) <= max(1.0, DEAD_ZONE_PART * kept) for count, kept in zip(same, last, strict=True))

    # Learning.

    def _is_measured(self) -> bool:
        return all(pace.ms is not None for pace in self._paces)

    def _observe_paces(self, report: AverageReport) -> None:
        for rank, facts in enumerate(report.ranks):
            if facts.samples == 0:
                continue
            # A rank's first batches carry its warm-up (kernels, allocator, caches), often ten times a batch.
            if self._has_warmed_up[rank]:
                self._paces[rank].observe(
                    compute_ms=facts.compute_ms, samples=facts.samples, batch_size=self._config.sizes[rank]
                )
            self._has_warmed_up[rank] = True

    def _observe_costs(self, report: AverageReport) -> None:
        # A report tells the cost of the previous average: the first has none, the second includes connecting.
        if self._num_reports >= 2:
            self._costs = [*self._costs, self._cost(report.ranks)][-COSTS_KEPT:]

    def _cost(self, ranks: Sequence[RankFacts]) -> AverageCost:
        lost_ms = fmean([facts.exposed_ms + facts.busy_ms for facts in ranks])
        if self._config.is_blocking:
            # The last rank to arrive waits for nobody: in a blocking average, its cost is that of the average alone.
            return AverageCost(exposed_ms=min(facts.exposed_ms for facts in ranks), lost_ms=lost_ms)
        waited_ms = fmean([facts.waited_ms for facts in ranks])
        # Here too, the last to arrive saw how long the average itself took.
        background_ms = min(facts.average_ms for facts in ranks)
        return AverageCost(exposed_ms=max(0.0, lost_ms - waited_ms), lost_ms=lost_ms, background_ms=background_ms)

    def _typical_cost(self) -> AverageCost:
        names = [field.name for field in fields(AverageCost)]
        return AverageCost(**{name: _typical([getattr(cost, name) for cost in self._costs]) for name in names})

    def _judge(self, report: AverageReport) -> list[Decision]:
        if not self._config.guard:
            return []
        verdict = self._guard.judge(report.drift, anchor=_least_batches(report.ranks))
        shrunk = None
        if self._guard.wants_shrink and verdict is not None:
            shrunk = self._anchor.shrink(GUARD_SHRINK, f"guard: {verdict.reason}")
        return [decision for decision in (verdict, shrunk) if decision is not None]

    def _tune(self) -> list[Decision]:
        batch_ms = self._batch_ms()
        if len(self._costs) < COSTS_NEEDED or batch_ms is None:
            return []
        may_grow = not self._guard.blocks_growth
        decision = self._anchor.after(self._typical_cost(), batch_ms=batch_ms, may_grow=may_grow)
        return [] if decision is None else [decision]

    def _batch_ms(self) -> float | None:
        """The time of a window per batch of the anchor; None until every rank's pace is known.

        The cost of an average does not depend on the length of its window. So it is compared with the time of a window
        at the present anchor, and probes, last windows and plans in progress cannot mislead.
        """
        planned = self._planned_paces()
        if not self._is_measured() or planned is None:
            return None
        batches = batches_at(self._anchor.value, planned, max_batch_diff=self._config.max_batch_diff)
        window_ms = max(count * (pace.ms or 0.0) for count, pace in zip(batches, self._paces, strict=True))
        return window_ms / self._anchor.value


def _typical(costs: Sequence[float]) -> float:
    """Robust to one outlier: the low median of up to three costs, else the mean without the lowest and the highest.

    A mean of more costs, because their sum matters, not the cost of half of them.
    """
    return median_low(costs) if len(costs) <= 3 else fmean(sorted(costs)[1:-1])


def _least_batches(ranks: Sequence[RankFacts]) -> int:
    """The fewest batches of any rank that did any."""
    return min((facts.batches for facts in ranks if facts.batches > 0), default=1)


def _anchor_range(config: PlannerConfig) -> tuple[int, int]:
    if config.anchor is not None:
        return config.anchor, config.anchor
    if config.world_size == 1:
        return max(config.min_anchor, min(ALONE_ANCHOR, config.max_anchor)), config.max_anchor
    return config.min_anchor, config.max_anchor


def _new_anchor(config: PlannerConfig, start: int | None = None) -> Anchor:
    minimum, maximum = _anchor_range(config)
    first = config.start_anchor if start is None else start
    return Anchor(first, minimum=minimum, maximum=maximum, overhead_target=config.overhead_target)
