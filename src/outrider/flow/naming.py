"""Names of nodes: a label, else the first tag, else the kind and a number; parameters follow them.

Decides which names are possible; duplicates are `resolve`'s business, which calls this.
"""

from __future__ import annotations

import keyword

from torch import nn

from outrider.flow.blocks import function_name
from outrider.flow.draft import Draft, Fault, Script

_ATTRIBUTES = frozenset({"states", "plan", "shapes", "training", "self"})
"""What a graph holds besides its nodes."""


def names_of(script: Script) -> list[str]:
    """The name of every draft, in order; generated names avoid those that were given."""
    given = {name for draft in script.drafts for name in (draft.label, *draft.tags) if name} | set(script.inputs)
    counts: dict[str, int] = {}
    return [_given_name(draft) or _next_name(_stem(draft), counts, given) for draft in script.drafts]


def fault_of_name(name: str, graph_class: type[nn.Module]) -> Fault | None:
    """Why a name cannot be given to a point of a graph."""
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_"):
        return Fault("is not a name", "use letters, digits and underscores, beginning with a letter")
    if hasattr(graph_class, name) or name in _ATTRIBUTES:
        return Fault("is the name of something every graph has", f"choose another, such as {name + '_1'!r}")
    return None


def _given_name(draft: Draft) -> str | None:
    return draft.label or (str(draft.tags[0]) if draft.tags else None)


def _next_name(stem: str, counts: dict[str, int], taken: set[str]) -> str:
    while True:
        counts[stem] = counts.get(stem, 0) + 1
        name = f"{stem}_{counts[stem]}"
        if name not in taken:
            return name


def _stem(draft: Draft) -> str:
    """The kind of node; for a plain module, its class."""
    if draft.kind not in ("through", "fork"):
        return draft.kind
    module = draft.parts[""]
    if isinstance(module, Script):
        return "flow"
    name = type(module).__name__ if isinstance(module, nn.Module) else function_name(module)
    return name.lower() if name.isidentifier() else "call"
