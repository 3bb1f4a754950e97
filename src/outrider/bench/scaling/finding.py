"""The conclusions of a scaling comparison: which way to use here, and why the others lose.

Derives every sentence from the numbers of a record. Runs nothing. Called by the command and the notebook.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from outrider.bench.scaling.scaling_plan import FSDP, SINGLE
from outrider.bench.scaling.scaling_record import ScalingRecord, ScalingRow, Standing, solo_speeds, standings
from outrider.policy.policies import FIXED_POLICIES

UNEQUAL = 1.15
"""From this ratio of speeds on, devices are called unequal."""
NEAR = 0.03
"""Ways whose efficiency differs by less than this count as equal."""
_LEAST_PART = 0.02
# Of the policies that do not make a fast device wait, the ones to name first.
_FOR_UNEQUAL = ("balanced", "async", "cadence")


def finding(record: ScalingRecord) -> list[str]:
    """Sentences, model by model."""
    sentences = [sentence for model in record.models for sentence in _of_model(model, record.of(model))]
    counted = f"{record.epochs - 1} of {record.epochs} epochs count: the first is warm-up"
    return [*sentences, f"{counted}; {_rounds(record.rounds)} per way, so differences of a few percent may be chance."]


def _rounds(count: int) -> str:
    return f"{count} run{'' if count == 1 else 's'}"


def _of_model(model: str, rows: Sequence[ScalingRow]) -> Iterator[str]:
    ranked = _ranked(rows)
    if not ranked:
        yield f"{model}: nothing ran on more than one device, so there is nothing to compare."
        return
    yield _best(model, ranked[0], rows)
    yield from _unequal(model, ranked, rows)
    for standing in ranked[1:]:
        if _lags(standing, ranked[0]):
            yield f"{model}: {_loss(standing, _lockstep_loss(standing.row, rows))}"
    yield from _memory(model, ranked)


def _ranked(rows: Sequence[ScalingRow]) -> list[Standing]:
    """The ways on the most devices, fastest first."""
    ran = [one for one in standings(rows) if one.row.way != SINGLE and one.efficiency is not None]
    most = max((one.row.num_devices for one in ran), default=0)
    return sorted((one for one in ran if one.row.num_devices == most), key=_speed, reverse=True)


def _speed(standing: Standing) -> float:
    return standing.row.samples_per_s or 0.0


def _best(model: str, best: Standing, rows: Sequence[ScalingRow]) -> str:
    fastest_alone = max(solo_speeds(rows).values())
    gain = _speed(best) / fastest_alone
    share = f"{_percent(best.efficiency)} of what the devices give alone"
    if gain <= 1:
        return (
            f"{model}: use the fastest device alone; the quickest way to use {best.row.num_devices}, "
            f"{best.row.title}, has {gain:.2f} times its speed, {share}."
        )
    return (
        f"{model}: on {best.row.num_devices} devices use {best.row.title}: {gain:.2f} times the fastest alone, {share}."
    )


def _unequal(model: str, ranked: Sequence[Standing], rows: Sequence[ScalingRow]) -> Iterator[str]:
    solos = solo_speeds(rows)
    speeds = [solos[device] for device in ranked[0].row.devices]
    ratio = max(speeds) / min(speeds)
    if ratio < UNEQUAL:
        return
    ddp = next((one for one in ranked if one.row.way == "ddp"), None)
    expected = _lockstep_loss(ranked[0].row, rows)
    loss = expected if ddp is None or ddp.efficiency is None else 1 - ddp.efficiency
    told = "DDP loses" if ddp is not None else "DDP would lose"
    # A way that beats DDP is not recommended if the fastest device alone beats both.
    beaten = max(1 - loss, max(speeds) / sum(speeds))
    better = [way for way in _FOR_UNEQUAL if _beats(way, ranked, beaten)]
    advice = f"use {' or '.join(better)}" if better else "no policy beats the fastest device alone"
    yield f"{model}: your devices are unequal by {ratio:.1f}x: {told} {_percent(loss)}, {advice}."


def _lockstep_loss(row: ScalingRow, rows: Sequence[ScalingRow]) -> float:
    """By the speeds alone: a world in lockstep is as fast as its slowest device, times the number of devices."""
    solos = solo_speeds(rows)
    speeds = [solos[device] for device in row.devices]
    return 1 - len(speeds) * min(speeds) / sum(speeds)


def _beats(way: str, ranked: Sequence[Standing], efficiency: float) -> bool:
    mine = next((one.efficiency for one in ranked if one.row.way == way), None)
    return mine is not None and mine > efficiency + NEAR


def _lags(standing: Standing, best: Standing) -> bool:
    return (best.efficiency or 0.0) - (standing.efficiency or 0.0) > NEAR


def _loss(standing: Standing, lockstep_loss: float) -> str:
    lost = 1 - (standing.efficiency or 0.0)
    reasons = [*_measured_reasons(standing.row), *_known_reasons(standing.row)]
    if not reasons:
        reasons = [_computed_reason(lockstep_loss)] if standing.row.wait_part is None else []
    return f"{standing.row.title} loses {_percent(lost)}{': ' if reasons else ''}{', '.join(reasons)}."


def _measured_reasons(row: ScalingRow) -> Iterator[str]:
    if row.average_part is not None and row.average_part >= _LEAST_PART:
        yield f"communication takes {_percent(row.average_part)} of the time"
    if row.wait_part is not None and row.wait_part >= _LEAST_PART:
        yield f"ranks wait {_percent(row.wait_part)} of the time for each other"


def _known_reasons(row: ScalingRow) -> Iterator[str]:
    """The inherent reason for a way's loss."""
    if row.way == "dp":
        yield "one process copies the model to every device at each step and gathers the outputs on the first"
    if row.way == FSDP:
        yield "parameters are gathered again in every forward and backward pass"


def _computed_reason(lockstep_loss: float) -> str:
    """Where the ranks could not measure their waits: on a GPU a host's clock does not see torch's."""
    if lockstep_loss >= _LEAST_PART:
        return f"by the speeds alone, keeping step with the slowest device costs {_percent(lockstep_loss)}"
    return "the devices are equally fast, so it goes to communication"


def _memory(model: str, ranked: Sequence[Standing]) -> Iterator[str]:
    """The note on the memory that sharding saves."""
    peaks = {one.row.way: peak for one in ranked if (peak := mean_peak_bytes(one.row)) is not None}
    whole = peaks.get("ddp") or next((peaks[way] for way in FIXED_POLICIES if way in peaks), None)
    if FSDP in peaks and whole is not None and peaks[FSDP] < whole * (1 - NEAR):
        saved = 1 - peaks[FSDP] / whole
        yield f"{model}: FSDP2 needs {_percent(saved)} less memory per rank; take it where the model does not fit."


def mean_peak_bytes(row: ScalingRow) -> float | None:
    """Over the ranks; None if one is not known."""
    known = [peak for peak in row.peak_memory_bytes if peak is not None]
    return fmean(known) if known and len(known) == len(row.peak_memory_bytes) else None


def _percent(part: float | None) -> str:
    return "an unknown part" if part is None else f"{100 * part:.0f} %"
