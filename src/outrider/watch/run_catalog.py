"""The runs that a live page can show: one folder of a run, or all runs in a folder.

Decides what counts as a run, which one is shown first, and reads each at most once a second for all pages. Called by
the server.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from outrider.errors import DataError
from outrider.timeline.bounded_file import LIVE
from outrider.timeline.recorder import EVENTS
from outrider.timeline.timeline_files import RECORD, encoded
from outrider.watch.ceiling import CeilingSearch
from outrider.watch.followed_file import modified_s
from outrider.watch.run_reader import RunReader
from outrider.watch.run_view import view

REFRESH_S = 0.9
MAX_RUNS = 50
MAX_READERS = 8
"""Runs that are kept in memory."""
_FILES = (RECORD, f"{LIVE}/rank*.jsonl", f"{EVENTS}/rank*.jsonl")


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run."""
    return any(next(folder.glob(name), None) is not None for name in _FILES) or _is_configured(folder)


def _is_configured(folder: Path) -> bool:
    """Whether the folder has the configuration of a run whose ranks are being started, not another `config.json`."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "schema_version" in config and "devices" in config


class RunCatalog:
    """The runs of one folder, by name."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise DataError(
                f"no folder {folder}", hint="pass the folder of a run, such as runs/<time>-<policy>, or one of runs"
            )
        self._folder = folder
        self._is_one = False
        self._readers: dict[str, RunReader] = {}
        self._texts: dict[str, tuple[float, str]] = {}
        self._ceilings: CeilingSearch | None = None

    def names(self) -> list[str]:
        """The newest run first."""
        # The folder of a session is empty until its loop begins.
        self._is_one = self._is_one or is_run(self._folder)
        if self._is_one:
            return [self._folder.resolve().name]
        try:
            found = [path for path in self._folder.iterdir() if is_run(path)]
        except OSError:
            return []
        return [path.name for path in sorted(found, key=_touched_s, reverse=True)[:MAX_RUNS]]

    def text(self, name: str | None, *, is_fresh: bool = False) -> str | None:
        """The view of a run as JSON, the newest run's without a name; None where there is no such run."""
        names = self.names()
        chosen = name if name is not None else next(iter(names), None)
        # Only names that were listed are looked up: nothing outside the folder can be asked for.
        if chosen is None or (chosen not in names and chosen not in self._readers):
            return None
        read_s, text = self._texts.get(chosen, (0.0, ""))
        if is_fresh or not text or time.monotonic() - read_s >= REFRESH_S:
            text = self._read(chosen, names)
            self._texts[chosen] = (time.monotonic(), text)
        return text

    def _read(self, name: str, names: list[str]) -> str:
        reader = self._reader(name)
        reader.refresh()
        if self._ceilings is None:
            self._ceilings = CeilingSearch(self._folder.resolve().parent if self._is_one else self._folder)
        ceiling = self._ceilings.of(name, reader.record)
        content: dict[str, Any] = view(reader, ceiling=ceiling) | {"names": names}
        return encoded(content).decode().rstrip()

    def _reader(self, name: str) -> RunReader:
        if name not in self._readers:
            while len(self._readers) >= MAX_READERS:
                oldest = next(iter(self._readers))
                del self._readers[oldest]
                self._texts.pop(oldest, None)
            self._readers[name] = RunReader(self._folder if self._is_one else self._folder / name)
        return self._readers[name]


def _touched_s(folder: Path) -> float:
    """When a run wrote something last."""
    stamps = [folder / RECORD, folder / LIVE / "rank0.jsonl", folder]
    return max((modified_s(path) for path in stamps), default=0.0)
