"""Decides how the gradients of a shared step are cut into pieces, and how the mean of a piece is written back.

For ranks whose gradients are in host memory: a piece stays in cache while it is scaled, checked and summed, and the
mean overwrites the gradient, so there is no second copy of all gradients. Does not communicate. Called by
PiecewiseGradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from outrider.average.arena import Arena
from outrider.average.rank_facts import Settled
from outrider.average.step_facts import StepFacts
from outrider.average.tensor_layout import LayoutPlanner, TensorPlace
from outrider.average.wire_plan import wire_dtype

PIECE_BYTES = 4 * 2**20
"""Smaller pieces need more messages, larger ones do not fit the caches; the same choice as PIECE_NUMEL in exchange."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientSpan:
    """A range of a gradient, in memory order."""

    member: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class GradientPiece:
    """The gradient ranges that are summed at a time."""

    dtype: torch.dtype
    spans: tuple[GradientSpan, ...]

    @cached_property
    def lengths(self) -> list[int]:
        return [span.numel for span in self.spans]

    @cached_property
    def numel(self) -> int:
        return sum(self.lengths)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


def cut_gradients(places: Sequence[TensorPlace], *, piece_bytes: int = PIECE_BYTES) -> list[GradientPiece]:
    """Cut consecutive gradients into pieces of at most `piece_bytes`; each piece is summed in one dtype."""
    dtypes = sorted({wire_dtype(place.dtype) for place in places}, key=lambda dtype: -dtype.itemsize)
    return [
        GradientPiece(dtype=dtype, spans=spans)
        for dtype in dtypes
        for spans in _cut(places, dtype, piece_numel=piece_bytes // dtype.itemsize)
    ]


def _cut(places: Sequence[TensorPlace], dtype: torch.dtype, *, piece_numel: int) -> Iterator[tuple[GradientSpan, ...]]:
    spans: list[GradientSpan] = []
    room = piece_numel
    for member, place in enumerate(places):
        at = 0 if wire_dtype(place.dtype) == dtype else place.numel
        while at < place.numel:
            stop = min(place.numel, at + room)
            spans.append(GradientSpan(member=member, start=at, stop=stop))
            room -= stop - at
            at = stop
            if not room:
                yield tuple(spans)
                spans, room = [], piece_numel
    if spans:
        yield tuple(spans)


class GradientPieces:
    """Gradients of one step in pieces: sends samples * gradient, receives the mean weighted by samples.

    Treats missing gradients and frozen parameters like GradientExchange, and yields the same bits.
    """

    def __init__(
        self, arena: Arena, *, rank: int, world_size: int, num_facts: int, piece_bytes: int = PIECE_BYTES
    ) -> None:
        assert arena.device.type == "cpu", f"gradients in pieces are in host memory, got {arena.device}"
        self.rank = rank
        self.world_size = world_size
        self.facts = StepFacts(arena, rank=rank, world_size=world_size, num_facts=num_facts)
        planner = LayoutPlanner()
        self._places = [planner.place(parameter) for parameter in self.facts.parameters]
        self.pieces = cut_gradients(self._places, piece_bytes=piece_bytes)
        self._samples = 0
        self._sources: list[Tensor | None] = []
        """The gradients of this rank in memory order; None for a parameter without gradient."""
        self._targets: list[Tensor | None] = []
        """The destinations of the means; the same memory as the gradient if this rank has one."""
        self._probe = 0.0
        """Finite if all gradients packed so far in this step are finite."""
        self._slots = self.facts.own
        self._share = torch.ones((), dtype=torch.float64)
        self._settled: Settled | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that one average sends: gradients, facts, and one flag per rank for gradients that are not finite."""
        return sum(piece.num_bytes for piece in self.pieces) + self.facts.own.nbytes + 4 * self.world_size

    @torch.no_grad()
    def open(self, samples: int, facts: Sequence[float]) -> None:
        """Begin the average of a step."""
        self.facts.write(samples, facts)
        self._samples, self._probe, self._settled = samples, 0.0, None
        self._sources = self._targets = [self._flat_of(member) for member in range(len(self._places))]

    @torch.no_grad()
    def pack(self, piece: GradientPiece, into: Tensor) -> None:
        """Write samples * gradient."""
        if not self._samples:
            into.zero_()
            return
        for view, source in zip(into.split(piece.lengths), _ranges(self._sources, piece.spans), strict=True):
            if source is None:
                view.zero_()
            elif source.dtype == view.dtype:
                torch.mul(source, self._samples, out=view)
            else:
                view.copy_(source).mul_(self._samples)
        # Any NaN or infinity makes this sum NaN or infinite.
        self._probe += into.sum().item()

    def pack_facts(self, into: Tensor) -> None:
        into.copy_(self.facts.own)

    @torch.no_grad()
    def take_facts(self, segments: Sequence[Tensor]) -> None:
        """Take the summed facts, which say which gradients exist and by what they are divided."""
        self._slots = torch.cat(list(segments))
        self._share = self.facts.share(self._slots)
        if self.facts.has_all:
            return
        counts = self.facts.num_present(self._slots)
        # A new list: pieces that are packed later must still find no gradient of this rank in `_sources`.
        self._targets = [self._target_of(member, has_mean=count > 0) for member, count in enumerate(counts)]

    @torch.no_grad()
    def settle(self, piece: GradientPiece, segments: Sequence[Tensor]) -> None:
        """Overwrite the gradients in a piece with their mean; `segments` are its sum and are not changed."""
        for target, sums in zip(_ranges(self._targets, piece.spans), _regrouped(segments, piece.lengths), strict=True):
            if target is not None:
                for part, own in zip(target.split([one.numel() for one in sums]), sums, strict=True):
                    torch.mul(own, self._share, out=part)

    def pack_flags(self, into: Tensor) -> None:
        """Write whether this rank's gradients were not finite; this is known once all pieces are packed."""
        into.zero_()
        into[self.rank] = float(not math.isfinite(self._probe))

    def take_flags(self, segments: Sequence[Tensor]) -> None:
        flags = torch.cat(list(segments)).tolist()
        bad = tuple(rank for rank, flag in enumerate(flags) if flag)
        self._settled = replace(self.facts.settled(self._slots), not_finite=bad)
        self._sources = self._targets = []

    def drop_bad(self) -> None:
        """Zero the mean gradients if the gradients of any rank are not finite."""
        if self.settled().not_finite:
            torch._foreach_zero_([one.grad for one in self.facts.parameters if one.grad is not None])

    def settled(self) -> Settled:
        """The facts of all ranks."""
        assert self._settled is not None, "no average of gradients is complete"
        return self._settled

    def _flat_of(self, member: int) -> Tensor | None:
        """The gradient as flat memory; copied first if it cannot be overwritten or has another memory layout."""
        gradient, place = self.facts.parameters[member].grad, self._places[member]
        if gradient is None:
            return None
        if not _can_be_written_over(gradient, place):
            flat = self._place_fresh(member)
            fresh = self.facts.parameters[member].grad
            assert fresh is not None
            fresh.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
            return flat
        return _in_memory_order(gradient, place)

    def _target_of(self, member: int, *, has_mean: bool) -> Tensor | None:
        if not has_mean:
            self.facts.parameters[member].grad = None
            return None
        own = self._sources[member]
        return self._place_fresh(member) if own is None else own

    def _place_fresh(self, member: int) -> Tensor:
        parameter, place = self.facts.parameters[member], self._places[member]
        parameter.grad = torch.empty_strided(place.size, place.stride, dtype=parameter.dtype)
        return _in_memory_order(parameter.grad, place)


def _ranges(flats: Sequence[Tensor | None], spans: Sequence[GradientSpan]) -> list[Tensor | None]:
    ranges: list[Tensor | None] = []
    for span in spans:
        flat = flats[span.member]
        ranges.append(None if flat is None else flat[span.start : span.stop])
    return ranges


def _regrouped(segments: Sequence[Tensor], lengths: Sequence[int]) -> Iterator[list[Tensor]]:
    """Regroup the values into these lengths; a group has several tensors if a segment ends inside it."""
    left = list(reversed(segments))
    for length in lengths:
        group: list[Tensor] = []
        while length:
            segment = left.pop()
            group.append(segment[:length])
            if segment.numel() > length:
                left.append(segment[length:])
            length -= group[-1].numel()
        yield group


def _can_be_written_over(gradient: Tensor, place: TensorPlace) -> bool:
    is_plain = not (gradient.is_sparse or gradient.is_conj() or gradient.is_neg())
    return is_plain and not gradient.requires_grad and _is_laid_out_as(place, gradient)


def _is_laid_out_as(place: TensorPlace, gradient: Tensor) -> bool:
    strides = zip(gradient.stride(), place.stride, place.size, strict=True)
    return all(own == expected or size == 1 for own, expected, size in strides)


def _in_memory_order(gradient: Tensor, place: TensorPlace) -> Tensor:
    gradient = gradient.detach()
    real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    return real.as_strided((place.numel,), (1,))
