"""Where the files of a data set lie on this machine.

Decides the order of places: the directory given, $OUTRIDER_DATA, the user's cache. Reads and downloads nothing.
Called by `source.locate`, which downloads or falls back to a stand-in where it finds nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from outrider.errors import ConfigError, nearest

# Files by which the folder of a data set is known; any one of them will do.
_MARKERS = {
    "mnist": ("train-images-idx3-ubyte.gz", "train-images-idx3-ubyte"),
    "cifar10": ("data_batch_1.bin", "cifar-10-binary.tar.gz"),
    "shakespeare": ("input.txt",),
}
# The folder that an archive unpacks to.
_UNPACKED = {"cifar10": "cifar-10-batches-bin"}


def find_data(name: str, directory: str | Path | None = None) -> Path | None:
    """The folder that holds the data set's files, or None; each place may be that folder or the one above it."""
    if name not in _MARKERS:
        close = nearest(name, _MARKERS)
        raise ConfigError(
            f"no data set is called {name!r}, known are: {', '.join(_MARKERS)}",
            hint=f"did you mean {close!r}?" if close else "pick one of the known names",
        )
    for place in _places(directory):
        for folder in _folders(place, name):
            if any((folder / marker).is_file() for marker in _MARKERS[name]):
                return folder
    return None


def cache_directory() -> Path:
    """Where this user's downloads belong on this platform."""
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "outrider"


def _places(directory: str | Path | None) -> Iterator[Path]:
    if directory is not None:
        yield Path(directory).expanduser()
    if named := os.environ.get("OUTRIDER_DATA"):
        yield Path(named).expanduser()
    yield cache_directory()


def _folders(place: Path, name: str) -> Iterator[Path]:
    for folder in (place / name, place):
        if name in _UNPACKED:
            yield folder / _UNPACKED[name]
        yield folder
