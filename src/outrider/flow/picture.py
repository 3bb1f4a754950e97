"""Writing a picture of a graph to a file; the end of the file's name says which kind.

Decides the kind, not the look. Called by `Graph.draw`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from outrider.errors import ConfigError
from outrider.flow.diagram import Diagram, diagram_of
from outrider.flow.profile import Profile
from outrider.flow.svg import to_svg
from outrider.flow.text import to_dot, to_mermaid
from outrider.flow.wired import Wired

_WRITERS: dict[str, Callable[[Diagram], str]] = {".svg": to_svg, ".mmd": to_mermaid, ".dot": to_dot}


def draw_to(path: Path, graph: Wired, profile: Profile | None) -> Path:
    """Write the picture and return its path."""
    if path.suffix not in _WRITERS:
        raise ConfigError(
            f"cannot draw a {path.suffix or 'file without an ending'}: {path}",
            hint=f"use one of {', '.join(_WRITERS)}",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_WRITERS[path.suffix](diagram_of(graph, profile)), encoding="utf-8")
    return path
