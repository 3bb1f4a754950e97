"""Tensors inside tuples, lists and dicts: visiting and replacing the leaves, since a module may return any of these.

Decides nothing about tensors themselves; used by states, shapes and profiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def map_leaves(change: Callable[[Any], Any], tree: Any) -> Any:
    """The same tree with every leaf replaced."""
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_leaves(change, branch) for branch in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(map_leaves(change, branch) for branch in tree)
    if isinstance(tree, dict):
        return {key: map_leaves(change, branch) for key, branch in tree.items()}
    return change(tree)


def leaves(tree: Any) -> Iterator[Any]:
    """Every leaf, in order."""
    if isinstance(tree, list | tuple):
        for branch in tree:
            yield from leaves(branch)
    elif isinstance(tree, dict):
        for branch in tree.values():
            yield from leaves(branch)
    else:
        yield tree
