"""The verdict of the live page: one sentence about a running job that its user can act on, with the evidence.

Decides what slows a run down, and on which rank, from the pulses of the last seconds and earlier ones. Reads no clock:
the caller passes the time. Called by the view of the live page.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from outrider.timeline.pulses import Pulse
from outrider.timeline.rank_load import RankLoad, load_of, since, world_load

RECENT_S = 5.0
"""Length of the present: several batches of most models, but short enough to report a delay within ten seconds."""
HISTORY_S = 300.0
"""Length of the history with which the present is compared."""
SILENT_S = 10.0
"""A rank without pulses for this long is silent; ranks write two pulses a second, even while they wait."""
STUCK_S = 15.0

# A cause that takes at least this fraction of a rank's training time is worth a sentence.
_MUCH = 0.10
_SLOWER = 1.4
"""Minimum slowdown to report: machines that also do other work are often a third slower for a while."""
_ALIKE = 3.0
"""Slowdowns that differ by less than this factor have the same cause."""
_NOTABLE_S = 0.05
"""A delay per batch or average that is clearly above noise."""
_NOTABLE_PART = 0.02
_SKEWED = 0.15
_WARM_UP = 4
"""Number of pulses in the warm-up: two seconds."""
_COSTLY = 0.25

Clock = Callable[[float], str]
"""Converts seconds since the start of the run to a time of day."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveVerdict:
    """The verdict at the top of the page."""

    level: str
    """ok, notice or problem."""
    kind: str
    """data, compute, link, averages, skew, rest, silent, stuck, starting, between or fine."""
    sentence: str
    rank: int | None = None
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class _JudgedRank:
    """The data of one rank that the verdict uses."""

    rank: int
    device: str
    recent: RankLoad
    pulses: Sequence[Pulse]
    before: Sequence[RankLoad]
    """Earlier stretches, each half as long as the present, without the slow ones at the end."""

    @property
    def name(self) -> str:
        return f"Rank {self.rank} ({self.device})" if self.device else f"Rank {self.rank}"

    def usual(self, measure: Callable[[RankLoad], float | None]) -> float | None:
        """The median of a measure over earlier stretches; None if it is not known."""
        values = [value for load in self.before if (value := measure(load)) is not None]
        return statistics.median(values) if values else None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Finding:
    """A cause that takes `part` of a rank's training time."""

    part: float
    verdict: LiveVerdict
    times: float = 1.0
    """Slowdown: time per sample relative to the usual time."""


def judge(
    pulses: Mapping[int, Sequence[Pulse]],
    *,
    now_s: float,
    devices: Mapping[int, str] | None = None,
    clock: Clock = lambda at_s: f"{at_s:.0f} s",
    reason: str | None = None,
    policy: str | None = None,
) -> LiveVerdict:
    """Judge a running run; `reason` is the text of its last plan."""
    names = devices or {}
    ranks = [_rank(rank, names.get(rank, ""), known, now_s) for rank, known in sorted(pulses.items()) if known]
    if not ranks:
        return LiveVerdict(level="notice", kind="starting", sentence="The ranks are being started.")
    halted = _silent(ranks, now_s) or _stuck(ranks)
    if halted is not None:
        return halted
    if not any(rank.recent.training_s > 0.2 * RECENT_S for rank in ranks):
        return _between(ranks)
    findings = [finding for rank in ranks for finding in _findings(rank, clock)]
    if len(ranks) > 1 and [finding.verdict.kind for finding in findings] == ["compute"] * len(ranks):
        times = sorted(finding.times for finding in findings)
        # Another program on the machine slows all ranks alike; a much slower rank has a problem of its own.
        if times[-1] < _ALIKE * times[-2]:
            return _all_slower(findings)
    if findings:
        return max(findings, key=lambda finding: finding.part).verdict
    return _averages(ranks, policy) or _skew(ranks, policy) or _fine(ranks, reason, policy)


def _rank(rank: int, device: str, pulses: Sequence[Pulse], now_s: float) -> _JudgedRank:
    now_s = min(now_s, pulses[-1].end_s)
    known = since(pulses, now_s - HISTORY_S)
    recent = since(known, now_s - RECENT_S) or known[-1:]
    return _JudgedRank(
        rank=rank,
        device=device,
        recent=load_of(recent),
        pulses=known,
        before=_calm(list(_stretches(known[: len(known) - len(recent)]))),
    )


def _stretches(pulses: Sequence[Pulse]) -> Iterator[RankLoad]:
    """Yield consecutive stretches of training; the first seconds, a warm-up, count only while there are few others."""
    open_: list[Pulse] = []
    seconds = 0.0
    trained = [pulse for pulse in pulses if pulse.batches or "compute" in pulse.spent_s]
    for pulse in trained[_WARM_UP:] if len(trained) >= 3 * _WARM_UP else trained:
        open_.append(pulse)
        seconds += pulse.seconds
        if seconds >= RECENT_S / 2:
            yield load_of(open_)
            open_, seconds = [], 0.0


def _calm(stretches: list[RankLoad]) -> list[RankLoad]:
    """Remove the slow stretches at the end, so that a lasting delay does not become the usual time."""
    values = sorted(value for load in stretches if (value := load.compute_s_per_sample) is not None)
    if not values:
        return stretches
    limit = 0.9 * _SLOWER * values[len(values) // 4]
    end = len(stretches)
    while end > 0 and (stretches[end - 1].compute_s_per_sample or limit) >= limit:
        end -= 1
    return stretches[:end] or stretches


# Ranks that do not progress


def _silent(ranks: Sequence[_JudgedRank], now_s: float) -> LiveVerdict | None:
    for rank in ranks:
        last = rank.pulses[-1]
        if now_s - last.end_s > SILENT_S:
            return LiveVerdict(
                level="problem",
                kind="silent",
                rank=rank.rank,
                sentence=f"{rank.name} has shown no sign of life for {now_s - last.end_s:.0f} s: look at its log.",
                evidence=(f"its last word was {_doing(last.phase)}",),
            )
    return None


def _stuck(ranks: Sequence[_JudgedRank]) -> LiveVerdict | None:
    """Find a rank that has been in one phase for too long, so that other ranks may wait for it."""
    for rank in ranks:
        last = rank.pulses[-1]
        if last.phase in ("compute", "data", "join") and last.phase_s >= STUCK_S:
            others = [other.rank for other in ranks if other.pulses[-1].phase in ("average", "rest", "epoch boundary")]
            waits = f"rank {', '.join(map(str, others))} waits for it" if others else "no other rank waits for it"
            return LiveVerdict(
                level="problem",
                kind="stuck",
                rank=rank.rank,
                sentence=f"{rank.name} has been {_doing(last.phase)} for {last.phase_s:.0f} s without a result.",
                evidence=(waits,),
            )
    return None


def _between(ranks: Sequence[_JudgedRank]) -> LiveVerdict:
    phases = {rank.pulses[-1].phase for rank in ranks}
    if "startup" in phases:
        words = "The ranks are being set up."
    elif "evaluation" in phases:
        words = "The ranks evaluate."
    else:
        words = "The ranks are between two epochs."
    spent = [f"rank {rank.rank}: {_doing(rank.pulses[-1].phase)}" for rank in ranks]
    return LiveVerdict(level="notice", kind="between", sentence=words, evidence=tuple(spent))


def _doing(phase: str) -> str:
    words = {
        "startup": "setting up",
        "compute": "computing",
        "data": "waiting for data",
        "join": "on its way into an average",
        "average": "averaging",
        "rest": "resting",
        "evaluation": "evaluating",
        "epoch boundary": "at the end of an epoch",
    }
    return words.get(phase, phase)


# Causes that slow one rank


def _findings(rank: _JudgedRank, clock: Clock) -> Iterator[_Finding]:
    for find in (_data, _link):
        finding = find(rank)
        if finding is not None:
            yield finding
    slower = _slower(rank, clock)
    if slower is not None:
        yield slower


def _data(rank: _JudgedRank) -> _Finding | None:
    load, part = rank.recent, rank.recent.part("data")
    per_batch_s = load.spent_s["data"] / max(1, load.batches)
    is_notable = per_batch_s >= _NOTABLE_S and part >= 2 * _NOTABLE_PART
    if part < _MUCH and not is_notable:
        return None
    usual_s = rank.usual(lambda before: before.spent_s["data"] / before.batches if before.batches else None)
    return _Finding(
        part=part,
        verdict=LiveVerdict(
            level="problem",
            kind="data",
            rank=rank.rank,
            sentence=f"{rank.name} waits {_percent(part)} of its time for data: raise workers or make samples cheaper.",
            evidence=(f"{_ms(per_batch_s)} per batch{_instead_of(usual_s, per_batch_s)}", _computes(load)),
        ),
    )


def _link(rank: _JudgedRank) -> _Finding | None:
    """Find time between a rank's last step and the sum with other ranks, which is neither compute nor data."""
    load, part = rank.recent, rank.recent.part("join")
    per_average_s = load.spent_s["join"] / max(1, load.averages)
    if part < _NOTABLE_PART or per_average_s < _NOTABLE_S:
        return None
    usual_s = rank.usual(lambda before: before.spent_s["join"] / before.averages if before.averages else None)
    return _Finding(
        part=part,
        verdict=LiveVerdict(
            level="problem",
            kind="link",
            rank=rank.rank,
            sentence=f"{rank.name} comes late into averages: its link, or something beside training, holds it "
            f"{_percent(part)} of its time.",
            evidence=(
                f"{_ms(per_average_s)} on the way into each average{_instead_of(usual_s, per_average_s)}",
                _computes(load),
            ),
        ),
    )


def _slower(rank: _JudgedRank, clock: Clock) -> _Finding | None:
    load = rank.recent
    usual_s = rank.usual(lambda before: before.compute_s_per_sample)
    usual_batch_s = rank.usual(lambda before: before.compute_s_per_batch)
    if usual_s is None or usual_batch_s is None or load.training_s <= 0:
        return None
    # If no batch ended in all this time, one batch takes at least this long.
    batch_s = load.compute_s_per_batch or load.spent_s["compute"]
    ratio = load.compute_s_per_sample / usual_s if load.compute_s_per_sample else batch_s / usual_batch_s
    # Smaller batches cost more per sample without any change of the device: the rank's share may have changed.
    if ratio < max(_SLOWER, 1.15 * _noise(rank, usual_s)) or batch_s < 0.9 * usual_batch_s:
        return None
    part = load.spent_s["compute"] * (1 - 1 / ratio) / load.training_s
    if part < _MUCH:
        return None
    begun_s = _began_s(rank.pulses, usual_s)
    return _Finding(
        part=part,
        times=ratio,
        verdict=LiveVerdict(
            level="problem",
            kind="compute",
            rank=rank.rank,
            sentence=f"{rank.name} computes {_times(ratio)} since {clock(begun_s)}: look for another program on it, "
            "heat, or more work per sample.",
            evidence=(f"{_ms(batch_s)} per batch in forward and backward, {_ms(usual_batch_s)} before", _waits(load)),
        ),
    )


def _noise(rank: _JudgedRank, usual_s: float) -> float:
    """The slowdown that a quarter of the earlier stretches reached or exceeded."""
    values = sorted(value for load in rank.before if (value := load.compute_s_per_sample) is not None)
    return values[(3 * len(values)) // 4] / usual_s if len(values) >= 4 else 1.0


def _all_slower(findings: Sequence[_Finding]) -> LiveVerdict:
    """The verdict if all ranks slowed down together, which has one cause."""
    told = [finding.verdict for finding in findings]
    return LiveVerdict(
        level="problem",
        kind="compute",
        sentence="All ranks compute more slowly than before: look for another program on this machine, or heat.",
        evidence=tuple(f"rank {one.rank}: {one.evidence[0]}" for one in told),
    )


def _began_s(pulses: Sequence[Pulse], usual_s: float) -> float:
    """The start of the current slow period: the end of the last pulse that was not slow."""
    begun_s = pulses[0].start_s
    for pulse in pulses:
        is_slow = pulse.samples == 0 or pulse.spent_s.get("compute", 0.0) / pulse.samples > usual_s * _SLOWER * 0.85
        if not is_slow:
            begun_s = pulse.end_s
    return begun_s


# Causes that slow all ranks


def _averages(ranks: Sequence[_JudgedRank], policy: str | None) -> LiveVerdict | None:
    """Find averages that are slow for all ranks, so that no single rank is the cause."""
    if len(ranks) < 2 or not all(rank.recent.averages for rank in ranks):
        return None
    quickest = min(ranks, key=lambda rank: _own_average_s(rank.recent) or 0.0)
    now_s, part = _own_average_s(quickest.recent) or 0.0, min(rank.recent.part("average") for rank in ranks)
    usual_s = quickest.usual(_own_average_s)
    is_slower = usual_s is not None and now_s >= max(2 * usual_s, usual_s + _NOTABLE_S)
    if part < (_MUCH if is_slower else _COSTLY):
        return None
    words = (
        f"Averages take {_ms(now_s)} instead of {_ms(usual_s or 0.0)}: the link between the ranks has become slow."
        if is_slower
        else f"Averages take {_percent(part)} of every rank's time: {_fewer_averages(policy)}."
    )
    spent = tuple(
        f"rank {rank.rank}: {_ms(_own_average_s(rank.recent) or 0.0)} per average, {rank.recent.averages} averages in "
        f"{RECENT_S:.0f} s"
        for rank in ranks
    )
    return LiveVerdict(level="problem" if is_slower else "notice", kind="averages", sentence=words, evidence=spent)


def _fewer_averages(policy: str | None) -> str:
    if policy in ("sync", "balanced", "auto"):
        return "a larger batch has fewer of them, and policy async averages less often"
    return "average less often, with a larger anchor or a lower overhead_target"


def _own_average_s(load: RankLoad) -> float | None:
    """The time that an average takes from a rank, without known waits for other ranks."""
    return max(0.0, load.spent_s["average"] - load.waited_s) / load.averages if load.averages else None


def _skew(ranks: Sequence[_JudgedRank], policy: str | None) -> LiveVerdict | None:
    """Find ranks that wait for a rank that never waits; all policies except sync change shares until no rank waits."""
    parts = {rank.rank: rank.recent.waited_s / max(1e-9, rank.recent.training_s) for rank in ranks}
    slowest, waiting = min(parts, key=lambda rank: parts[rank]), max(parts, key=lambda rank: parts[rank])
    is_fixed = policy == "sync"
    if len(ranks) < 2 or parts[waiting] < (_SKEWED if is_fixed else 2 * _SKEWED) or parts[slowest] > 0.05:
        return None
    way_out = "let shares follow speeds, with policy balanced or async." if is_fixed else "shares are about to follow."
    by_rank = {rank.rank: rank for rank in ranks}
    return LiveVerdict(
        level="notice",
        kind="skew",
        rank=slowest,
        sentence=f"Rank {waiting} waits {_percent(parts[waiting])} of its time for rank {slowest}, which never waits: "
        f"{way_out}",
        evidence=tuple(f"rank {rank}: {_pace_words(one.recent)}" for rank, one in by_rank.items()),
    )


def _fine(ranks: Sequence[_JudgedRank], reason: str | None, policy: str | None) -> LiveVerdict:
    paces = {rank.rank: pace for rank in ranks if (pace := rank.usual(lambda before: before.pace)) is not None}
    world = world_load({rank.rank: rank.recent for rank in ranks}, paces=paces)
    resting = [rank for rank in ranks if rank.recent.spent_s["rest"] > 0.5 * rank.recent.present_s]
    words = "Training" if world.rate is None else f"{world.rate:,.0f} samples/s"
    if resting:
        names = " and ".join(str(rank.rank) for rank in resting)
        return LiveVerdict(
            level="notice",
            kind="rest",
            rank=resting[0].rank,
            sentence=f"{words}; rank {names} rests, because the others are faster without it.",
            evidence=(reason,) if reason else (),
        )
    if len(ranks) == 1 or world.efficiency is None or world.gain is None:
        computes = f"{_percent(ranks[0].recent.part('compute'))} of the time goes to forward and backward"
        return LiveVerdict(
            level="ok", kind="fine", sentence=f"{words}: nothing holds the run up.", evidence=(computes,)
        )
    if world.gain < 0.97:
        return _slower_together(ranks, world.gain, words, policy)
    others = "the second device brings" if len(ranks) == 2 else f"all {len(ranks)} devices bring"
    return LiveVerdict(
        level="ok",
        kind="fine",
        sentence=f"{words}: nothing holds the run up, {others} {world.gain:.2f}×.",
        evidence=(
            f"{_percent(world.efficiency)} of the sum of the ranks' own paces",
            *(f"rank {rank.rank}: {_pace_words(rank.recent)}" for rank in ranks),
        ),
    )


def _slower_together(ranks: Sequence[_JudgedRank], gain: float, words: str, policy: str | None) -> LiveVerdict:
    fastest = max(ranks, key=lambda rank: rank.recent.pace or 0.0)
    has_other = policy not in ("auto", "async")
    way_out = "use policy auto or async" if has_other else f"train on the device of rank {fastest.rank} alone"
    return LiveVerdict(
        level="notice",
        kind="slower together",
        rank=fastest.rank,
        sentence=f"{words}: {gain:.2f}× of what rank {fastest.rank} would do alone, so the others cost more than they "
        f"bring: {way_out}.",
        evidence=tuple(
            f"rank {rank.rank}: {_percent(rank.recent.part('compute'))} of its time in forward and backward, "
            f"{_percent(rank.recent.part('average'))} in averages"
            for rank in ranks
        ),
    )


# Wording


def _percent(part: float) -> str:
    return f"{part * 100:.0f} %"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.1f} s"


def _instead_of(usual_s: float | None, now_s: float) -> str:
    return f", {_ms(usual_s)} before" if usual_s is not None and now_s > 1.5 * usual_s else ""


def _times(ratio: float) -> str:
    return f"{_percent(ratio - 1)} longer per sample" if ratio < 2 else f"{ratio:.1f}× as long per sample"


def _computes(load: RankLoad) -> str:
    return f"{_percent(load.part('compute'))} of its time in forward and backward"


def _waits(load: RankLoad) -> str:
    return f"{_percent(load.part('data'))} of its time in data, {_percent(load.part('average'))} in averages"


def _pace_words(load: RankLoad) -> str:
    pace = "no batch yet" if load.pace is None else f"{load.pace:,.0f} samples/s while it steps"
    return f"{pace}, {_percent(load.waited_s / max(1e-9, load.training_s))} of its time waiting for others"
