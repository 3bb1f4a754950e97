"""Official files of data sets, checked by their MD5 whenever they are read.

Decides whether a file is the official one and what is said where it is not. Looks for and downloads nothing.
Called by the readers of the data sets.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from outrider.errors import DataError


def read_checked(path: Path, expected_md5: str) -> bytes:
    """The whole content of a file that must have this MD5."""
    content = path.read_bytes()
    check(content, expected_md5, name=str(path))
    return content


def check(content: bytes, expected_md5: str, *, name: str) -> None:
    if md5(content) != expected_md5:
        raise not_official(name, expected_md5, md5(content))


def md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def not_official(name: str, expected_md5: str, found_md5: str) -> DataError:
    return DataError(
        f"{name} is not the official file: expected MD5 {expected_md5}, found {found_md5}",
        hint="the download may be cut short; fetch the file again",
    )
