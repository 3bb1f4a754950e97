"""The line at the start of a run and the line at its end.

Decides their words and how the gain over one device is measured. `RunTalk` decides whether they are printed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.average.transport.backend_table import BackendChoice
from outrider.record.run_folder import shown_path
from outrider.timeline.document import TIMELINE
from outrider.timeline.timeline_files import read_record

_NAMED_DEVICES = 4
_PAGE = "timeline.html"
_LEAST_REST = 0.05


def start_line(devices: Sequence[str], *, policy: str, learning: str | None, folder: Path) -> str:
    """The line at the start: devices, policy and its reason, changes to learning, run folder; one device: no policy."""
    parts = [_names(devices)]
    if len(devices) > 1:
        parts += [policy, *([learning] if learning else [])]
    return "; ".join([*parts, str(shown_path(folder))])


def wrap_line(devices: Sequence[str], *, backend: BackendChoice) -> str:
    """The line of `wrap()`: devices, and what averages them; no policy decides, and no run folder is written."""
    if len(devices) == 1:
        return devices[0]
    return f"{_names(devices)}; averages by hand; backend {backend.backend} ({backend.reason})"


def _names(devices: Sequence[str]) -> str:
    if len(devices) <= _NAMED_DEVICES:
        return ", ".join(devices)
    named = _NAMED_DEVICES - 1
    return f"{', '.join(devices[:named])} and {len(devices) - named} more"


def end_line(folder: Path) -> str | None:
    """The line at the end: gain over the fastest device, waiting time, timeline; None without a finished epoch."""
    record = read_record(folder)
    if record is None or not record["epochs"] or record["totals"]["samples_per_s"] is None:
        return None
    page = folder / (_PAGE if (folder / _PAGE).is_file() else TIMELINE)
    return f"{_result(record)}{_receipt(record)}; {shown_path(page)}"


def _receipt(record: Mapping[str, Any]) -> str:
    """The earlier forecast of `outrider advise`, or an empty text if there is none."""
    forecast = record.get("forecast")
    if forecast is None or forecast["error"] is None:
        return ""
    measured, expected = forecast["measured_samples_per_s"], forecast["samples_per_s"]
    return f"; forecast {expected:,.0f} samples/s, measured {measured:,.0f} ({forecast['error']:+.0%})"


def _result(record: Mapping[str, Any]) -> str:
    totals, own = record["totals"], own_speeds(record)
    if len(record["devices"]) == 1 or own is None:
        return f"{totals['samples_per_s']:,.0f} samples/s"
    fastest = max(own)
    device = record["devices"][own.index(fastest)]
    rested = _rested(record)
    waited = max(0.0, totals["wait_fraction"] - sum(rested) / len(rested))
    gain = f"{totals['samples_per_s'] / fastest:.2f}x {device}'s speed"
    return f"{gain}, waited {waited:.0%}{_rest_words(record, rested)}"


def _rested(record: Mapping[str, Any]) -> list[float]:
    """The fraction of time in which each device left whole batches to other devices."""
    train_s = record["totals"]["train_s"]
    return [min(1.0, waits.get("rest", 0.0) / train_s) if train_s else 0.0 for waits in record["idle"]["waits_s"]]


def _rest_words(record: Mapping[str, Any], rested: Sequence[float]) -> str:
    """Name the devices that rested for a noticeable time: they cost nothing and gain nothing."""
    told = [(device, part) for device, part in zip(record["devices"], rested, strict=True) if part >= _LEAST_REST]
    if not told:
        return ""
    name = told[0][0] if len(told) == 1 else f"{len(told)} devices"
    return f", {name} rested {sum(part for _, part in told) / len(told):.0%}"


def own_speeds(record: Mapping[str, Any]) -> list[float] | None:
    """Samples per second of each device while it computed, excluding waits and the cost of averages.

    None if the waits of a rank are not known, for example those before the checkpoint of a resumed run.
    """
    # Older records name the option only, which "auto" may not have used.
    if record.get("resumed_from", record.get("options", {}).get("resume")) is not None:
        return None
    epochs, waits_s = record["epochs"], (record.get("idle") or {}).get("waits_s") or []
    num_ranks = len(record["devices"])
    if len(waits_s) != num_ranks or any(waits is None for waits in waits_s):
        return None
    train_s = record["totals"]["train_s"] * (1 - record["totals"]["exposed_average_fraction"])
    speeds = []
    for rank, waits in enumerate(waits_s):
        samples = sum(epoch["samples"] * epoch["share_by_rank"][rank] for epoch in epochs)
        computed_s = train_s - waits.get("average", 0.0) - waits.get("rest", 0.0)
        speeds.append(samples / computed_s if computed_s > 0 else 0.0)
    return speeds if max(speeds) > 0 else None
