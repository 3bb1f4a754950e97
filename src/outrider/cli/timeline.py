"""`outrider timeline`: what happened in a run, as a summary or in files for other tools.

Parses, calls, prints; the timeline is read and written by outrider.timeline. Needs no torch.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.bench.tables import UNKNOWN, number, text_table

if TYPE_CHECKING:
    from outrider.timeline.document import Timeline
    from outrider.timeline.timeline_summary import RankSummary

EPILOG = "Example: outrider timeline runs/20250101-120000-async --export html,perfetto"
WIDTH = 80
_NUM_LINES = 10


def timeline(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    export: Annotated[
        str | None, typer.Option("--export", metavar="FORMATS", help="Write json, csv, html, perfetto into the folder.")
    ] = None,
) -> None:
    """Show what every rank did and waited for, or export it."""
    from outrider.timeline.document import load_timeline
    from outrider.timeline.exports import export as write
    from outrider.timeline.exports import parse_formats

    formats = parse_formats(export) if export is not None else None
    loaded = load_timeline(run)
    if formats is None:
        typer.echo("\n\n".join(_summary(loaded)))
        return
    for path in write(loaded, run, formats):
        typer.echo(str(path))


def _summary(loaded: Timeline) -> Iterator[str]:
    from outrider.timeline.timeline_summary import summarize

    ranks = summarize(loaded)
    yield _heading(loaded)
    yield _work(ranks)
    yield _waits(ranks)
    yield "\n".join(_anchors(loaded))
    yield "\n".join(_gaps(loaded))


def _heading(loaded: Timeline) -> str:
    record = loaded.record
    epochs = record.get("epochs") or []
    facts = [
        f"policy {record.get('policy', UNKNOWN)}",
        f"{len(loaded.devices)} rank{'' if len(loaded.devices) == 1 else 's'}",
        f"{len(epochs)} epoch{'' if len(epochs) == 1 else 's'}",
        f"{loaded.end_s:.1f} s",
        str(record.get("status", "no record")),
    ]
    lines = [textwrap.fill(f"{loaded.name}: {', '.join(facts)}", WIDTH)]
    lines += [textwrap.fill(f"events of rank {rank} are missing: {why}", WIDTH) for rank, why in loaded.missing.items()]
    return "\n".join(lines)


def _work(ranks: Sequence[RankSummary]) -> str:
    headers = ("rank", "device", "batches", "samples", "share", "compute s", "throttled s", "averages", "ms")
    rows = [
        (
            str(rank.rank),
            rank.device,
            str(rank.batches),
            str(rank.samples),
            number(rank.share, ".1%"),
            f"{rank.compute_s:.2f}",
            f"{rank.throttle_s:.2f}" if rank.throttle_s else UNKNOWN,
            str(rank.averages) if rank.averages else UNKNOWN,
            number(rank.average_ms, ".1f"),
        )
        for rank in ranks
    ]
    return text_table(headers, rows, num_names=2)


def _waits(ranks: Sequence[RankSummary]) -> str:
    from outrider.timeline.idle import ALL_CAUSES

    views = [view for rank in ranks for view in ((rank, "recorded", rank.waits_s), (rank, "sampled", rank.gaps_s))]
    rows = [
        (str(rank.rank), name, *(number((seconds or {}).get(cause), ".2f") for cause in ALL_CAUSES))
        for rank, name, seconds in views
    ]
    # All of them fit 80 columns only so.
    causes = [cause.removeprefix("epoch ") for cause in ALL_CAUSES]
    table = text_table(("rank", "idle s", *causes), rows, num_names=2)
    return table + "\nrecorded: waits the ranks measured; sampled: below 5 % for 0.5 s or longer"


def _anchors(loaded: Timeline) -> Iterator[str]:
    from outrider.timeline.timeline_summary import anchor_history

    changes = anchor_history(loaded)
    if not changes:
        yield "anchor: none, this policy has no windows"
        return
    values = [change.after for change in changes]
    yield f"anchor: {values[-1]} at the end, {min(values)} to {max(values)}, {len(changes) - 1} changes"
    lines = [
        f"{change.at_s:9.2f} s  {number(change.before, 'd'):>4} -> {change.after:<4} {change.reason}"
        for change in changes
    ]
    yield from _first(lines, "changes")


def _gaps(loaded: Timeline) -> Iterator[str]:
    if loaded.utilization is None:
        yield "idle gaps: utilization was not sampled in this run"
        return
    yield f"idle gaps: {len(loaded.gaps) or 'none'}"
    lines = [
        f"{gap.start_s:9.2f} s  rank {gap.rank} idle for {gap.seconds:.2f} s: {gap.cause}"
        for gap in sorted(loaded.gaps, key=lambda gap: -gap.seconds)
    ]
    yield from _first(lines, "shorter ones")


def _first(lines: Sequence[str], what: str) -> Iterator[str]:
    """As many as fit a screen, each within its width."""
    for line in lines[:_NUM_LINES]:
        yield line if len(line) <= WIDTH else line[: WIDTH - 2].rstrip() + " …"
    if len(lines) > _NUM_LINES:
        yield f"          and {len(lines) - _NUM_LINES} more {what}"
