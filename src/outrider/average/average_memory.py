"""Computes the memory that averages take on a rank's device, from the model's layout and before any is allocated.

Decides nothing. `Exchange` and `GradientExchange` allocate this memory. Called before training.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.average.arena import Arena
from outrider.average.outer import Outer
from outrider.average.wire_plan import wire_dtype
from outrider.policy.policy_spec import PolicySpec


@dataclass(frozen=True, kw_only=True, slots=True)
class AverageBytes:
    """Bytes on the device of a rank, in addition to model, gradients and optimizer state."""

    common_point: int = 0
    """The parameters and buffers of the last average."""
    snapshot: int = 0
    """A copy for background averages."""
    velocity: int = 0
    """The velocity of the outer step."""
    rounding: int = 0
    """Rounding errors that an 8-bit wire has not sent yet."""
    gradients: int = 0
    """The gradients that are summed, in addition to the rank's own."""

    @property
    def total(self) -> int:
        return self.common_point + self.snapshot + self.velocity + self.rounding + self.gradients


def average_bytes(
    arena: Arena, policy: PolicySpec, *, outer: Outer, wire: str, world_size: int, in_pieces: bool = False
) -> AverageBytes:
    """Bytes that averages of this model will take; for a policy that changes its kind of steps, those at the start.

    Gradients that are summed `in_pieces` need no copy.
    """
    if world_size == 1:
        return AverageBytes()
    whole = sum(numel * wire_dtype(dtype).itemsize for dtype, numel in arena.layout.totals.items())
    trained = sum(numel * wire_dtype(dtype).itemsize for dtype, numel in arena.parameter_numel.items())
    is_in_background = policy.averages and not (policy.shares_steps or policy.blocks_at_averages)
    return AverageBytes(
        common_point=whole,
        snapshot=whole if is_in_background else 0,
        velocity=trained if outer.has_velocity else 0,
        rounding=trained if wire == "int8" else 0,
        gradients=trained if policy.shares_steps and not in_pieces else 0,
    )
