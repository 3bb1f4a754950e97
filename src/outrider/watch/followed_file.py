"""Follows a file of JSON lines while another process appends to it or replaces it.

Decides what a line that is not complete yet means: it is read again later. Called by the reader of a run.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

CHUNK_BYTES = 1 << 22
"""Read at most so much at once: an event file of a long run must not hold the page up for seconds."""


class FollowedFile:
    """Call `new_lines()` now and then; a file that was replaced is read from its beginning again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: dict[str, Any] | None = None
        """The first line, once it was read."""
        self._identity: tuple[int, int] | None = None
        self._offset = 0
        self._rest = b""
        self.was_replaced = False
        """Whether the last call began another file: lines of before are no longer valid."""

    def new_lines(self) -> list[dict[str, Any]]:
        """The complete lines since the last call, without the first one; none where the file cannot be read."""
        self.was_replaced = False
        try:
            with self.path.open("rb") as file:
                self._check_identity(file.fileno())
                file.seek(self._offset)
                data = file.read(CHUNK_BYTES)
        except OSError:
            return []
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        found = [decoded for line in lines if (decoded := _decoded(line)) is not None]
        if self.header is None and found:
            self.header = found.pop(0)
        return found

    def _check_identity(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        identity = (status.st_dev, status.st_ino)
        if identity != self._identity or status.st_size < self._offset:
            self.was_replaced = self._identity is not None
            self._identity, self._offset, self._rest, self.header = identity, 0, b"", None


def _decoded(line: bytes) -> dict[str, Any] | None:
    try:
        content = json.loads(line)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def modified_s(path: Path) -> float:
    """When a file was written last; 0 where there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
