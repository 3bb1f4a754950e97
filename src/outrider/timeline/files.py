"""Files of a run folder as the timeline reads and writes them: whole or not at all, errors with the file's name.

Decides nothing about their content. Called by the exporters, by the page and by the command `outrider timeline`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outrider.errors import DataError


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """The system's refusal to write becomes an error that names the file."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno else str(error)
        raise DataError(f"cannot write {path}: {reason}", hint="free some space there, or write elsewhere") from error


def write_text(path: Path, text: str) -> None:
    """Write beside the target, then move there: a reader sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with explained(path):
        try:
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any]:
    """An object from a file that a run wrote; one that is damaged is named."""
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
