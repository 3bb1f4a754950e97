"""The records of many runs in one small file, and back: what is the same in all of them once, then a line for each.

    python benchmarks/records.py RUNS FILE.jsonl    # finished runs into a file
    python benchmarks/records.py FILE.jsonl RUNS    # a file into folders, for `outrider bench report RUNS`

Numbers keep six digits, epochs become columns, those that never change a single value; timelines stay behind. Several
files may go into the same RUNS.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

from outrider.bench.suite.runs import case_from_json

ONCE = ("schema_version", "environment")
# What stands for a column that is not there.
OF_EPOCH = {
    "eval": None,
    "loss": None,
    "seconds": 0.0,
    "train_s": 0.0,
    "wall_s": None,
    "share_by_rank": (),
    "averages": 0,
    "anchor": None,
    "exposed_average_fraction": None,
    "wait_fraction": None,
    "peak_memory_bytes_by_rank": (),
}
# And for what a case and its subject leave out.
CASE = {"seed": 0, "max_samples": None, "depth": None}
SUBJECT = {"target": None}


def pack(runs: Path, target: Path) -> str:
    records = [json.loads(path.read_text()) for path in sorted(runs.rglob("record.json"))]
    finished = [record for record in records if record["status"] == "finished"]
    assert finished, f"no finished run in {runs}"
    once = {key: finished[0][key] for key in ONCE}
    for record in finished:
        differing = [key for key in ONCE if record[key] != once[key]]
        assert not differing, f"{record['started_at']}: {differing} differ from the first run's"
    lines = [once, *map(line, finished)]
    target.write_text("".join(f"{json.dumps(small(one), separators=(',', ':'))}\n" for one in lines))
    return f"{len(finished)} of {len(records)} runs, {target.stat().st_size:,} bytes"


def line(record: dict[str, Any]) -> dict[str, Any]:
    block = record["benchmark"]
    return {
        "started_at": record["started_at"],
        "case": block["case"],
        "subject": block["subject"],
        "epochs": {name: column([epoch[name] for epoch in record["epochs"]]) for name in OF_EPOCH},
        "totals": record["totals"],
        "measured": block["measured"],
        "note": (record.get("options") or {}).get("note"),
    }


def column(values: list[Any]) -> Any:
    return {"always": values[0]} if values.count(values[0]) == len(values) > 1 else values


def small(value: Any) -> Any:
    """Without what is not known, and with no more digits than anybody reads."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: small(part) for key, part in value.items() if not is_nothing(part)}
    return [small(part) for part in value] if isinstance(value, list) else value


def is_nothing(value: Any) -> bool:
    if isinstance(value, list | dict):
        return all(map(is_nothing, value.values() if isinstance(value, dict) else value))
    return value is None


def unpack(file: Path, runs: Path) -> str:
    once, *lines = map(json.loads, file.read_text().splitlines())
    for one in lines:
        case = CASE | one["case"]
        measured = from_epochs(one) | one.get("measured", {})
        block = {"case": case, "subject": SUBJECT | one["subject"], "measured": measured}
        record = once | {"status": "finished", "started_at": one["started_at"], "totals": one["totals"]}
        record |= {"options": {"note": one.get("note")}}
        folder = runs / case_from_json(case).folder
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / "config.json", {"benchmark": block})
        write(folder / "record.json", record | {"epochs": epochs(one), "benchmark": block})
    return f"{len(lines)} runs"


def epochs(one: dict[str, Any]) -> list[dict[str, Any]]:
    count = one["case"]["epochs"]
    shown = {name: whole(one["epochs"].get(name, {"always": nothing}), count) for name, nothing in OF_EPOCH.items()}
    # Every epoch takes each sample once.
    samples = one["totals"]["samples"] // count
    rows = [dict(zip(shown, values, strict=True)) for values in zip(*shown.values(), strict=True)]
    return [{"epoch": number, "samples": samples, "drift": None} | row for number, row in enumerate(rows)]


def from_epochs(one: dict[str, Any]) -> dict[str, Any]:
    """ms per average and anchors, for files from before records had them: by epochs, not by averages.

    Averages in the background, and those of ranks that rest, took another time than what ranks waited for them.
    """
    rows = epochs(one)
    averages = sum(row["averages"] for row in rows)
    exposed = [row["exposed_average_fraction"] for row in rows]
    found: dict[str, Any] = {}
    is_waited_for = not one["case"]["mode"].endswith(("async", "balanced"))
    if averages and is_waited_for and None not in exposed and any(exposed):
        taken_s = sum(part * row["seconds"] for part, row in zip(exposed, rows, strict=True))
        found["average_ms"] = round(taken_s * 1e3 / averages, 4)
    anchors = [row["anchor"] for row in rows if row["anchor"] is not None]
    if anchors:
        found["anchors"] = [anchor for anchor, _ in itertools.groupby(anchors)]
    return found


def whole(values: list[Any] | dict[str, Any], count: int) -> list[Any]:
    return values if isinstance(values, list) else [values["always"]] * count


def write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content))


def main() -> None:
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    print(unpack(source, target) if source.is_file() else pack(source, target))


if __name__ == "__main__":
    main()
