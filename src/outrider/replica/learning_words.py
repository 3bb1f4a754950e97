"""Describes what a run changes about learning: a scaled learning rate, or an outer step that the user did not write.

Decides only the wording. The ranks report it at the start of a run.
"""

from __future__ import annotations

from typing import Literal

from outrider.replica.averaging_compensation import Compensation

_KINDS = {"nesterov": "Nesterov", "slowmo": "SlowMo"}


def learning_words(compensation: Compensation, *, lr_scale: float | Literal["auto"]) -> str | None:
    """The changes, and how to switch them off; None if the user's learning rate and steps are unchanged."""
    if compensation.follows_ranks:
        return "learning rate scaled by the effective number of ranks (lr_scale=1.0: off)"
    changes = []
    if lr_scale == "auto":
        changes.append('learning rate unchanged by lr_scale="auto"')
    elif lr_scale != 1.0:
        changes.append(f"learning rate x {lr_scale:g} (lr_scale=1.0: off)")
    if compensation.outer.kind != "none":
        changes.append(f'outer {_KINDS[compensation.outer.kind]} step (outer="none": off)')
    return ", ".join(changes) or None


def joined_words(*parts: str | None) -> str | None:
    """Join parts of the line at the start of a run; None if there are none."""
    return "; ".join(part for part in parts if part) or None
