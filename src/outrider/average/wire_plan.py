"""Decides the layout of the values that an average sends: the order of an arena's parts, and how it is cut into pieces.

Does no arithmetic and knows no other rank. Called by Exchange.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.average.arena import Arena, NormPair
from outrider.average.optimizer_state import OptimizerArena


@dataclass(frozen=True, kw_only=True, slots=True)
class WireSection:
    """A range of an arena and its place in the body of the wire."""

    source: Tensor
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.source.numel()

    def of(self, body: Tensor) -> Tensor:
        return body[self.start : self.stop]


@dataclass(frozen=True, kw_only=True, slots=True)
class WirePlan:
    """The layout of one buffer: parameters first, then float buffers, then optimizer state."""

    dtype: torch.dtype
    sections: tuple[WireSection, ...]
    num_parameters: int
    num_arena: int
    norms: tuple[NormPair, ...]
    """Running means and variances, as slices of the body."""
    nonnegative: tuple[WireSection, ...]
    """Variances and second moments, which a correction must not make negative."""

    @property
    def num_body(self) -> int:
        return self.sections[-1].stop

    def cut(self, piece_numel: int) -> list[WireSpan]:
        """Cut the body at multiples of `piece_numel`; running means and variances, which are merged, stay together."""
        whole = _hull([*(norm.mean for norm in self.norms), *(norm.variance for norm in self.norms)])
        cuts = [at for at in range(0, self.num_body, piece_numel) if not whole.start < at < whole.stop]
        spans = []
        for start, stop in itertools.pairwise([*(cuts or [0]), self.num_body]):
            norms = self.norms if start <= whole.start < stop else ()
            spans.append(WireSpan(start=start, stop=stop, norms=norms))
        return spans


@dataclass(frozen=True, kw_only=True, slots=True)
class WireSpan:
    """A range of the body, followed on the wire by the squared displacements of its running means."""

    start: int
    stop: int
    norms: tuple[NormPair, ...]

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def num_extra(self) -> int:
        return sum(norm.mean.stop - norm.mean.start for norm in self.norms)

    def overlap(self, section: WireSection) -> tuple[Tensor, slice] | None:
        """The part of a section in this span, and its place in the span; None if there is none."""
        start, stop = max(self.start, section.start), min(self.stop, section.stop)
        if start >= stop:
            return None
        return section.source[start - section.start : stop - section.start], slice(
            start - self.start, stop - self.start
        )


def _hull(slices: list[slice]) -> slice:
    return slice(min(one.start for one in slices), max(one.stop for one in slices)) if slices else slice(0, 0)


def wire_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def plan_wires(arena: Arena, optimizer: OptimizerArena | None) -> list[WirePlan]:
    """Plan at most two wires: float64 first, which holds facts exactly, then everything else in float32."""
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
        WireSection(source=flats[block.dtype][block.variance], start=norm.variance.start)
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


def _line_up(sources: list[Tensor]) -> Iterator[WireSection]:
    start = 0
    for source in sources:
        yield WireSection(source=source, start=start)
        start += source.numel()


def _moments(optimizer: OptimizerArena, states: tuple[WireSection, ...]) -> list[WireSection]:
    """The non-negative part of each state, which comes first."""
    return [
        WireSection(source=state.source[: optimizer.num_nonnegative[state.source.dtype]], start=state.start)
        for state in states
    ]


def _shift(block: NormPair, *, by: int) -> NormPair:
    """Convert a place in the flat tensor to the place in the body."""
    return NormPair(
        dtype=block.dtype,
        mean=slice(block.mean.start + by, block.mean.stop + by),
        variance=slice(block.variance.start + by, block.variance.stop + by),
    )


def _coalesce(sections: tuple[WireSection, ...]) -> Iterator[WireSection]:
    """Join sections that are adjacent in memory, so that a model of one dtype is copied in one operation."""
    last = sections[0]
    for section in sections[1:]:
        if last.source.numel() == 0:
            last = section
        elif _touches(last.source, section.source):
            joined = last.source.as_strided((last.source.numel() + section.source.numel(),), (1,))
            last = WireSection(source=joined, start=last.start)
        else:
            yield last
            last = section
    yield last


def _touches(left: Tensor, right: Tensor) -> bool:
    return right.numel() == 0 or (
        left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
        and left.storage_offset() + left.numel() == right.storage_offset()
    )
