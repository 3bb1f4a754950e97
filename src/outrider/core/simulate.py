"""The simulator: the real policies on clocks alone, for thousands of ranks and any network.

Answers what-if questions (throughput, efficiency, waits) in seconds; it learns nothing, so it cannot say how well a
model would train. Called by users, by property tests and by `outrider diagnose`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from outrider.core.clockwork import Clockwork, Costs, RankClock
from outrider.core.effects import Decision, Lease, Policy, Report, Seat
from outrider.core.ledger import Ledger
from outrider.core.planner import Plan, Planner, PlannerConfig
from outrider.core.policies import POLICIES, open_policy
from outrider.core.split import Split, Splitter
from outrider.errors import ConfigError, nearest


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """How fast a simulated rank computes: a step of n samples takes `fixed_ms + n * per_sample_ms`, give or take."""

    per_sample_ms: float
    fixed_ms: float = 0.0
    jitter: float = 0.0
    """Standard deviation of the logarithm of a step's time: 0.1 is about ±10 %."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """What an all-reduce costs: the cheaper of a ring and recursive halving, for `latency_ms` and bytes per second."""

    latency_ms: float = 0.05
    bandwidth_bytes_per_s: float = 1.25e9

    def all_reduce_ms(self, num_bytes: int, ranks: int) -> float:
        if ranks == 1:
            return 0.0
        transfer_ms = 2 * (ranks - 1) / ranks * num_bytes / self.bandwidth_bytes_per_s * 1e3
        rounds = min(2 * (ranks - 1), 2 * math.ceil(math.log2(ranks)))
        return transfer_ms + rounds * self.latency_ms


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """A what-if question: these ranks, this network, this model and data."""

    speeds: tuple[Speed, ...]
    network: Network
    num_samples: int
    batch_size: int
    model_bytes: int = 1_000_000
    seed: int = 0
    planner: PlannerConfig | None = None
    max_overshoot: int = 4

    def __post_init__(self) -> None:
        if not self.speeds:
            raise ConfigError("a scenario needs at least one rank, got none", hint="pass speeds=(Speed(...), ...)")
        if self.num_samples < 1 or self.batch_size < 1:
            raise ConfigError(
                f"num_samples and batch_size must be >= 1, got {self.num_samples} and {self.batch_size}",
                hint="simulate at least one batch",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The answer for one policy."""

    policy: str
    samples_per_s: float
    ideal_samples_per_s: float
    """The sum of all ranks alone, without waits or averages."""
    wall_s: float
    wait_fraction: float
    """Of all ranks' time, waiting for other ranks."""
    exposed_average_fraction: float
    """Of all ranks' time, averages and leases that computing had to wait for."""
    averages: int
    samples_by_rank: tuple[int, ...]
    finish_spread_ms: float
    """Between the first and the last rank to take its last step."""

    @property
    def efficiency(self) -> float:
        return self.samples_per_s / self.ideal_samples_per_s


def simulate(policy: str, scenario: Scenario) -> Outcome:
    """One epoch of the scenario under a policy."""
    if policy not in POLICIES:
        raise ConfigError(
            f"unknown policy {policy!r}", hint=f"did you mean {nearest(policy, POLICIES) or 'cadence'!r}?"
        )
    engine = _engine(policy, scenario)
    engine.run()
    return _outcome(policy, scenario, engine)


def _engine(policy: str, scenario: Scenario) -> Clockwork:
    size = len(scenario.speeds)
    batch_size = scenario.batch_size if policy != "balanced" else scenario.batch_size * size
    span = Lease(0, scenario.num_samples)
    planner = _OneForAllPlanner(_planner_config(policy, scenario))
    splitter = _OneForAllSplitter(world_size=size, may_rest=True)
    policies: list[Policy] = [
        open_policy(
            policy,
            Seat(rank, size, batch_size),
            span,
            planner=planner,
            splitter=splitter,
            max_overshoot=scenario.max_overshoot,
        )
        for rank in range(size)
    ]
    average_ms = scenario.network.all_reduce_ms(scenario.model_bytes, size)
    costs = Costs(
        step_ms=_step_times(scenario),
        average_ms=average_ms,
        gradient_ms=average_ms,
        take_ms=2 * scenario.network.latency_ms if size > 1 else 0.0,
    )
    return Clockwork(policies, costs=costs, ledger=Ledger(span.start, span.stop), batch_size=scenario.batch_size)


def _planner_config(policy: str, scenario: Scenario) -> PlannerConfig:
    base = scenario.planner or PlannerConfig(
        world_size=len(scenario.speeds), batch_size=scenario.batch_size, is_blocking=True
    )
    return replace(base, is_blocking=policy == "cadence")


def _step_times(scenario: Scenario) -> Callable[[int, int], float]:
    generators = [random.Random(f"{scenario.seed}/{rank}") for rank in range(len(scenario.speeds))]

    def step_ms(rank: int, samples: int) -> float:
        speed = scenario.speeds[rank]
        mean_ms = speed.fixed_ms + samples * speed.per_sample_ms
        return mean_ms * math.exp(generators[rank].gauss(0.0, speed.jitter)) if speed.jitter else mean_ms

    return step_ms


def _outcome(policy: str, scenario: Scenario, engine: Clockwork) -> Outcome:
    clocks: Sequence[RankClock] = engine.clocks
    wall_ms = max(clock.now_ms for clock in clocks)
    total_ms = wall_ms * len(clocks)
    ideal = sum(
        scenario.batch_size / (speed.fixed_ms + scenario.batch_size * speed.per_sample_ms) * 1e3
        for speed in scenario.speeds
    )
    idle_at_end_ms = sum(wall_ms - clock.now_ms for clock in clocks)
    return Outcome(
        policy=policy,
        samples_per_s=scenario.num_samples / wall_ms * 1e3,
        ideal_samples_per_s=ideal,
        wall_s=wall_ms / 1e3,
        wait_fraction=(sum(clock.wait_ms for clock in clocks) + idle_at_end_ms) / total_ms,
        exposed_average_fraction=sum(clock.exposed_ms for clock in clocks) / total_ms,
        averages=engine.windows,
        samples_by_rank=tuple(clock.samples for clock in clocks),
        finish_spread_ms=max(c.last_step_ms for c in clocks) - min(c.last_step_ms for c in clocks if c.steps),
    )


# All ranks compute the same plan from the same facts, so one planner may stand for a thousand.


class _OneForAllPlanner(Planner):
    def __init__(self, config: PlannerConfig) -> None:
        super().__init__(config)
        self._learned = -1
        self._plans: dict[tuple[int, int], Plan] = {}

    def window(self, remaining: int) -> Plan:
        key = (self._learned, remaining)
        if key not in self._plans:
            self._plans = {key: super().window(remaining)}
        return self._plans[key]

    def learn(self, report: Report) -> list[Decision]:
        if report.window <= self._learned:
            return []
        self._learned = report.window
        return super().learn(report)


class _OneForAllSplitter(Splitter):
    _learned = -1
    _shared: tuple[int, int, Split] | None = None

    def next(self, total: int) -> Split:
        if self._shared is None or self._shared[:2] != (self._learned, total):
            self._shared = (self._learned, total, super().next(total))
        return self._shared[2]

    def learn(self, report: Report) -> list[Decision]:
        return super().learn(report) if self._is_news(report) else []

    def learn_alone(self, report: Report) -> list[Decision]:
        return super().learn_alone(report) if self._is_news(report) else []

    def _is_news(self, report: Report) -> bool:
        before, self._learned = self._learned, max(self._learned, report.window)
        return report.window > before
