"""The four policies, each a generator that reads like its algorithm, and the ceiling to measure them against.

`open_policy` turns a policy's name into the generator of one segment; the three drivers call it.
"""

from __future__ import annotations

from outrider.core.effects import Lease, Policy, Seat
from outrider.core.planner import Planner
from outrider.core.policies.asynchronous import asynchronous
from outrider.core.policies.balanced import balanced
from outrider.core.policies.cadence import cadence
from outrider.core.policies.independent import independent
from outrider.core.policies.sync import sync
from outrider.core.split import Splitter

POLICIES = ("sync", "balanced", "cadence", "async", "independent")
SHARED_STEP_POLICIES = ("sync", "balanced")


def open_policy(
    name: str, seat: Seat, span: Lease, *, planner: Planner, splitter: Splitter, max_overshoot: int
) -> Policy:
    """The generator of one segment of an epoch for one rank."""
    match name:
        case "sync":
            return sync(seat, span)
        case "balanced":
            return balanced(seat, splitter, span)
        case "cadence":
            return cadence(seat, planner, span)
        case "async":
            return asynchronous(seat, planner, span, max_overshoot=max_overshoot)
        case "independent":
            return independent(seat, span)
    raise AssertionError(name)


__all__ = ["POLICIES", "SHARED_STEP_POLICIES", "open_policy"]
