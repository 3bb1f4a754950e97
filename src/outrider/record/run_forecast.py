"""Compares the forecast of a run with its measurement: the receipt of `outrider advise`.

Decides where forecasts are stored, which one belongs to a run, and how the error is computed. `outrider advise` stores
them; the record of every run has the newest one that matches it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from outrider.record.run_folder import RunFolder, make_folder, write_text
from outrider.timeline.same_work import AVERAGE_OPTIONS, STEP_OPTIONS

FORECAST = "forecast.json"
ADVICE = Path("runs") / "advice"
"""Folder of forecasts, under the working folder beside the runs."""
SPEED_OPTIONS = (*STEP_OPTIONS, *AVERAGE_OPTIONS)
"""A forecast applies to runs in which these options are equal."""


def keep_advice(document: Mapping[str, Any], *, folder: Path | None = None) -> Path:
    """Store the forecasts of `outrider advise` for later runs in this working folder."""
    parent = folder or Path.cwd() / ADVICE
    make_folder(parent)
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S-%f")
    path = parent / f"{stamp}.json"
    write_text(path, json.dumps(document, separators=(",", ":"), default=str) + "\n")
    return path


def find_forecast(run: Mapping[str, Any], *, folder: Path | None = None) -> dict[str, Any] | None:
    """The newest forecast for a run, described by policy, devices, num_samples, parameters and options."""
    for path in sorted((folder or Path.cwd() / ADVICE).glob("*.json"), reverse=True):
        document = _read(path)
        if document is None or not _is_for(document, run):
            continue
        cell = _cell(document["forecasts"], run["policy"], run["devices"])
        if cell is not None:
            return {"advice": str(path), **cell}
    return None


def open_receipt(folder: RunFolder, run: Mapping[str, Any]) -> None:
    """Copy the forecast of a run, if any, to its folder at the start of the run."""
    forecast = find_forecast(run)
    if forecast is not None:
        folder.write_json(FORECAST, forecast)
    else:
        # The forecast of an earlier run in this folder does not apply to this run.
        (folder.path / FORECAST).unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Any] | None:
    """Read a forecast; None if the file is unreadable, which must not keep a run from training."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    needed = ("workload", "forecasts", "parameters")
    return document if isinstance(document, dict) and all(name in document for name in needed) else None


def _is_for(document: Mapping[str, Any], run: Mapping[str, Any]) -> bool:
    work = document["workload"]
    # Compare both in JSON form, which has no tuples.
    mine, theirs = json.loads(json.dumps(dict(run["options"]), default=str)), work["options"]
    return (
        document["parameters"] == run["parameters"]
        and work["num_samples"] == run["num_samples"]
        and all(mine.get(name) == theirs.get(name) for name in SPEED_OPTIONS)
    )


def _cell(cells: Sequence[dict[str, Any]], policy: str, devices: Sequence[str]) -> dict[str, Any] | None:
    """The matching forecast, if any; a single device has one forecast for all policies."""
    names = list(devices)
    return next((c for c in cells if c["devices"] == names and (c["policy"] == policy or len(names) == 1)), None)


def receipt(folder: RunFolder, totals: Mapping[str, Any]) -> dict[str, Any] | None:
    """The forecast of a run with its measurement; None for a run without a forecast."""
    forecast = folder.read_json(FORECAST)
    if forecast is None:
        return None
    expected, measured = forecast["samples_per_s"], totals["samples_per_s"]
    return {
        "advice": forecast["advice"],
        "samples_per_s": expected,
        "measured_samples_per_s": measured,
        "error": None if not measured else expected / measured - 1,
    }
