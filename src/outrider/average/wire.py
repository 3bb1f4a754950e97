"""Decides the layout and the arithmetic of one summed buffer: displacements, mean, new common point, correction.

Does not know facts, ranks or streams: every operation runs on the current stream. Called by Exchange.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.average.arena import Arena, NormPair
from outrider.average.optimizer_state import OptimizerArena
from outrider.average.outer import Outer

# A sum is folded down to this many numbers on the device and finished exactly on the host.
NUM_PARTS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A piece of an arena and where it lies in the body of the wire."""

    source: Tensor
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.source.numel()

    def of(self, body: Tensor) -> Tensor:
        return body[self.start : self.stop]


@dataclass(frozen=True, kw_only=True, slots=True)
class WirePlan:
    """What travels in one buffer: parameters first, then float buffers, then optimizer state."""

    dtype: torch.dtype
    sections: tuple[Section, ...]
    num_parameters: int
    num_arena: int
    norms: tuple[NormPair, ...]
    """Running means and variances, as slices of the body."""
    nonnegative: tuple[Section, ...]
    """Variances and second moments: never to be corrected below zero."""

    @property
    def num_body(self) -> int:
        return self.sections[-1].stop

    @property
    def num_norms(self) -> int:
        return sum(norm.mean.stop - norm.mean.start for norm in self.norms)

    @property
    def num_floors(self) -> int:
        return sum(section.source.numel() for section in self.nonnegative)


def wire_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def plan_wires(arena: Arena, optimizer: OptimizerArena | None) -> list[WirePlan]:
    """At most two: float64 first, which has room for exact facts, then everything else in float32."""
    dtypes = {wire_dtype(dtype) for dtype in [*arena.flats, *(optimizer.flats if optimizer else ())]}
    return [_plan_wire(arena, optimizer, dtype) for dtype in sorted(dtypes, key=lambda d: -d.itemsize)]


def _plan_wire(arena: Arena, optimizer: OptimizerArena | None, dtype: torch.dtype) -> WirePlan:
    flats = {own: flat for own, flat in arena.flats.items() if wire_dtype(own) == dtype}
    heads = [flat[: arena.parameter_numel[own]] for own, flat in flats.items()]
    rests = [flat[arena.parameter_numel[own] :] for own, flat in flats.items()]
    states = [flat for own, flat in optimizer.flats.items() if wire_dtype(own) == dtype] if optimizer else []
    sections = tuple(_line_up([*heads, *rests, *states]))
    num_parameters = sum(head.numel() for head in heads)
    buffers = dict(zip(flats, sections[len(heads) : 2 * len(heads)], strict=True))
    blocks = [block for block in arena.norm_blocks if block.dtype in flats]
    norms = [_shift(block, by=buffers[block.dtype].start - arena.parameter_numel[block.dtype]) for block in blocks]
    variances = [
        Section(source=flats[block.dtype][block.variance], start=norm.variance.start)
        for block, norm in zip(blocks, norms, strict=True)
    ]
    moments = _moments(optimizer, sections[2 * len(heads) :]) if optimizer else []
    return WirePlan(
        dtype=dtype,
        sections=tuple(_coalesce(sections)),
        num_parameters=num_parameters,
        num_arena=num_parameters + sum(rest.numel() for rest in rests),
        norms=tuple(norms),
        nonnegative=tuple(section for section in [*variances, *moments] if section.source.numel()),
    )


def _line_up(sources: list[Tensor]) -> Iterator[Section]:
    start = 0
    for source in sources:
        yield Section(source=source, start=start)
        start += source.numel()


def _moments(optimizer: OptimizerArena, states: tuple[Section, ...]) -> list[Section]:
    """The part of each state that is never negative, which comes first in it."""
    return [
        Section(source=state.source[: optimizer.num_nonnegative[state.source.dtype]], start=state.start)
        for state in states
    ]


def _shift(block: NormPair, *, by: int) -> NormPair:
    """From a place in the flat tensor to the place in the body."""
    return NormPair(
        dtype=block.dtype,
        mean=slice(block.mean.start + by, block.mean.stop + by),
        variance=slice(block.variance.start + by, block.variance.stop + by),
    )


def _coalesce(sections: tuple[Section, ...]) -> Iterator[Section]:
    """Join neighbours of the same memory, so that a model of one dtype is copied in one go."""
    last = sections[0]
    for section in sections[1:]:
        if last.source.numel() == 0:
            last = section
        elif _touches(last.source, section.source):
            joined = last.source.as_strided((last.source.numel() + section.source.numel(),), (1,))
            last = Section(source=joined, start=last.start)
        else:
            yield last
            last = section
    yield last


def _touches(left: Tensor, right: Tensor) -> bool:
    return right.numel() == 0 or (
        left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
        and left.storage_offset() + left.numel() == right.storage_offset()
    )


class Wire:
    """The buffers of one wire; allocated once, used by every average."""

    def __init__(self, plan: WirePlan, *, arena_device: torch.device, device: torch.device, num_slots: int) -> None:
        self.plan = plan
        num_sum = plan.num_body + plan.num_norms
        self.is_bridged = arena_device != device
        self._is_pinned = self.is_bridged and arena_device.type == "cuda"

        def buffer(numel: int) -> Tensor:
            return torch.zeros(numel, dtype=plan.dtype, device=device, pin_memory=self._is_pinned)

        self.summed = buffer(num_sum + num_slots)
        self.slots = self.summed[num_sum:]
        self.snapshot = buffer(plan.num_body)
        self.ref = buffer(plan.num_body)
        self.correction = buffer(plan.num_body + plan.num_floors)
        self.velocity: Tensor | None = None
        self._has_infinities = False
        self._body = self.summed[: plan.num_body]
        self._packed = self.summed[:num_sum]
        self._folds = list(_folds(self.correction[: plan.num_parameters]))
        # On the arena's own device: what goes out and what comes in passes here, so that no compute waits for the host.
        self._bridge = torch.zeros_like(self.correction, device=arena_device) if self.is_bridged else None

    @property
    def parameters(self) -> slice:
        return slice(0, self.plan.num_parameters)

    @property
    def delivered(self) -> Tensor:
        """The correction where the arena is."""
        return self.correction if self._bridge is None else self._bridge

    def stage(self) -> None:
        """Copy the arenas, on their own device: to the snapshot itself, or to the bridge."""
        target = self.snapshot if self._bridge is None else self._bridge
        for section in self.plan.sections:
            section.of(target).copy_(section.source)

    def fetch(self) -> None:
        """Bring the staged copy to the snapshot; in the background of the current stream where memory is pinned."""
        if self._bridge is not None:
            self.snapshot.copy_(self._bridge[: self.snapshot.numel()], non_blocking=self._is_pinned)

    def restart(self) -> None:
        """The snapshot becomes the common point; averaged optimizer state, which no rank shares yet, starts at zero."""
        self.ref.copy_(self.snapshot)
        self.ref[self.plan.num_arena :].zero_()
        # A mask of -inf is common in attention, and -inf less -inf would be no displacement but NaN.
        self._has_infinities = not bool(torch.isfinite(self.ref).all())

    def take_ref(self, ref: Tensor) -> None:
        """A common point that was saved; without its optimizer state where that is laid out otherwise now."""
        kept = self.plan.num_body if ref.numel() == self.plan.num_body else self.plan.num_arena
        self.ref[:kept].copy_(ref[:kept])

    def displace(self) -> None:
        """The displacement since the common point, and the squares of the running means'."""
        torch.sub(self.snapshot, self.ref, out=self._body)
        self._still_where_equal(self._body)
        extra = self.plan.num_body
        for norm in self.plan.norms:
            mean = self._body[norm.mean]
            torch.mul(mean, mean, out=self.summed[extra : extra + mean.numel()])
            extra += mean.numel()

    def squares(self) -> tuple[Tensor, Tensor]:
        """‖d‖² and ‖u‖² of the parameters, between displace and scale."""
        norm = torch.linalg.vector_norm  # not dot: a BLAS brings threads of its own into the worker
        return norm(self.summed[self.parameters]).square_(), norm(self.snapshot[self.parameters]).square_()

    def scale(self, samples: int) -> None:
        """Weigh by samples; without samples it is zero whatever the values are."""
        if samples:
            self._packed.mul_(samples)
        else:
            self._packed.zero_()

    def apply(self, *, total: Tensor, is_moving: Tensor, concentration: Tensor, outer: Outer, parts: Tensor) -> None:
        """From the sum to the new common point; `parts` receives the parts of ‖mean_delta‖²."""
        # Times the reciprocal: a division costs three times as much.
        delta = self._packed.mul_(total.reciprocal())
        self._merge_variances(delta)
        self._fold_squares(delta[self.parameters], parts)
        outer.step(
            self.ref[self.parameters],
            delta[self.parameters],
            self.velocity,
            is_moving=is_moving,
            concentration=concentration,
        )
        self.ref[self.plan.num_parameters :].add_(delta[self.plan.num_parameters : self.plan.num_body])
        for section in self.plan.nonnegative:
            section.of(self.ref).clamp_(min=0.0)

    def shift(self, fraction: Tensor) -> None:
        """Move the common point, and the arenas with it, by a fraction of the velocity."""
        if self.velocity is None:
            return
        push = torch.mul(self.velocity, fraction, out=self.correction[self.parameters])
        self.ref[self.parameters].add_(push)
        if self._bridge is not None:
            push = self._bridge[self.parameters].copy_(push)
        for section in self.plan.sections:
            own = push[section.start : section.stop]
            section.source[: own.numel()].add_(own)

    def apply_alone(self) -> None:
        """In a world of one the snapshot is the mean, to the last bit."""
        self.ref.copy_(self.snapshot)

    def prepare_correction(self) -> None:
        """What the arena has to move by, (new ref - snapshot), brought to its device."""
        body = self.correction[: self.plan.num_body]
        torch.sub(self.ref, self.snapshot, out=body)
        self._still_where_equal(body)
        for section, floor in self._floors(self.correction):
            floor.copy_(section.of(self.ref))
        if self._bridge is not None:
            self._bridge.copy_(self.correction, non_blocking=self._is_pinned)

    def load(self) -> None:
        """The arenas become the common point."""
        origin = self.ref
        if self._bridge is not None:
            origin = self._bridge[: self.ref.numel()]
            origin.copy_(self.ref, non_blocking=self._is_pinned)
        for section in self.plan.sections:
            section.source.copy_(section.of(origin))

    def add_correction(self) -> None:
        """Move the arenas by the prepared correction; every local step since the snapshot stays in."""
        floors = list(self._floors(self.delivered))
        for section, floor in floors:
            torch.minimum(section.source, floor, out=floor)
        for section in self.plan.sections:
            section.source.add_(section.of(self.delivered))
        # A variance can fall below zero when two corrections of it meet; it stays above the smaller of its parents.
        for section, floor in floors:
            torch.maximum(section.source, floor, out=section.source)

    def _still_where_equal(self, difference: Tensor) -> None:
        if self._has_infinities:
            difference.masked_fill_(self.snapshot == self.ref, 0.0)

    def _merge_variances(self, delta: Tensor) -> None:
        """Variance of the mixture: mean of the variances (already there) plus variance of the means."""
        extra = self.plan.num_body
        for norm in self.plan.norms:
            mean = delta[norm.mean]
            spread = delta[extra : extra + mean.numel()]
            extra += mean.numel()
            square = torch.mul(mean, mean, out=self.correction[: mean.numel()])
            delta[norm.variance].add_(spread.sub_(square).clamp_(min=0.0))

    def _fold_squares(self, values: Tensor, parts: Tensor) -> None:
        """Sum of squares by adding halves: the same bits on every device and thread count, unlike a reduction."""
        scratch = torch.mul(values, values, out=self.correction[: values.numel()])
        for lower, upper in self._folds:
            lower.add_(upper)
        parts[: values.numel()].copy_(scratch[:NUM_PARTS])

    def _floors(self, correction: Tensor) -> Iterator[tuple[Section, Tensor]]:
        start = self.plan.num_body
        for section in self.plan.nonnegative:
            stop = start + section.source.numel()
            yield section, correction[start:stop]
            start = stop


def _folds(values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Halves to add to each other, one after the other, until NUM_PARTS numbers are left."""
    remaining = values.numel()
    while remaining > NUM_PARTS:
        half = max(NUM_PARTS, (remaining + 1) // 2)
        yield values[: remaining - half], values[half:remaining]
        remaining = half
