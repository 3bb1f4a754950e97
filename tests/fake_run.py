"""A run folder as ranks write it, made by hand, for tests of the live page."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from outrider.timeline.pulses import Pulse, as_line

PERIOD_S = 0.5
SPENT_S = {"compute": 0.42, "data": 0.02, "average": 0.05, "join": 0.01}


class FakeRun:
    """A run folder that grows on demand."""

    def __init__(self, folder: Path, *, ranks: int = 2, seconds_ago: float = 0.0) -> None:
        self.folder = folder
        self.ranks = ranks
        self.origin_s = time.time() - seconds_ago
        self.ends_s = dict.fromkeys(range(ranks), 0.0)
        for name in ("live", "events"):
            (folder / name).mkdir(parents=True)
        for rank in range(ranks):
            header = {"schema_version": 1, "rank": rank, "world_size": ranks, "origin_s": self.origin_s}
            self.append(f"live/rank{rank}.jsonl", header)
            self.append(f"events/rank{rank}.jsonl", header)
            self.event(rank, kind="ready", device="cpu" if rank == 0 else "cpu@0.5", gpu=None)
        self.append("live/devices.jsonl", {"schema_version": 1, "origin_s": self.origin_s})
        self.record("running")

    def append(self, name: str, line: dict[str, Any]) -> None:
        with (self.folder / name).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def event(self, rank: int, **fields: Any) -> None:
        self.append(f"events/rank{rank}.jsonl", {"t": 1.0, "rank": rank, **fields})

    def record(self, status: str, **fields: Any) -> None:
        record = {
            "schema_version": 1,
            "status": status,
            "policy": "sync",
            "devices": ["cpu", "cpu@0.5"],
            "num_samples": 100_000,
            "options": {"epochs": 4},
            "epochs": [],
            "totals": {},
        }
        temporary = self.folder / ".record"
        temporary.write_text(json.dumps(record | fields))
        temporary.replace(self.folder / "record.json")

    def pulse(self, rank: int, **changes: Any) -> Pulse:
        self.ends_s[rank] += PERIOD_S
        fields: dict[str, Any] = {
            "end_s": self.ends_s[rank],
            "seconds": PERIOD_S,
            "phase": "compute",
            "spent_s": SPENT_S,
            "samples": 320 if rank == 0 else 160,
            "batches": 10,
            "averages": 10,
            "average_s": 0.05,
            "loss_sum": 320 * 2.0 / (1 + self.ends_s[rank]),
            "loss_samples": 320,
        }
        return Pulse(**fields | changes)

    def run_for(self, seconds: float, **changes: Any) -> None:
        """All ranks write pulses; `changes` are those of the last rank."""
        for _ in range(round(seconds / PERIOD_S)):
            for rank in range(self.ranks):
                special = changes if rank == self.ranks - 1 else {}
                self.append(f"live/rank{rank}.jsonl", as_line(self.pulse(rank, **special)))
            devices = {f"rank {rank}": {"percent": 80.0 - rank, "memory_bytes": 10**9} for rank in range(self.ranks)}
            self.append("live/devices.jsonl", {"t": self.ends_s[0], "devices": devices})
