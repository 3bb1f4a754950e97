"""Forecasts every policy on every choice of devices from short real runs, and says which to use.

Decides what is simulated, which devices are worth it, and what is advised. Runs no model: `api.advising` measures, and
`advice_text` shows. Knows no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import combinations
from statistics import fmean, harmonic_mean
from typing import Any

from outrider.policy.policies import FIXED_POLICIES, TRAINING_POLICIES
from outrider.policy.window_planner import PlannerConfig
from outrider.virtual.advice_text import as_text
from outrider.virtual.simulator import DeviceSpeed, MeasuredCosts, Network, Outcome, Scenario, simulate
from outrider.virtual.trial_reports import (
    ALONE,
    MeetingCost,
    TrialReports,
    background_cost,
    device_speed,
    epoch_end_ms,
    meeting_cost,
    samples_per_s,
    steps_of,
    stretch_overhead_ms,
    stretch_speed,
)

SCHEMA_VERSION = 1
SOLO = "solo"
SOLO_POLICY = "sync"
"""With one rank all policies take the same steps; this one reports them every half second."""
TRIAL_POLICIES = FIXED_POLICIES
"""Those that are measured on all devices together; `auto` changes between two of them."""
WORTHWHILE_GAIN = 1.03
"""A device or a policy that adds less is not advised over fewer devices, or over a policy that learns as one device."""
PREFERRED = ("auto", "balanced", "sync", "cadence", "async")
"""Among equally fast ones: first those whose learning curve is that of one device."""
MOST_FOR_ALL_SUBSETS = 4
SIMULATED_STEPS = 3_000
"""Per device; a longer run goes on as it did up to here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingWork:
    """What a script trains, as its record says."""

    num_samples: int
    """Of an epoch."""
    batch_size: int
    total_samples: int
    """Of the whole run."""
    may_rest: bool
    """Whether slow devices may leave whole batches to a fast one: `train()`, not a loop of the user."""
    options: Mapping[str, Any]

    def planner(self, world_size: int) -> PlannerConfig:
        """The user's options of windows, without those that are given per device."""
        names = {field.name for field in fields(PlannerConfig)} - {"world_size", "batch_size", "is_blocking"}
        skipped = ("shares", "speed_hints", "batch_sizes")
        given = {name: self.options[name] for name in names if name in self.options and name not in skipped}
        return PlannerConfig(world_size=world_size, batch_size=self.batch_size, is_blocking=True, **given)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """The forecast of one policy on some of the devices."""

    devices: tuple[str, ...]
    policy: str
    """`solo` for one device."""
    samples_per_s: float
    epoch_s: float
    wait_by_rank: tuple[float, ...]
    averaging: float
    """Part of all devices' time."""
    share_by_rank: tuple[float, ...]
    memory_bytes: tuple[int | None, ...]
    """Measured, not forecast: the peak of each rank in the short run."""
    ranks: tuple[int, ...]
    """Which of the devices asked about these are; two may have the same name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """All forecasts, and which one to use."""

    devices: tuple[str, ...]
    workload: TrainingWork
    model_bytes: int
    parameters: int
    cells: tuple[Cell, ...]
    best: Cell
    left_out: tuple[str, ...]
    """Devices that add too little, slowest first."""
    gain: float
    """Of `best` over the fastest device alone."""
    options: Mapping[str, Any]
    """What to set."""
    spread: float | None = None
    """How far two measurements of one device alone were apart, before and after the others: 0.1 is 10 %."""

    def __str__(self) -> str:
        return as_text(as_document(self))

    def cell(self, policy: str, devices: Sequence[str]) -> Cell | None:
        """The forecast of a policy on these devices, in this order; that of one device has any policy."""
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
    """Forecast and advise; `solos` are one trial per device, `joint` one per policy on all of them together.

    `again` repeats the solos after the others: a machine whose speed changes meanwhile is not taken for a slow device.
    """
    devices = tuple(solo.devices[0] for solo in solos)
    trials = [(solo,) for solo in solos] if not again else list(zip(solos, again, strict=True))
    alone = [_alone_speed(own) for own in trials]
    costs, ends_ms = ({}, {}) if not joint else (_measured(joint), _epoch_ends(joint))
    cells = [_solo_cell(rank, own, workload) for rank, own in enumerate(trials)]
    rates = [cell.samples_per_s for cell in cells]
    for ranks in _subsets(rates):
        for policy in TRAINING_POLICIES if costs else ():
            outcome = simulate(policy, _scenario(ranks, alone, costs[policy], workload))
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
    )


def _spread(trials: Sequence[TrialReports]) -> float:
    rates = [samples_per_s(trial.of_kind(ALONE)) for trial in trials]
    return max(rates) / min(rates) - 1


def _subsets(rates: Sequence[float]) -> list[tuple[int, ...]]:
    """Choices of two or more devices: all of them for a few devices, else the fastest two, three, and so on."""
    num = len(rates)
    if num <= MOST_FOR_ALL_SUBSETS:
        return [ranks for size in range(2, num + 1) for ranks in combinations(range(num), size)]
    by_speed = sorted(range(num), key=lambda rank: -rates[rank])
    return [tuple(sorted(by_speed[:size])) for size in range(2, num + 1)]


def _alone_speed(trials: Sequence[TrialReports]) -> DeviceSpeed:
    return stretch_speed([trial.of_kind(ALONE) for trial in trials])


def _measured(joint: Sequence[TrialReports]) -> dict[str, MeasuredCosts]:
    """What the simulator is to use for each policy."""
    by_policy = {trial.policy: trial for trial in joint}
    size = len(joint[0].devices)
    shared = [trial.of_kind("shared") for trial in joint if trial.of_kind("shared")]
    # Sizes of batches differ between the policies of shared steps, which tells fixed from per-sample cost.
    steps = [[step for reports in shared for step in steps_of(reports, rank)] for rank in range(size)]
    costs = {}
    for policy in TRIAL_POLICIES:
        trial = by_policy[policy]
        if trial.of_kind("shared"):
            costs[policy] = _shared_costs(trial, steps)
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
    """What the end of an epoch takes in each policy; short epochs are mostly ends. Of `auto`, the longer."""
    ends_ms = {trial.policy: _epoch_end(trial) for trial in joint}
    return ends_ms | {"auto": max(ends_ms["balanced"], ends_ms["async"])}


def _epoch_end(trial: TrialReports) -> float:
    if background := trial.of_kind("background"):
        return epoch_end_ms(background, background_cost(background))
    # Ranks that share steps may leave epochs to one of them, which goes on in this way where it is quicker.
    stretches = trial.of_kind(ALONE)
    if any(report.is_first for report in stretches):
        return epoch_end_ms(stretches, MeetingCost(average_ms=0.0, overhead_ms=stretch_overhead_ms(stretches)))
    meetings = trial.of_kind("shared") or trial.of_kind("average")
    return epoch_end_ms(meetings, meeting_cost(meetings)) if meetings else 0.0


def _shared_costs(trial: TrialReports, steps: Sequence[Sequence[tuple[int, float]]]) -> MeasuredCosts:
    cost = meeting_cost(trial.of_kind("shared"))
    speeds = tuple(device_speed(own, overhead_ms=cost.overhead_ms) for own in steps)
    return MeasuredCosts(local=speeds, shared=speeds, average_ms=cost.average_ms, gradient_ms=cost.average_ms)


def _blocking_costs(trial: TrialReports) -> MeasuredCosts:
    reports = trial.of_kind("average")
    cost = meeting_cost(reports)
    speeds = _window_speeds(trial, "average", overhead_ms=cost.overhead_ms)
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
    ranks: Sequence[int], alone: Sequence[DeviceSpeed], costs: MeasuredCosts, workload: TrainingWork
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
        may_rest=workload.may_rest,
        samples_after=workload.total_samples - simulated,
    )


def _memory(joint: Sequence[TrialReports], policy: str) -> tuple[int | None, ...]:
    """Of `auto`, which may take local and shared steps, the larger peak."""
    peaks = [trial.peak_memory_bytes for trial in joint if policy in (trial.policy, "auto")]
    return tuple(max((peak for peak in rank if peak is not None), default=None) for rank in zip(*peaks, strict=True))


def _solo_cell(rank: int, trials: Sequence[TrialReports], workload: TrainingWork) -> Cell:
    # As one run of both: the time of a sample is averaged, not its inverse.
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
    """The fastest; of those about as fast the one with the fewest devices, then the one that learns as one device."""
    enough = max(cell.samples_per_s for cell in cells) / WORTHWHILE_GAIN
    candidates = [cell for cell in cells if cell.samples_per_s >= enough]
    fewest = min(len(cell.devices) for cell in candidates)
    candidates = [cell for cell in candidates if len(cell.devices) == fewest]
    # Among policies a gain of one percent counts: it costs no device.
    top = max(cell.samples_per_s for cell in candidates)
    candidates = [cell for cell in candidates if cell.samples_per_s >= 0.99 * top]
    return min(candidates, key=lambda cell: PREFERRED.index(cell.policy) if cell.policy in PREFERRED else -1)


def _options(best: Cell) -> dict[str, Any]:
    options: dict[str, Any] = {"devices": list(best.devices)}
    if best.policy != SOLO:
        options["policy"] = best.policy
    return options


def as_document(advice: Advice) -> dict[str, Any]:
    """All of it as JSON, which a later run compares itself with."""
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
