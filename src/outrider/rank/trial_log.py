"""Writes the reports of a short run that `outrider advise` measures, with the time of each.

Decides the format of the file, one per rank. It holds reports as they are and computes nothing from them. `RankLife`
calls it; `virtual.trial_reports` reads it. A failed write ends the run, which is only a measurement.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from outrider.policy.effects import AverageReport

SCHEMA_VERSION = 1
FOLDER = "trial"
_FLUSH_EVERY_S = 0.25


class TrialLog:
    """The file of one rank: rank 0 writes the reports, every rank its peak memory at the end."""

    def __init__(self, folder: Path, *, rank: int) -> None:
        self._rank = rank
        path = folder / FOLDER / f"rank{rank}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8")
        self._flushed_s = 0.0
        self._write({"schema_version": SCHEMA_VERSION, "rank": rank})

    def saw(self, kind: str, report: AverageReport, *, seen: int, num_bytes: int, parameters: int) -> None:
        """Write a report; `seen` counts samples of the run before this epoch, `num_bytes` is what an average sends."""
        if self._rank != 0:
            return
        ranks = [
            {
                "samples": facts.samples,
                "batches": facts.batches,
                "compute_ms": round(facts.compute_ms, 4),
                "exposed_ms": round(facts.exposed_ms, 4),
                "waited_ms": round(facts.waited_ms, 4),
                "average_ms": round(facts.average_ms, 4),
                "setup_ms": round(facts.setup_ms, 4),
            }
            for facts in report.ranks
        ]
        now_s = time.perf_counter()
        self._write(
            {
                "t": round(now_s, 6),
                "kind": kind,
                "seen": seen,
                "bytes": num_bytes,
                "parameters": parameters,
                "ranks": ranks,
            }
        )
        if now_s - self._flushed_s >= _FLUSH_EVERY_S:
            self._flushed_s = now_s
            self._file.flush()

    def close(self, peak_memory_bytes: int | None) -> None:
        if not self._file.closed:
            self._write({"peak_memory_bytes": peak_memory_bytes})
            self._file.close()

    def _write(self, line: dict[str, object]) -> None:
        self._file.write(json.dumps(line) + "\n")
