"""Keeps the record of a run up to date while it runs: appends every finished epoch to a file.

Decides how often `record.json` is rewritten: with thousands of short epochs, rewriting it after each would take longer
than training. Called by rank 0; after a crash the epochs are in one of the two files.
"""

from __future__ import annotations

import sys
import time

from outrider.errors import DataError
from outrider.record.run_folder import RunFolder, append, write_text
from outrider.record.run_record import Recorded, write_record
from outrider.timeline.timeline_files import EPOCHS, encoded

RECORD_EVERY_S = 2.0


class EpochLog:
    """Call `begin()` once and `add()` after every epoch; the run writes the final record itself."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._path = folder.path / EPOCHS
        self._written_s = 0.0
        self._has_warned = False

    def begin(self, run: Recorded) -> None:
        """Write the earlier epochs of a resumed run, and the first record."""
        write_text(self._path, b"".join(encoded(epoch) for epoch in run.history).decode())
        self._write_record(run)

    def add(self, run: Recorded) -> None:
        """Append the newest epoch of the run's history."""
        try:
            append(self._path, encoded(run.history[-1]))
            if time.monotonic() - self._written_s >= RECORD_EVERY_S:
                self._write_record(run)
        except DataError as error:
            self._warn(error)

    def _write_record(self, run: Recorded) -> None:
        write_record(self._folder, run, status="running")
        self._written_s = time.monotonic()

    def _warn(self, error: DataError) -> None:
        """Warn once; the disk may stay full for long, and the final record may still succeed."""
        if not self._has_warned:
            self._has_warned = True
            print(f"outrider: {error.message}; training goes on", file=sys.stderr)
