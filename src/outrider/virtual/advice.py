"""Forecasts every policy on every choice of devices from short real runs, and advises which to use.

Decides what is simulated, which devices are worth using, and what is advised. Runs no model: `api.advising` measures,
and `advice_text` shows the result. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import combinations
from statistics import fmean, harmonic_mean
from typing import Any

from outrider.policy.policies import FIXED_POLICIES, TRAINING_POLICIES, policy_spec
from outrider.policy.window_planner import PlannerConfig
from outrider.virtual.advice_text import as_text
from outrider.virtual.simulator import DeviceSpeed, MeasuredCosts, Network, Outcome, Scenario, simulate
from outrider.virtual.trial_reports import (
    ALONE,
    MeetingCost,
    TrialReport,
    TrialReports,
    background_cost,
    device_speed,
    epoch_end_ms,
    meeting_cost,
    samples_per_s,
    steps_of,
    stretch_overhead_ms,
    stretch_speed,
    vary_apart,
)

SCHEMA_VERSION = 1
SOLO = "solo"
SOLO_POLICY = "sync"
"""The policy for runs on one device: all policies take the same steps there, and this one reports twice a second."""
TRIAL_POLICIES = FIXED_POLICIES
"""The policies that are measured on all devices together; `auto` switches between two of them."""
WORTHWHILE_GAIN = 1.03
"""A smaller gain is not worth another device, or a policy that does not learn exactly like one device."""
PREFERRED = ("auto", "balanced", "sync", "cadence", "async")
"""Preference among equally fast policies: first those with the learning curve of one device."""
MOST_FOR_ALL_SUBSETS = 4
SIMULATED_STEPS = 3_000
"""Simulated steps per device; a longer run is assumed to continue at the same rate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingWork:
    """The amount of work of a script, as read from its record."""

    num_samples: int
    """Samples per epoch."""
    batch_size: int
    total_samples: int
    """Samples of the whole run."""
    may_rest: bool
    """Whether slow devices may leave whole batches to any fast one; true for `train()`, false for a user's own loop."""
    options: Mapping[str, Any]
    shares_always: bool = False
    """Whether a framework runs the loop, so that no rank trains alone."""

    def planner(self, world_size: int) -> PlannerConfig:
        """The user's options for windows, except options with one value per device."""
        names = {field.name for field in fields(PlannerConfig)} - {"world_size", "batch_size", "is_blocking"}
        skipped = ("shares", "speed_hints", "batch_sizes")
        given = {name: self.options[name] for name in names if name in self.options and name not in skipped}
        return PlannerConfig(world_size=world_size, batch_size=self.batch_size, is_blocking=True, **given)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """The forecast of one policy on some of the devices."""

    devices: tuple[str, ...]
    policy: str
    """The name of the policy; `solo` for one device."""
    samples_per_s: float
    epoch_s: float
    wait_by_rank: tuple[float, ...]
    averaging: float
    """Fraction of all devices' time spent on averages."""
    share_by_rank: tuple[float, ...]
    memory_bytes: tuple[int | None, ...]
    """The peak memory of each rank; measured in the short run, not forecast."""
    ranks: tuple[int, ...]
    """Indices of these devices among all given devices, because two devices may have the same name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """All forecasts, and the best of them."""

    devices: tuple[str, ...]
    workload: TrainingWork
    model_bytes: int
    parameters: int
    cells: tuple[Cell, ...]
    best: Cell
    left_out: tuple[str, ...]
    """Devices that add too little, slowest first."""
    gain: float
    """Speedup of `best` over the fastest device alone."""
    options: Mapping[str, Any]
    """The options to set."""
    spread: float | None = None
    """Largest difference between the two measurements of a device alone, before and after the others: 0.1 is 10 %."""
    fewest: int | None = None
    """Steps or averages of the short run that saw the fewest."""

    def __str__(self) -> str:
        return as_text(as_document(self))

    def cell(self, policy: str, devices: Sequence[str]) -> Cell | None:
        """The forecast of a policy on these devices, in this order; for one device, the policy does not matter."""
        names = tuple(devices)
        return next(
            (c for c in self.cells if c.devices == names and (c.policy == policy or len(names) == 1)),
            None,
        )


def advise(
    solos: Sequence[TrialReports],
    joint: Sequence[TrialReports],
    workload: TrainingWork,
    *,
    again: Sequence[TrialReports] = (),
) -> Advice:
    """Forecast and advise; `solos` has one trial per device, `joint` one per policy on all devices together.

    `again` repeats the solos after the others, so that a change in the machine's speed is not taken for a slow device.
    """
    devices = tuple(solo.devices[0] for solo in solos)
    trials = [(solo,) for solo in solos] if not again else list(zip(solos, again, strict=True))
    alone = [_alone_speed(own) for own in trials]
    costs, ends_ms = ({}, {}) if not joint else (_measured(joint), _epoch_ends(joint))
    cells = [_solo_cell(rank, own, workload) for rank, own in enumerate(trials)]
    rates = [cell.samples_per_s for cell in cells]
    for ranks in _subsets(rates):
        for policy in TRAINING_POLICIES if costs else ():
            scenario = _scenario(policy, ranks, alone, costs[policy], workload)
            if scenario.may_rest and _leaves_cores([devices[rank] for rank in ranks], workload):
                gains = _gains_alone([devices[rank] for rank in ranks], ranks, alone, costs[policy], workload)
                scenario = replace(scenario, gains_alone=gains)
            outcome = simulate(policy, scenario)
            memory = _memory(joint, policy)
            cells.append(_cell(devices, ranks, outcome, workload, memory=memory, end_ms=ends_ms[policy]))
    best = _best(cells)
    fastest = max(rates)
    left_out = tuple(devices[rank] for rank in sorted(range(len(devices)), key=lambda rank: rates[rank]))
    names = [devices[rank] for rank in range(len(devices)) if rank not in best.ranks]
    return Advice(
        devices=devices,
        workload=workload,
        model_bytes=(joint or solos)[-1].model_bytes,
        parameters=solos[0].parameters,
        cells=tuple(cells),
        best=best,
        left_out=tuple(name for name in left_out if name in names),
        gain=best.samples_per_s / fastest,
        options=_options(best),
        spread=max(map(_spread, trials)) if again else None,
        fewest=min(trial.num_told for trial in (*solos, *joint, *again)),
    )


def _spread(trials: Sequence[TrialReports]) -> float:
    rates = [samples_per_s(trial.of_kind(ALONE)) for trial in trials]
    return max(rates) / min(rates) - 1


def _subsets(rates: Sequence[float]) -> list[tuple[int, ...]]:
    """Choices of two or more devices: every subset of a few devices, else the fastest two, three, and so on."""
    num = len(rates)
    if num <= MOST_FOR_ALL_SUBSETS:
        return [ranks for size in range(2, num + 1) for ranks in combinations(range(num), size)]
    by_speed = sorted(range(num), key=lambda rank: -rates[rank])
    return [tuple(sorted(by_speed[:size])) for size in range(2, num + 1)]


def _alone_speed(trials: Sequence[TrialReports]) -> DeviceSpeed:
    return stretch_speed([trial.of_kind(ALONE) for trial in trials])


def _measured(joint: Sequence[TrialReports]) -> dict[str, MeasuredCosts]:
    """The measured costs that the simulator uses for each policy."""
    by_policy = {trial.policy: trial for trial in joint}
    size = len(joint[0].devices)
    shared = [trial.of_kind("shared") for trial in joint if trial.of_kind("shared")]
    # Batch sizes differ between the policies of shared steps, which separates fixed from per-sample cost.
    steps = [[step for reports in shared for step in steps_of(reports, rank)] for rank in range(size)]
    all_shared = [report for reports in shared for report in reports]
    costs = {}
    for policy in TRIAL_POLICIES:
        trial = by_policy[policy]
        if trial.of_kind("shared"):
            costs[policy] = _shared_costs(trial, steps, all_shared)
        elif trial.of_kind("average"):
            costs[policy] = _blocking_costs(trial)
        else:
            costs[policy] = _background_costs(trial)
    balanced, background = costs["balanced"], costs["async"]
    costs["auto"] = MeasuredCosts(
        local=background.local,
        shared=balanced.shared,
        average_ms=background.average_ms,
        gradient_ms=balanced.gradient_ms,
        snapshot_ms=background.snapshot_ms,
    )
    return costs


def _epoch_ends(joint: Sequence[TrialReports]) -> dict[str, float]:
    """Duration of the end of an epoch with each policy, which dominates short epochs; for `auto`, the longer of two."""
    ends_ms = {trial.policy: _epoch_end(trial) for trial in joint}
    return ends_ms | {"auto": max(ends_ms["balanced"], ends_ms["async"])}


def _epoch_end(trial: TrialReports) -> float:
    if background := trial.of_kind("background"):
        return epoch_end_ms(background, background_cost(background))
    # Ranks that share steps may leave whole epochs to one rank, if that is faster.
    stretches = trial.of_kind(ALONE)
    if any(report.is_first for report in stretches):
        return epoch_end_ms(stretches, MeetingCost(average_ms=0.0, overhead_ms=stretch_overhead_ms(stretches)))
    meetings = trial.of_kind("shared") or trial.of_kind("average")
    return epoch_end_ms(meetings, meeting_cost(meetings)) if meetings else 0.0


def _shared_costs(
    trial: TrialReports, steps: Sequence[Sequence[tuple[int, float]]], reports: Sequence[TrialReport]
) -> MeasuredCosts:
    """`steps` are those of each rank in all `reports` of shared steps."""
    cost = meeting_cost(trial.of_kind("shared"))
    overhead_ms = cost.overhead_ms
    speeds = vary_apart([device_speed(own, overhead_ms=overhead_ms) for own in steps], reports, overhead_ms=overhead_ms)
    return MeasuredCosts(local=speeds, shared=speeds, average_ms=cost.average_ms, gradient_ms=cost.average_ms)


def _blocking_costs(trial: TrialReports) -> MeasuredCosts:
    reports = trial.of_kind("average")
    cost = meeting_cost(reports)
    overhead_ms = cost.overhead_ms
    speeds = vary_apart(_window_speeds(trial, "average", overhead_ms=overhead_ms), reports, overhead_ms=overhead_ms)
    return MeasuredCosts(local=speeds, shared=speeds, average_ms=cost.average_ms, gradient_ms=cost.average_ms)


def _background_costs(trial: TrialReports) -> MeasuredCosts:
    cost = background_cost(trial.of_kind("background"))
    speeds = _window_speeds(trial, "background", overhead_ms=cost.overhead_ms)
    return MeasuredCosts(
        local=speeds,
        shared=speeds,
        average_ms=cost.average_ms,
        gradient_ms=cost.average_ms,
        snapshot_ms=cost.snapshot_ms,
    )


def _window_speeds(trial: TrialReports, kind: str, *, overhead_ms: float) -> tuple[DeviceSpeed, ...]:
    reports = trial.of_kind(kind)
    return tuple(device_speed(steps_of(reports, rank), overhead_ms=overhead_ms) for rank in range(len(trial.devices)))


def _scenario(
    policy: str, ranks: Sequence[int], alone: Sequence[DeviceSpeed], costs: MeasuredCosts, workload: TrainingWork
) -> Scenario:
    simulated = min(workload.total_samples, SIMULATED_STEPS * workload.batch_size * len(ranks))
    return Scenario(
        speeds=tuple(alone[rank] for rank in ranks),
        network=Network(),
        num_samples=simulated,
        batch_size=workload.batch_size,
        global_batch_size=workload.batch_size,
        planner=workload.planner(len(ranks)),
        max_overshoot=workload.options.get("max_overshoot", 4),
        measured=MeasuredCosts(
            local=tuple(costs.local[rank] for rank in ranks),
            shared=tuple(costs.shared[rank] for rank in ranks),
            average_ms=costs.average_ms,
            gradient_ms=costs.gradient_ms,
            snapshot_ms=costs.snapshot_ms,
        ),
        # In a user's own loop only `auto` lets one rank train alone, and only the first.
        may_rest=workload.may_rest or (policy_spec(policy).switches and not workload.shares_always),
        only_alone=None if workload.may_rest else 0,
        samples_after=workload.total_samples - simulated,
    )


def _leaves_cores(devices: Sequence[str], workload: TrainingWork) -> bool:
    """Whether ranks that rest leave their cores to one that works: CPU ranks, unless the number of threads is fixed."""
    options = workload.options
    is_compiled = "compile" in (options.get("execution") or ())
    is_fixed = options.get("threads_per_rank") is not None or options.get("record_schedule") or is_compiled
    return sum(name.startswith("cpu") for name in devices) > 1 and not is_fixed


def _gains_alone(
    devices: Sequence[str],
    ranks: Sequence[int],
    alone: Sequence[DeviceSpeed],
    costs: MeasuredCosts,
    workload: TrainingWork,
) -> tuple[float, ...]:
    size = workload.batch_size
    return tuple(
        max(1.0, costs.shared[rank].step_ms(size) / alone[rank].step_ms(size)) if name.startswith("cpu") else 1.0
        for name, rank in zip(devices, ranks, strict=True)
    )


def _memory(joint: Sequence[TrialReports], policy: str) -> tuple[int | None, ...]:
    """Peak memory of each rank with a policy; for `auto`, which may take local and shared steps, the largest peak."""
    peaks = [trial.peak_memory_bytes for trial in joint if policy in (trial.policy, "auto")]
    return tuple(max((peak for peak in rank if peak is not None), default=None) for rank in zip(*peaks, strict=True))


def _solo_cell(rank: int, trials: Sequence[TrialReports], workload: TrainingWork) -> Cell:
    # Average the times per sample, not their inverses, as if both trials were one run.
    rate = harmonic_mean([samples_per_s(trial.of_kind(ALONE)) for trial in trials])
    epoch_s = workload.num_samples / rate + fmean(map(_epoch_end, trials)) / 1e3
    return Cell(
        devices=trials[0].devices,
        policy=SOLO,
        samples_per_s=workload.num_samples / epoch_s,
        epoch_s=epoch_s,
        wait_by_rank=(0.0,),
        averaging=0.0,
        share_by_rank=(1.0,),
        memory_bytes=trials[0].peak_memory_bytes,
        ranks=(rank,),
    )


def _cell(
    devices: Sequence[str],
    ranks: Sequence[int],
    outcome: Outcome,
    workload: TrainingWork,
    *,
    memory: Sequence[int | None],
    end_ms: float,
) -> Cell:
    samples = sum(outcome.samples_by_rank)
    epoch_s = workload.num_samples / outcome.samples_per_s + end_ms / 1e3
    return Cell(
        devices=tuple(devices[rank] for rank in ranks),
        policy=outcome.policy,
        samples_per_s=workload.num_samples / epoch_s,
        epoch_s=epoch_s,
        wait_by_rank=outcome.wait_by_rank,
        averaging=outcome.exposed_average_fraction,
        share_by_rank=tuple(own / samples for own in outcome.samples_by_rank),
        memory_bytes=tuple(memory[rank] for rank in ranks),
        ranks=tuple(ranks),
    )


def _best(cells: Sequence[Cell]) -> Cell:
    """The fastest cell; among about equally fast cells, prefers fewest devices, then learning exactly as one device."""
    enough = max(cell.samples_per_s for cell in cells) / WORTHWHILE_GAIN
    candidates = [cell for cell in cells if cell.samples_per_s >= enough]
    fewest = min(len(cell.devices) for cell in candidates)
    candidates = [cell for cell in candidates if len(cell.devices) == fewest]
    # Between policies a gain of one percent counts, because it needs no further device.
    top = max(cell.samples_per_s for cell in candidates)
    candidates = [cell for cell in candidates if cell.samples_per_s >= 0.99 * top]
    return min(candidates, key=lambda cell: PREFERRED.index(cell.policy) if cell.policy in PREFERRED else -1)


def _options(best: Cell) -> dict[str, Any]:
    options: dict[str, Any] = {"devices": list(best.devices)}
    if best.policy != SOLO:
        options["policy"] = best.policy
    return options


def as_document(advice: Advice) -> dict[str, Any]:
    """The advice as a JSON document, with which a later run compares itself."""
    return {
        "schema_version": SCHEMA_VERSION,
        "devices": list(advice.devices),
        "model_bytes": advice.model_bytes,
        "parameters": advice.parameters,
        "workload": {**asdict(advice.workload), "options": dict(advice.workload.options)},
        "forecasts": [_cell_document(cell) for cell in advice.cells],
        "advice": {
            "policy": advice.best.policy,
            "devices": list(advice.best.devices),
            "left_out": list(advice.left_out),
            "gain": advice.gain,
            "options": dict(advice.options),
        },
        "spread": None if advice.spread is None else round(advice.spread, 4),
        "fewest": advice.fewest,
    }


def _cell_document(cell: Cell) -> dict[str, Any]:
    return {
        "devices": list(cell.devices),
        "policy": cell.policy,
        "samples_per_s": round(cell.samples_per_s, 3),
        "epoch_s": round(cell.epoch_s, 3),
        "wait_by_rank": [round(part, 4) for part in cell.wait_by_rank],
        "averaging": round(cell.averaging, 4),
        "share_by_rank": [round(part, 4) for part in cell.share_by_rank],
        "memory_bytes": list(cell.memory_bytes),
    }
