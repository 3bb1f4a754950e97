"""A file of JSON lines that are appended during a run; the file never grows beyond a bound.

Decides when older lines are merged into fewer, coarser lines. A full disk ends the recording, not the training. Called
by the recorder's thread and by the sampler; the live page reads the files.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from outrider.timeline.pulses import thinned
from outrider.timeline.timeline_files import encoded

LIVE = "live"
"""The folder of these files in a run folder."""
MAX_LINES = 4_000
NEWEST_LINES = 1_200
"""The newest lines, which always keep full detail: ten minutes."""

Line = dict[str, Any]


# A damaged file may contain gigabytes without a line end.
_HEADER_BYTES = 4096


def read_header(path: Path) -> dict[str, Any] | None:
    """The first line of such a file; None if there is none."""
    try:
        with path.open("rb") as lines:
            header = json.loads(lines.readline(_HEADER_BYTES))
    except (OSError, ValueError):
        return None
    return header if isinstance(header, dict) else None


class BoundedFile:
    """Appends lines to a bounded file: call `open()`, then `add()` from one thread, then `close()`."""

    def __init__(self, path: Path, *, join: Callable[[Sequence[Line]], Line]) -> None:
        self.path = path
        self._join = join
        self._header: Mapping[str, Any] = {}
        self._lines: list[Line] = []
        self._file: BinaryIO | None = None

    def open(self, header: Mapping[str, Any]) -> None:
        """Start a new file; replaces the file of an earlier start."""
        self._header, self._lines = header, []
        self._guard(self._begin)

    def add(self, line: Line) -> None:
        if self._file is None:
            return
        self._lines.append(line)
        if len(self._lines) > MAX_LINES:
            self._lines = thinned(self._lines, newest=NEWEST_LINES, join=self._join)
            self._guard(self._rewrite)
        else:
            self._guard(lambda: self._append(encoded(line)))

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _begin(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._rewrite()

    def _append(self, data: bytes) -> None:
        assert self._file is not None
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]

    def _rewrite(self) -> None:
        """Write under another name, then rename: readers see the old or the new file, and tell them apart by inode."""
        self.close()
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            temporary.write_bytes(b"".join(map(encoded, [self._header, *self._lines])))
            file = temporary.open("ab", buffering=0)
            os.replace(temporary, self.path)
        finally:
            temporary.unlink(missing_ok=True)
        self._file = file

    def _guard(self, write: Callable[[], object]) -> None:
        try:
            write()
        except OSError as error:
            self.close()
            reason = os.strerror(error.errno).lower() if error.errno else str(error)
            print(f"outrider: cannot write {self.path}: {reason}; the live page stands still", file=sys.stderr)
