"""Makes a diagnosis fit for a public issue: no host name, user name, home folder, address or serial number.

The facts hold none of these by design; paths and error messages may, so the finished text is cleaned too. Called by
`outrider diagnose --report`.
"""

from __future__ import annotations

import getpass
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from outrider._version import __version__
from outrider.machine.diagnose import Diagnosis
from outrider.machine.render import render

_SHORTEST_NAME = 3
"""A user called `a` would take every a with it."""

_PATTERNS: tuple[tuple[str, str], ...] = (
    (r"\b(?:GPU|MIG)-[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b", "<uuid>"),
    (r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b", "<uuid>"),
    (r"\b(?:[0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}\b", "<mac>"),
    (r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.])", "<address>"),
    (r"(?i)\b(serial(?: number)?\s*[:=]\s*)\S+", r"\1<serial>"),
    (r"(/home/|/Users/)[^/\s]+", r"\1<user>"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """Names that must not appear."""

    user: str
    host: str
    home: str


def make_report(diagnosis: Diagnosis, identity: Identity) -> str:
    """A Markdown block to paste into an issue."""
    body = clean(render(diagnosis, paint=_plain), identity)
    return f"### outrider {__version__}, `outrider diagnose --report`\n\n```text\n{body}```\n"


def clean(text: str, identity: Identity) -> str:
    """The text without anything that names a person, a host or one piece of hardware."""
    if identity.home not in ("", "/"):
        text = text.replace(identity.home, "~")
    for pattern, replacement in _PATTERNS:
        text = re.sub(pattern, replacement, text)
    for name, replacement in ((identity.host, "<host>"), (identity.user, "<user>")):
        if len(name) >= _SHORTEST_NAME:
            text = re.sub(rf"(?<![\w<]){re.escape(name)}(?!\w)", replacement, text)
    return text


def this_identity() -> Identity:
    """The names of this user and host."""
    return Identity(user=_known(getpass.getuser), host=socket.gethostname(), home=str(Path.home()))


def _known(ask: Callable[[], str]) -> str:
    try:
        return ask()
    except (KeyError, OSError):
        return ""


def _plain(word: str) -> str:
    return word
