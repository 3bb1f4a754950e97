"""The records of many runs in one small file: what is the same in all of them once, then a line for each.

    python benchmarks/records.py RUNS FILE.jsonl

Numbers keep six digits, epochs become columns; timelines stay behind.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ONCE = ("schema_version", "environment")
OF_EPOCH = (
    "eval",
    "loss",
    "seconds",
    "train_s",
    "share_by_rank",
    "averages",
    "anchor",
    "exposed_average_fraction",
    "wait_fraction",
    "peak_memory_bytes_by_rank",
)


def line(record: dict[str, Any]) -> dict[str, Any]:
    epochs = record["epochs"]
    return {
        "started_at": record["started_at"],
        "case": record["benchmark"]["case"],
        "epochs": {name: [epoch[name] for epoch in epochs] for name in OF_EPOCH},
        "totals": record["totals"],
        "waits_s": record["idle"]["waits_s"],
    }


def small(value: Any) -> Any:
    """Without what is nothing, and with no more digits than anybody reads."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: small(part) for key, part in value.items() if not is_nothing(part)}
    return [small(part) for part in value] if isinstance(value, list) else value


def is_nothing(value: Any) -> bool:
    return all(map(is_nothing, value)) if isinstance(value, list) else value in (None, 0, {})


def main() -> None:
    runs, target = Path(sys.argv[1]), Path(sys.argv[2])
    records = [json.loads(path.read_text()) for path in sorted(runs.rglob("record.json"))]
    finished = [record for record in records if record["status"] == "finished"]
    assert finished, f"no finished run in {runs}"
    once = {key: finished[0][key] for key in ONCE}
    for record in finished:
        differing = [key for key in ONCE if record[key] != once[key]]
        assert not differing, f"{record['started_at']}: {differing} differ from the first run's"
    lines = [once, *map(line, finished)]
    target.write_text("".join(f"{json.dumps(small(one), separators=(',', ':'))}\n" for one in lines))
    print(f"{len(finished)} of {len(records)} runs, {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
