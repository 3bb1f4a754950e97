"""The trackers of a run on rank 0: started with the record, updated every epoch, finished with the run.

Decides which values trackers get, whether a resumed run continues in them, and that a failing tracker fails alone.
`RankLife` calls it; the other ranks have no trackers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError, DataError
from outrider.record.epoch_metrics import RankAccount
from outrider.record.run_folder import SCHEMA_VERSION, RunFolder
from outrider.trackers.tracker import TrackedRun, Tracker, name_of, refuse_missing
from outrider.trackers.tracker_names import make_trackers

FILE = "trackers.json"
"""What each tracker needs to continue in a resumed run."""
_OF_WORLD = ("epoch", "loss", "eval", "learning_rate", "samples_per_s", "averages", "anchor", "drift", "wait_fraction")
_TIMES = ("exposed_average_fraction", "eval_s", "train_s", "wall_s")


class RunTrackers:
    """The trackers of one run; raises here, before training, if a library is missing."""

    def __init__(self, given: Sequence[str | Tracker], *, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._waiting = make_trackers(given)
        self._open: list[Tracker] = []
        for tracker in self._waiting:
            refuse_missing(tracker)

    @property
    def is_empty(self) -> bool:
        return not self._open

    def start(self, folder: RunFolder, *, config: Mapping[str, Any], step: int, continues: Path | None) -> None:
        """`continues` is the folder of the run that this one continues; None in a new run."""
        told = None if continues is None else RunFolder(continues).read_json(FILE)
        kept: dict[str, Mapping[str, str]] = {} if told is None else dict(told["trackers"])
        waiting, self._waiting = self._waiting, []
        for tracker in waiting:
            name = name_of(tracker)
            run = TrackedRun(
                name=folder.path.name, folder=folder.path, config=config, step=step, earlier=kept.get(name)
            )
            try:
                kept[name] = tracker.start(run) or {}
                self._open.append(tracker)
            except ConfigError:
                # Part of the set-up is missing; the user can fix that before hours of training.
                raise
            except Exception as error:
                self._leave_out(tracker, "could not be started", error)
        if waiting:
            self._keep(folder, kept)

    def _keep(self, folder: RunFolder, kept: Mapping[str, Mapping[str, str]]) -> None:
        try:
            folder.write_json(FILE, {"schema_version": SCHEMA_VERSION, "trackers": kept})
        except DataError as error:
            self._warn(f"{error.message}; a resumed run will begin anew in its trackers")

    def log(self, values: Mapping[str, float], step: int) -> None:
        for tracker in list(self._open):
            try:
                tracker.log(values, step)
            except Exception as error:
                self._open.remove(tracker)
                self._leave_out(tracker, f"failed at step {step}", error)

    def finish(self, status: str) -> None:
        ending, self._open = self._open, []
        for tracker in ending:
            try:
                tracker.finish(status)
            except Exception as error:
                self._leave_out(tracker, "could not end its run", error)

    def close(self) -> None:
        """Close trackers however the run ended; after a regular end `finish` has run already."""
        self.finish("failed" if isinstance(sys.exception(), Exception) else "interrupted")

    def _leave_out(self, tracker: Tracker, what: str, error: Exception) -> None:
        """Warn that a tracker failed: training is worth more than its curves."""
        reason = f"{type(error).__name__}: {error}".split("\n")[0]
        self._warn(f"the tracker {name_of(tracker)!r} {what} ({reason}); training goes on without it")


def tracked_values(epoch: Mapping[str, Any], accounts: Sequence[RankAccount], *, samples_seen: int) -> dict[str, float]:
    """The values of an epoch by name: those of the world, then those of each rank; unknown ones are left out."""
    values: dict[str, float | None] = {name: epoch[name] for name in (*_OF_WORLD, *_TIMES)}
    values |= {"samples_seen": samples_seen, "average_ms": _average_ms(accounts)}
    values |= {f"logged/{name}": value for name, value in epoch["logged"].items()}
    for rank, (account, share) in enumerate(zip(accounts, epoch["share_by_rank"], strict=True)):
        own = {**_rank_values(account), "share": share}
        values |= {f"rank{rank}/{name}": value for name, value in own.items()}
    return {name: value for name, value in values.items() if value is not None}


def _rank_values(account: RankAccount) -> dict[str, float | None]:
    return {
        "loss": account.loss_sum / account.loss_samples if account.loss_samples else None,
        "samples_per_s": account.samples / account.seconds if account.seconds else None,
        "wait_fraction": account.wait_s / account.seconds if account.seconds else None,
        "average_ms": _average_ms([account]),
        "peak_memory_bytes": account.peak_memory_bytes,
    }


def _average_ms(accounts: Sequence[RankAccount]) -> float | None:
    """Compute time that one average cost, without waits for other ranks."""
    averages = sum(account.averages for account in accounts)
    return sum(account.average_cost_s for account in accounts) / averages * 1e3 if averages else None
