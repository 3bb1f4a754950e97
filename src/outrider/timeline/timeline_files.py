"""The files of a timeline: JSON lines that a rank appends during the run, and files that are written atomically.

Decides how lines survive a crash and how errors name their file. Called by the recorder, the exporters and all readers
of a run folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from outrider.errors import DataError

RECORD, EPOCHS = "record.json", "epochs.jsonl"


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Convert an OSError of a write to an error that names the file."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno else str(error)
        raise DataError(f"cannot write {path}: {reason}", hint="free some space there, or write elsewhere") from error


def write_text(path: Path, text: str) -> None:
    """Write to a temporary name, then rename, so that readers see a complete old or new file."""
    write_pieces(path, [text.encode()])


def write_pieces(path: Path, pieces: Iterable[bytes]) -> None:
    """Like `write_text`, for a file that is written in pieces."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with explained(path):
        try:
            with temporary.open("wb") as file:
                file.writelines(pieces)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def read_record(folder: Path) -> dict[str, Any] | None:
    """Read the record of a run with all finished epochs; None without a record.

    Epochs are appended to a separate file, and added to `record.json` every few seconds and at the end.
    """
    path = folder / RECORD
    if not path.is_file():
        return None
    record = read_json(path)
    epochs = record.get("epochs")
    if isinstance(epochs, list):
        record["epochs"] = epochs + read_lines(folder / EPOCHS)[len(epochs) :]
    return record


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the objects of a file of JSON lines, up to an incomplete line; empty without a file."""
    found: list[dict[str, Any]] = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return found
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file of a run; the error for a damaged file names it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"{path} is damaged: {error}", hint="the run has to be made again") from error
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno else str(error)
        raise DataError(f"cannot read {path}: {reason}", hint="pass the folder of a run that you may read") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} is damaged: not a JSON object", hint="the run has to be made again")
    return content


FLUSH_EVERY_S = 0.25
_MAX_WAITING = 1_000


class LineFile:
    """Writes JSON lines a few times a second, from its own thread; `close()` writes the rest."""

    def __init__(self, path: Path, *, what: str, before_write: Callable[[], None] = lambda: None) -> None:
        """`what` describes the lines in warnings; `before_write` is called before every write and may add lines."""
        self.path = path
        self._what = what
        self.problem: str | None = None
        """The reason why writing has ended."""
        self._waiting: list[Any] = []
        self._before_write = before_write
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._ended = threading.Event()
        self._file: BinaryIO | None = None
        self._thread = threading.Thread(target=self._run, name="outrider-events", daemon=True)

    def open(self, header: Mapping[str, Any], lines: Sequence[Any] = ()) -> None:
        """Start a new file with these lines; keeps the file of an earlier start as `rank<i>.previous.jsonl`."""
        with self._refusals():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.is_file():
                os.replace(self.path, self.path.with_suffix(".previous.jsonl"))
            self._file = self.path.open("wb", buffering=0)
        for line in (header, *lines):
            self.add(line)
        self.flush()
        self._thread.start()

    def add(self, line: Any) -> None:
        with self._lock:
            self._waiting.append(line)
        if len(self._waiting) >= _MAX_WAITING:
            self._write()

    def flush(self) -> None:
        """Write the pending lines; the thread also calls this, so that even a hung rank writes its last lines."""
        self._before_write()
        self._write()

    def close(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self.flush()
        with self._writing, self._refusals():
            file, self._file = self._file, None
            if file is not None:
                file.close()

    def _run(self) -> None:
        while not self._ended.wait(FLUSH_EVERY_S):
            self.flush()

    def _write(self) -> None:
        with self._writing:
            with self._lock:
                lines, self._waiting = self._waiting, []
            if self._file is None or not lines:
                return
            data = memoryview(b"".join(encoded(line) for line in lines))
            with self._refusals():
                while data:
                    data = data[self._file.write(data) :]

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        """End the recording, but not the training, if the disk refuses a write, for example because it is full."""
        try:
            yield
        except OSError as error:
            reason = os.strerror(error.errno).lower() if error.errno else str(error)
            self.problem = f"cannot write {self.path}: {reason}"
            file, self._file = self._file, None
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()
            print(f"outrider: {self.problem}; training goes on without recording {self._what}", file=sys.stderr)


def encoded(value: Any) -> bytes:
    """Encode a value as a JSON line; objects without a JSON form become their names, infinities and NaN become null."""
    try:
        text = _ENCODE(value)
    except ValueError:
        text = _ENCODE(finite(value))
    return text.encode() + b"\n"


_ENCODE = json.JSONEncoder(separators=(",", ":"), default=str, allow_nan=False).encode


def finite(value: Any) -> Any:
    """Replace infinities and NaN, which JSON cannot represent, by null."""
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
