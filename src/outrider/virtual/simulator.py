"""The simulator: runs the real policies with clocks only, for thousands of ranks and any network.

Answers what-if questions about throughput, efficiency and waits within seconds. It trains nothing, so it cannot predict
accuracy. Called by users, by `outrider simulate`, by the forecast of `outrider diagnose` and by tests.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.errors import ConfigError
from outrider.policy.batch_splitter import Split, Splitter
from outrider.policy.effects import AverageReport, Decision, Lease, Policy, Seat
from outrider.policy.ledger import Ledger
from outrider.policy.policies import PolicySpec, open_policy, policy_spec
from outrider.policy.policy_chooser import PolicyChooser
from outrider.policy.weights import relative_speeds
from outrider.policy.window_planner import PlannerConfig, WindowPlan, WindowPlanner
from outrider.virtual.coverage import Coverage
from outrider.virtual.virtual_clock import Costs, RankClock, VirtualClock


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSpeed:
    """The speed of a simulated rank: a step of n samples takes about `fixed_ms + n * per_sample_ms`."""

    per_sample_ms: float
    fixed_ms: float = 0.0
    jitter: float = 0.0
    """Standard deviation of the logarithm of a step's duration: 0.1 is about ±10 %."""

    def step_ms(self, samples: int) -> float:
        """The duration of a step without jitter."""
        return self.fixed_ms + samples * self.per_sample_ms


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """A network; an all-reduce costs the cheaper of a ring and recursive halving, from latency and bandwidth."""

    latency_ms: float = 0.05
    bandwidth_bytes_per_s: float = 1.25e9

    def __post_init__(self) -> None:
        if not 0 <= self.latency_ms < math.inf or not self.bandwidth_bytes_per_s > 0:
            raise ConfigError(
                "latency_ms must be finite and >= 0, bandwidth_bytes_per_s > 0, "
                f"got {self.latency_ms:g} and {self.bandwidth_bytes_per_s:g}",
                hint="latency_ms=0.05 and bandwidth_bytes_per_s=1.25e9 are a network of 10 Gbit/s",
            )

    def all_reduce_ms(self, num_bytes: int, ranks: int) -> float:
        if ranks == 1:
            return 0.0
        transfer_ms = 2 * (ranks - 1) / ranks * num_bytes / self.bandwidth_bytes_per_s * 1e3
        rounds = min(2 * (ranks - 1), 2 * math.ceil(math.log2(ranks)))
        return transfer_ms + rounds * self.latency_ms


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredCosts:
    """Durations of steps and averages in a real run, used instead of estimates from speeds and a network.

    Devices in one machine slow each other down, and averages take part of their time, so the step times of a device
    differ between local steps, shared steps and running alone.
    """

    local: tuple[DeviceSpeed, ...]
    shared: tuple[DeviceSpeed, ...]
    average_ms: float
    """Duration of an average of parameters after the last rank has joined."""
    gradient_ms: float
    """Duration of the average of gradients in a shared step."""
    snapshot_ms: float = 0.0
    """Compute time that a background average takes from a rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """A what-if question: these ranks, this network, this model and data."""

    speeds: tuple[DeviceSpeed, ...]
    network: Network
    num_samples: int
    batch_size: int
    model_bytes: int = 1_000_000
    seed: int = 0
    planner: PlannerConfig | None = None
    max_overshoot: int = 4
    measured: MeasuredCosts | None = None
    """If given, `speeds` are those of each device alone, and `network` and `model_bytes` are not used."""
    global_batch_size: int | None = None
    """Batch size of policies that split a batch among all ranks; `batch_size` times the number of ranks if None."""
    may_rest: bool = True
    """Whether slow ranks may leave whole batches to a fast one, as in `train()`."""
    only_alone: int | None = None
    """The one rank that may take whole batches alone; None if any may."""
    gains_alone: tuple[float, ...] = ()
    """How many times as fast each rank works while the others rest, if they leave it their cores."""
    samples_after: int = 0
    """Samples of the run after the simulated part, for policies that plan ahead."""

    def __post_init__(self) -> None:
        if not self.speeds:
            raise ConfigError(
                "a scenario needs at least one rank, got none", hint="pass speeds=(DeviceSpeed(per_sample_ms=1.0), ...)"
            )
        if self.num_samples < 1 or self.batch_size < 1:
            raise ConfigError(
                f"num_samples and batch_size must be >= 1, got {self.num_samples} and {self.batch_size}",
                hint="simulate at least one batch",
            )
        if not 0 <= self.model_bytes < math.inf:
            raise ConfigError(
                f"model_bytes must be finite and >= 0, got {self.model_bytes:g}",
                hint="model_bytes=100_000_000 is a model of 25 million parameters in float32",
            )

    @classmethod
    def from_speeds(
        cls,
        speeds: Sequence[float],
        *,
        step_ms: float = 100.0,
        batch_size: int = 32,
        batches: int = 400,
        model_bytes: int = 100_000_000,
        network: Network | None = None,
        fixed_part: float = 0.0,
        jitter: float = 0.0,
        seed: int = 0,
    ) -> Scenario:
        """Create a scenario from relative speeds: a batch takes `step_ms` at speed 1, twice as long at speed 0.5.

        `fixed_part` is the fraction of that time that does not depend on the samples of a batch. The epoch has
        `batches` per device, and windows are planned as in a training run with default options.
        """
        _check_question(speeds, step_ms=step_ms, fixed_part=fixed_part, jitter=jitter)
        _check_batches(batch_size=batch_size, batches=batches)
        devices = tuple(
            DeviceSpeed(
                per_sample_ms=(1 - fixed_part) * step_ms / batch_size / speed,
                fixed_ms=fixed_part * step_ms / speed,
                jitter=jitter,
            )
            for speed in speeds
        )
        return cls(
            speeds=devices,
            network=network if network is not None else Network(),
            num_samples=batches * batch_size * len(devices),
            batch_size=batch_size,
            model_bytes=model_bytes,
            seed=seed,
            planner=PlannerConfig(world_size=len(devices), batch_size=batch_size, is_blocking=True),
        )


def _check_question(speeds: Sequence[float], *, step_ms: float, fixed_part: float, jitter: float) -> None:
    if not all(0 < speed < math.inf for speed in speeds):
        raise ConfigError(f"speeds must be > 0, got {', '.join(map(str, speeds))}", hint="pass (1.0, 0.4)")
    if not 0 < step_ms < math.inf or not 0 <= fixed_part < 1 or not 0 <= jitter < math.inf:
        raise ConfigError(
            "step_ms must be finite and > 0, fixed_part in [0, 1), jitter finite and >= 0, "
            f"got {step_ms:g}, {fixed_part:g} and {jitter:g}",
            hint="step_ms=100, fixed_part=0.1 and jitter=0.1 are a step of 100 ms give or take 10 %",
        )


def _check_batches(*, batch_size: int, batches: int) -> None:
    if batch_size < 1 or batches < 1:
        raise ConfigError(
            f"batch_size and batches must be >= 1, got {batch_size} and {batches}",
            hint="batch_size=32 and batches=400 are 12,800 samples per device",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result for one policy."""

    policy: str
    samples_per_s: float
    ideal_samples_per_s: float
    """The sum of all ranks' throughputs alone, without waits or averages."""
    fastest_samples_per_s: float
    """The throughput of the fastest rank alone."""
    wall_s: float
    wait_fraction: float
    """Fraction of all ranks' time spent waiting for other ranks."""
    exposed_average_fraction: float
    """Fraction of all ranks' time in which averages and leases blocked computing."""
    averages: int
    samples_by_rank: tuple[int, ...]
    wait_by_rank: tuple[float, ...]
    """For each rank, the fraction of its time spent waiting for other ranks, including the time after its last step."""
    finish_spread_ms: float
    """Time between the last steps of the first rank and of the last rank to finish."""

    @property
    def efficiency(self) -> float:
        return self.samples_per_s / self.ideal_samples_per_s

    @property
    def gain(self) -> float:
        """Throughput divided by that of the fastest rank alone."""
        return self.samples_per_s / self.fastest_samples_per_s


def simulate(policy: str | PolicySpec, scenario: Scenario) -> Outcome:
    """Simulate one epoch of the scenario under a policy."""
    spec = policy_spec(policy)
    world = _SimulatedWorld(spec, scenario)
    world.run()
    _check_samples(spec, scenario, world)
    return _outcome(spec, scenario, world)


def _check_samples(policy: PolicySpec, scenario: Scenario, world: _SimulatedWorld) -> None:
    """Check that a user's policy uses every sample exactly once."""
    samples = sum(clock.samples for clock in world.clocks)
    wrong = world.fault
    if samples != scenario.num_samples:
        wrong = f"it stepped on {samples} samples of an epoch of {scenario.num_samples}"
    if wrong is not None:
        raise ConfigError(
            f"policy {policy.name!r} does not use each sample once: {wrong}",
            hint="together the ranks step on each position of segment.span once",
        )


class _SimulatedWorld:
    """Runs the ranks of a scenario, segment by segment."""

    def __init__(self, policy: PolicySpec, scenario: Scenario) -> None:
        self._policy, self._scenario = policy, scenario
        self._size = len(scenario.speeds)
        self._planner = _SharedPlanner(_planner_config(policy, scenario))
        self._splitter = _OneForAllSplitter(
            world_size=self._size, may_rest=scenario.may_rest, only_alone=scenario.only_alone
        )
        self._chooser = _OneForAllChooser(world_size=self._size)
        speeds = relative_speeds([1 / one.step_ms(scenario.batch_size) for one in scenario.speeds])
        self._planner.hint(speeds)
        self._splitter.hint(speeds)
        self._splitter.expect_gains(scenario.gains_alone)
        self._costs = _costs(policy, scenario)
        self.clocks = [RankClock() for _ in scenario.speeds]
        self.windows = 0
        self.fault: str | None = None
        """The first position of a segment without exactly one step, in words, if any."""

    def run(self) -> None:
        """Run one epoch; samples that a policy leaves form the next segment, in any order since there is no data."""
        left = self._scenario.num_samples
        while left:
            left = self._run_segment(Lease(self._scenario.num_samples - left, left))

    def _run_segment(self, span: Lease) -> int:
        scenario = self._scenario
        batch_size = _batch_size(self._policy, scenario)
        policies: list[Policy] = [
            open_policy(
                self._policy,
                Seat(rank, self._size, batch_size),
                span,
                planner=self._planner,
                splitter=self._splitter,
                max_overshoot=scenario.max_overshoot,
                chooser=self._chooser,
                samples_after=scenario.samples_after,
            )
            for rank in range(self._size)
        ]
        coverage = Coverage()
        engine = VirtualClock(
            policies,
            work=coverage,
            costs=self._costs,
            ledger=Ledger(span.start, span.stop),
            batch_size=batch_size,
            clocks=self.clocks,
            windows_before=self.windows,
        )
        engine.run()
        self.windows = engine.windows
        for lease in engine.left:
            coverage.add(lease.start, lease.stop)
        self.fault = self.fault or coverage.fault(span)
        return sum(lease.count for lease in engine.left)


def _planner_config(policy: PolicySpec, scenario: Scenario) -> PlannerConfig:
    base = scenario.planner or PlannerConfig(
        world_size=len(scenario.speeds), batch_size=scenario.batch_size, is_blocking=True
    )
    return replace(base, batch_size=_batch_size(policy, scenario), is_blocking=policy.blocks_at_averages)


def _batch_size(policy: PolicySpec, scenario: Scenario) -> int:
    if policy.batch_is_global and scenario.global_batch_size is not None:
        return scenario.global_batch_size
    return policy.batch_size_for(scenario.batch_size, len(scenario.speeds))


def _costs(policy: PolicySpec, scenario: Scenario) -> Costs:
    size, measured = len(scenario.speeds), scenario.measured
    alone_ms = _step_times(scenario.speeds, seed=scenario.seed)
    if measured is not None:
        return Costs(
            step_ms=_step_times(measured.local, seed=scenario.seed),
            shared_step_ms=_step_times(measured.shared, seed=scenario.seed),
            # With other policies, a rank whose peers wait is finishing its window; `local` already includes such steps.
            alone_step_ms=alone_ms if policy.batch_is_global else None,
            average_ms=measured.average_ms,
            gradient_ms=measured.gradient_ms,
            snapshot_ms=measured.snapshot_ms,
        )
    average_ms = scenario.network.all_reduce_ms(scenario.model_bytes, size)
    take_ms = 2 * scenario.network.latency_ms if size > 1 else 0.0
    return Costs(step_ms=alone_ms, average_ms=average_ms, gradient_ms=average_ms, take_ms=take_ms)


def _step_times(speeds: Sequence[DeviceSpeed], *, seed: int) -> Callable[[int, int], float]:
    generators = [random.Random(f"{seed}/{rank}") for rank in range(len(speeds))]

    def step_ms(rank: int, samples: int) -> float:
        speed = speeds[rank]
        mean_ms = speed.step_ms(samples)
        return mean_ms * math.exp(generators[rank].gauss(0.0, speed.jitter)) if speed.jitter else mean_ms

    return step_ms


def _outcome(policy: PolicySpec, scenario: Scenario, world: _SimulatedWorld) -> Outcome:
    clocks: Sequence[RankClock] = world.clocks
    wall_ms = max(clock.now_ms for clock in clocks)
    total_ms = wall_ms * len(clocks)
    alone = [scenario.batch_size / speed.step_ms(scenario.batch_size) * 1e3 for speed in scenario.speeds]
    idle_at_end_ms = sum(wall_ms - clock.now_ms for clock in clocks)
    return Outcome(
        policy=policy.name,
        samples_per_s=scenario.num_samples / wall_ms * 1e3,
        ideal_samples_per_s=sum(alone),
        fastest_samples_per_s=max(alone),
        wall_s=wall_ms / 1e3,
        wait_fraction=(sum(clock.wait_ms for clock in clocks) + idle_at_end_ms) / total_ms,
        exposed_average_fraction=sum(clock.exposed_ms for clock in clocks) / total_ms,
        averages=world.windows,
        samples_by_rank=tuple(clock.samples for clock in clocks),
        wait_by_rank=tuple((clock.wait_ms + wall_ms - clock.now_ms) / wall_ms for clock in clocks),
        finish_spread_ms=max(c.last_step_ms for c in clocks) - min(c.last_step_ms for c in clocks if c.steps),
    )


class _SharedPlanner(WindowPlanner):
    """One planner for all ranks, because each would compute the same plan from the same facts; keeps the last plan."""

    def __init__(self, config: PlannerConfig) -> None:
        super().__init__(config)
        self._learned = -1
        self._plans: dict[tuple[Any, ...], WindowPlan] = {}

    def window(
        self, remaining: int, *, run_left: int | None = None, done: int = 0, may_stay_open: bool = False
    ) -> WindowPlan:
        key = (self._learned, remaining, run_left, done, may_stay_open)
        if key not in self._plans:
            self._plans = {key: super().window(remaining, run_left=run_left, done=done, may_stay_open=may_stay_open)}
        return self._plans[key]

    def learn(self, report: AverageReport) -> list[Decision]:
        if report.window <= self._learned:
            return []
        self._learned = report.window
        return super().learn(report)


class _OneForAllSplitter(Splitter):
    _learned = -1
    _shared: tuple[int, int, Split] | None = None

    def next(self, total: int, *, is_usual: bool = True) -> Split:
        if self._shared is None or self._shared[:2] != (self._learned, total):
            self._shared = (self._learned, total, super().next(total, is_usual=is_usual))
        return self._shared[2]

    def learn(self, report: AverageReport, *, left: int | None = None) -> list[Decision]:
        return super().learn(report, left=left) if self._is_news(report) else []

    def learn_alone(self, report: AverageReport, *, left: int | None = None) -> list[Decision]:
        return super().learn_alone(report, left=left) if self._is_news(report) else []

    def _is_news(self, report: AverageReport) -> bool:
        before, self._learned = self._learned, max(self._learned, report.window)
        return report.window > before


class _OneForAllChooser(PolicyChooser):
    _learned = -1

    def learn_exact(self, report: AverageReport, splitter: Splitter, left: int | None) -> list[Decision]:
        return super().learn_exact(report, splitter, left) if self._is_news(report) else []

    def learn_local(self, report: AverageReport, planner: WindowPlanner) -> list[Decision]:
        return super().learn_local(report, planner) if self._is_news(report) else []

    def _is_news(self, report: AverageReport) -> bool:
        before, self._learned = self._learned, max(self._learned, report.window)
        return report.window > before
