"""What the live page shows of a run, as one JSON object: verdict, numbers, lanes, charts, the plan in words.

Decides the content; the page decides how it looks. Called by the server, once for all pages that show the run.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from outrider.timeline.live_verdict import RECENT_S, LiveVerdict, judge
from outrider.timeline.pulses import Pulse
from outrider.timeline.rank_load import RankLoad, load_of, since, world_load
from outrider.watch.ceiling import Ceiling
from outrider.watch.run_reader import NEWEST_PULSES, RunReader
from outrider.watch.run_series import series, width_s

LANE_S = 60.0
"""The lanes show the last minute."""
MAX_LANE_PULSES = 120
NUM_NOTES = 12

_AT_END = {
    "finished": ("ok", "The run is finished"),
    "stopped": ("notice", "The run was stopped before its end"),
    "interrupted": ("notice", "The run was interrupted"),
    "closed": ("notice", "The run was closed by its program"),
    "failed": ("problem", "The run failed"),
}


def view(reader: RunReader, *, ceiling: Ceiling | None = None) -> dict[str, Any]:
    """Everything that a page shows; `ceiling` is what the devices do without averages, where that is known."""
    now_s = reader.now_s()
    recent = {
        # After its end a run is shown as a whole.
        rank: load_of(known if reader.is_over else _recent(known, now_s))
        for rank, known in sorted(reader.pulses.items())
        if known
    }
    paces = {
        rank: pace
        for rank, known in reader.pulses.items()
        if (pace := load_of(known[-NEWEST_PULSES:]).pace) is not None
    }
    return {
        "run": _run(reader, now_s),
        "verdict": asdict(verdict_of(reader, now_s)),
        "totals": _totals(reader, recent, paces, ceiling),
        "ranks": [_rank(reader, rank, load, recent, paces.get(rank)) for rank, load in recent.items()],
        "lanes": {rank: _lane(known, now_s) for rank, known in sorted(reader.pulses.items())},
        "lane_s": _lane_s(reader, now_s),
        "series": _charts(reader),
        "plan": _plan(reader),
        "notes": [_note(event) for event in list(reader.notes)[-NUM_NOTES:]][::-1],
    }


def _charts(reader: RunReader) -> dict[str, Any]:
    """Made anew when another point is complete: in a long run that is once in many seconds."""
    end_s = _end_s(reader)
    width = width_s(end_s, num_ranks=len(reader.pulses))
    key = (reader.origin_s or 0.0, width, end_s // width, len(reader.pulses), reader.is_over)
    if reader.charts is None or reader.charts[0] != key:
        percents = {rank: _percents(reader, rank) for rank in reader.pulses}
        reader.charts = key, series(reader.pulses, end_s=end_s, percents=percents)
    return reader.charts[1]


def verdict_of(reader: RunReader, now_s: float) -> LiveVerdict:
    """The verdict about a run, whatever state it is in."""
    if not reader.is_there:
        return LiveVerdict(
            level="problem", kind="gone", sentence="The folder of this run is gone; below is the last seen."
        )
    if reader.is_over:
        return _verdict_at_end(reader)
    if not reader.pulses and reader.record.get("epochs"):
        return LiveVerdict(
            level="notice", kind="unknown", sentence="This run wrote no pulses: only its record is shown."
        )
    return judge(
        reader.pulses,
        now_s=now_s,
        devices=reader.devices,
        clock=lambda at_s: _clock(reader, at_s),
        reason=_reason(reader),
        policy=reader.record.get("policy"),
    )


def _verdict_at_end(reader: RunReader) -> LiveVerdict:
    level, words = _AT_END[reader.status]
    epochs = reader.record.get("epochs") or []
    totals = reader.record.get("totals") or {}
    error = reader.record.get("error") or {}
    if error.get("message"):
        return LiveVerdict(
            level=level, kind=reader.status, sentence=f"{words}: {error['message']}", rank=error.get("rank")
        )
    rate = totals.get("samples_per_s")
    facts = [f"{len(epochs)} epoch{'' if len(epochs) == 1 else 's'}"]
    facts += [f"{rate:,.0f} samples/s"] if rate else []
    facts += [f"eval {totals['eval']:.4g}"] if isinstance(totals.get("eval"), int | float) else []
    evidence = [
        f"rank {rank}: {100 * load.own_s / max(1e-9, load.present_s):.0f} % of its training time in its own steps, "
        f"{100 * load.waited_s / max(1e-9, load.present_s):.0f} % waiting for others"
        for rank, known in sorted(reader.pulses.items())
        if (load := load_of(known)).present_s > 0
    ]
    return LiveVerdict(
        level=level, kind=reader.status, sentence=f"{words}: {', '.join(facts)}.", evidence=tuple(evidence)
    )


def _recent(pulses: Sequence[Pulse], now_s: float) -> list[Pulse]:
    at_s = min(now_s, pulses[-1].end_s)
    return since(pulses, at_s - RECENT_S) or list(pulses[-1:])


def _end_s(reader: RunReader) -> float:
    return max((known[-1].end_s for known in reader.pulses.values() if known), default=0.0)


def _run(reader: RunReader, now_s: float) -> dict[str, Any]:
    record, options = reader.record, reader.record.get("options") or {}
    epochs = record.get("epochs") or []
    # Epochs do not tell the length of a run that is so many steps or samples long.
    has_other_length = options.get("steps") is not None or options.get("samples") is not None
    num_epochs = None if has_other_length else options.get("epochs")
    last = epochs[-1] if epochs else {}
    return {
        "name": reader.folder.resolve().name,
        "path": shlex.quote(str(reader.folder)),
        "status": reader.status if reader.is_there else "gone",
        "is_over": reader.is_over or not reader.is_there,
        "policy": record.get("policy"),
        "backend": record.get("backend"),
        "devices": record.get("devices") or list(reader.devices.values()),
        "seconds": round(now_s, 1),
        "unseen": reader.num_unseen,
        "epoch": len(epochs),
        "num_epochs": num_epochs,
        "samples": reader.samples,
        "progress": _progress(reader, num_epochs=num_epochs),
        "loss": last.get("loss"),
        "eval": last.get("eval"),
    }


def _progress(reader: RunReader, *, num_epochs: object) -> float | None:
    """The part of the run that is done, where its length is known and all of its ranks are seen."""
    record, options = reader.record, reader.record.get("options") or {}
    if reader.num_unseen:
        return None
    if record.get("resumed_from"):
        # Samples count from this start on; epochs count from the first.
        is_known = isinstance(num_epochs, int) and num_epochs > 0
        return round(min(1.0, len(record.get("epochs") or []) / num_epochs), 4) if is_known else None  # type: ignore[operator]
    per_epoch = record.get("num_samples")
    total = options.get("samples")
    if isinstance(options.get("steps"), int):
        total = options["steps"] * _mean(options.get("batch_size"))
    elif isinstance(num_epochs, int) and per_epoch:
        total = num_epochs * per_epoch
    return round(min(1.0, reader.samples / total), 4) if total else None


def _mean(batch_size: object) -> float:
    sizes = batch_size if isinstance(batch_size, Sequence) else [batch_size]
    known = [size for size in sizes if isinstance(size, int)]
    return sum(known) / len(known) if known else 0.0


def _totals(
    reader: RunReader, recent: Mapping[int, RankLoad], paces: Mapping[int, float], ceiling: Ceiling | None
) -> dict[str, Any]:
    world = world_load(recent, paces=paces)
    averages = sum(load.averages for load in recent.values())
    average_s = sum(load.average_s for load in recent.values()) / averages if averages else None
    return {
        "rate": world.rate,
        "pace_sum": world.pace_sum,
        "efficiency": world.efficiency,
        "gain": world.gain if len(recent) > 1 and not reader.num_unseen else None,
        "of_ceiling": None if ceiling is None or world.rate is None or reader.num_unseen else world.rate / ceiling.rate,
        "ceiling_run": None if ceiling is None else ceiling.run,
        "average_ms": None if average_s is None else average_s * 1e3,
        "average_bytes": reader.average_bytes,
        "anchor": (reader.last("plan") or {}).get("anchor"),
        "drift": reader.drift,
    }


def _rank(
    reader: RunReader, rank: int, load: RankLoad, recent: Mapping[int, RankLoad], usual_pace: float | None
) -> dict[str, Any]:
    total = sum(one.samples for one in recent.values())
    whole = max(1e-9, sum(load.spent_s.values()))
    last = reader.pulses[rank][-1]
    return {
        "rank": rank,
        "device": reader.devices.get(rank, ""),
        "phase": last.phase,
        "phase_s": round(last.phase_s, 2),
        "share": load.samples / total if total else None,
        "rate": load.samples / load.present_s if load.present_s > 0 else None,
        "pace": load.pace or usual_pace,
        "parts": {name: round(seconds / whole, 4) for name, seconds in load.spent_s.items() if seconds > 0},
        "waited": round(min(1.0, load.waited_s / whole), 4),
        "condition": dict(reader.condition(rank)),
    }


def _lane(pulses: Sequence[Pulse], now_s: float) -> list[list[Any]]:
    """For each pulse of the last minute: its end, its length, and its phases with their seconds."""
    newest = since(pulses[-MAX_LANE_PULSES:], now_s - LANE_S)
    return [
        [
            round(pulse.end_s, 2),
            round(pulse.seconds, 3),
            {name: round(seconds, 3) for name, seconds in pulse.spent_s.items() if seconds >= 0.0005},
        ]
        for pulse in newest
    ]


def _lane_s(reader: RunReader, now_s: float) -> float:
    """A young run has no minute yet."""
    first_s = min((known[0].start_s for known in reader.pulses.values() if known), default=now_s)
    return min(LANE_S, max(10.0, now_s - first_s))


def _percents(reader: RunReader, rank: int) -> list[tuple[float, float]]:
    pairs = ((float(one["t"]), reader.condition_in(one, rank).get("percent")) for one in reader.readings)
    return [(at_s, float(percent)) for at_s, percent in pairs if isinstance(percent, int | float)]


def _plan(reader: RunReader) -> dict[str, Any] | None:
    event, policy = reader.last("plan", "split", "alone"), reader.last("policy")
    if event is None and policy is None:
        return None
    return {
        "value": None if event is None else event.get("value"),
        "kind": None if event is None else event.get("kind"),
        "reason": None if event is None else event.get("reason"),
        "policy": None if policy is None else policy.get("value"),
        "policy_reason": None if policy is None else policy.get("reason"),
    }


def _reason(reader: RunReader) -> str | None:
    event = reader.last("alone", "policy")
    return None if event is None else str(event.get("reason"))


def _note(event: Mapping[str, Any]) -> dict[str, Any]:
    """A line of the list of events, in words."""
    kind = event["kind"]
    if kind == "epoch end":
        evaluated = f", eval {event['eval']:.4g}" if isinstance(event.get("eval"), int | float) else ""
        loss = f"loss {event['loss']:.4g}" if isinstance(event.get("loss"), int | float) else "no loss"
        words = f"epoch {event.get('epoch', 0) + 1}: {loss}{evaluated}"
    elif kind in ("checkpoint", "resume"):
        words = f"epoch {event.get('epoch', 0) + 1}, {event.get('path', '')}"
    elif kind == "transport":
        words = f"averages go over {event.get('value')}"
    else:
        words = str(event.get("reason") or event.get("value") or "")
    return {"t": event.get("t"), "kind": kind, "words": words, "count": event.get("count")}


def _clock(reader: RunReader, at_s: float) -> str:
    """A time of day where the server runs."""
    return time.strftime("%H:%M:%S", time.localtime((reader.origin_s or 0.0) + at_s))
