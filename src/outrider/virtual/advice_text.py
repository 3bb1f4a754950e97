"""Shows the forecasts of `outrider advise` as text of at most 80 columns.

Decides wording and layout; reads the document from `advice.as_document`. Does not import torch.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

_WIDTH = 80
_MOST_ROWS = 24
_DEVICES_WIDTH = 24
# Short runs of one device differ by up to this much on any machine.
_CALM_SPREAD = 0.05
_ENOUGH_TOLD = 10
"""With fewer steps or averages in a short run, first steps and chance weigh much."""


def as_text(document: Mapping[str, Any]) -> str:
    """The whole text: a line about the work, the table, and the advice."""
    cells = _shown_cells(document["forecasts"], best=document["advice"])
    lines = [_head(document), "", _titles()]
    lines += [_row(cell, is_best=_is_best(cell, document["advice"])) for cell in cells]
    if len(cells) < len(document["forecasts"]):
        hidden = len(document["forecasts"]) - len(cells)
        lines.append(f"  of each choice of devices the fastest; {hidden} more with --json")
    return "\n".join([*lines, "", *_advice(document)])


def _head(document: Mapping[str, Any]) -> str:
    work = document["workload"]
    sampler = work["options"].get("batch_sampler")
    epoch = (
        f"{work['num_samples']:,} samples per epoch in batches of {work['batch_size']:,}"
        if sampler is None
        else f"{work['num_samples']:,} batches of {sampler['name']} per epoch; each counts as one sample"
    )
    return f"{document['parameters']:,} parameters, {epoch}"


def _titles() -> str:
    return f"  {'devices':<{_DEVICES_WIDTH}}{'policy':<10}{'samples/s':>10}{'epoch':>9}{'waits':>16}{'MB':>8}"


def _row(cell: Mapping[str, Any], *, is_best: bool) -> str:
    mark = "*" if is_best else " "
    return (
        f"{mark} {_names(cell['devices']):<{_DEVICES_WIDTH}}{cell['policy']:<10}{_number(cell['samples_per_s']):>10}"
        f"{_seconds(cell['epoch_s']):>9}{_waits(cell):>16}{_memory(cell['memory_bytes']):>8}"
    )


def _names(devices: Sequence[str]) -> str:
    text = ",".join(devices)
    return text if len(text) < _DEVICES_WIDTH else f"{len(devices)} from {devices[0]}"[: _DEVICES_WIDTH - 1]


def _number(value: float) -> str:
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def _seconds(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _waits(cell: Mapping[str, Any]) -> str:
    """The rank that waits most, and how much; a single device does not wait."""
    waits = cell["wait_by_rank"]
    most = max(waits)
    if most < 0.005:
        return "-"
    rank = waits.index(most)
    return f"rank {rank} {most:.0%}"


def _memory(memory_bytes: Sequence[int | None]) -> str:
    """The largest peak memory of any rank, in MB; the JSON document lists all ranks."""
    known = [peak for peak in memory_bytes if peak is not None]
    return f"{max(known) / 1e6:,.0f}" if known else "-"


def _shown_cells(cells: Sequence[Mapping[str, Any]], *, best: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """All cells, or only the fastest for each choice of devices if there are too many."""
    if len(cells) <= _MOST_ROWS:
        return list(cells)
    by_devices: dict[tuple[str, ...], Mapping[str, Any]] = {}
    for cell in cells:
        key = tuple(cell["devices"])
        held = by_devices.get(key)
        is_better = held is None or cell["samples_per_s"] > held["samples_per_s"]
        if _is_best(cell, best) or (is_better and not (held is not None and _is_best(held, best))):
            by_devices[key] = cell
    return list(by_devices.values())


def _is_best(cell: Mapping[str, Any], best: Mapping[str, Any]) -> bool:
    return bool(cell["policy"] == best["policy"] and cell["devices"] == best["devices"])


def _advice(document: Mapping[str, Any]) -> list[str]:
    best, devices = document["advice"], document["devices"]
    alone = max((c for c in document["forecasts"] if len(c["devices"]) == 1), key=lambda c: float(c["samples_per_s"]))
    lines = []
    if len(best["devices"]) == 1:
        lines.append(f"advice: train on {best['devices'][0]} alone")
    else:
        lines.append(f'advice: policy="{best["policy"]}" on {_names(best["devices"])}')
        lines.append(f"        {best['gain']:.2f} times as fast as {alone['devices'][0]} alone")
    if best["left_out"]:
        lines.append(f"        not worth it: {_names(best['left_out'])}{_lost(document)}")
    elif len(devices) > 1:
        slowest = min((c for c in document["forecasts"] if len(c["devices"]) == 1), key=lambda c: c["samples_per_s"])
        lines.append(f"        the slowest device, {slowest['devices'][0]}, is worth it")
    chosen = "" if best["policy"] == "solo" else f', policy="{best["policy"]}"'
    lines += _wrapped(f'set:    devices="{",".join(best["devices"])}"{chosen}')
    spread = document.get("spread") or 0.0
    if spread > _CALM_SPREAD:
        lines.append(f"unsure: the same device differed by {spread:.0%} between two short runs, and so may")
        lines.append("        these numbers; is the machine busy? --seconds 20 measures for longer")
    fewest = document.get("fewest")
    if fewest is not None and fewest < _ENOUGH_TOLD:
        lines.append(f"unsure: steps are slow here, and one short run saw only {fewest} steps or averages;")
        lines.append("        --seconds 20 measures for longer")
    lines.append("samples/s are not what is learned: outrider compare measures time to a target")
    return lines


def _wrapped(line: str) -> list[str]:
    """Wrap a line; a long list of devices continues on the next line, after a comma."""
    if len(line) <= _WIDTH:
        return [line]
    return textwrap.wrap(
        line.replace(",", ", ").replace(",  ", ", "), _WIDTH, subsequent_indent=" " * 8, break_on_hyphens=False
    )


def _lost(document: Mapping[str, Any]) -> str:
    """Compare the best forecast with all devices with the advised one, which leaves some devices out."""
    best, everyone = document["advice"], document["devices"]
    with_all = [c["samples_per_s"] for c in document["forecasts"] if c["devices"] == everyone]
    chosen = [
        c["samples_per_s"]
        for c in document["forecasts"]
        if c["devices"] == best["devices"] and c["policy"] == best["policy"]
    ]
    if not with_all or not chosen:
        return ""
    return f", with it {max(with_all) / max(chosen):.2f} times as fast at best"
