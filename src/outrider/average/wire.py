"""Decides the arithmetic of one wire, piece by piece: displacements, mean, new common point, correction.

Does not know facts, ranks or streams; every operation runs on the current stream, on the arena's own device. A piece is
small enough to stay in a processor's cache from one operation to the next. Called by Exchange.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.average.outer import Outer
from outrider.average.wire_plan import WirePlan, WireSection, WireSpan

BLOCK_NUMEL = 2**16
"""Elements of a block on the host; a block and its intermediate results stay in a core's own cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeanStep:
    """How the sum of all ranks moves the common point; tensors are used if the host need not wait for the device."""

    reciprocal: float | Tensor
    """One over all samples: a division costs three times as much as a multiplication."""
    is_moving: float | Tensor
    concentration: float | Tensor
    outer: Outer
    is_alone: bool = False
    """Whether there is only one rank; its snapshot is then the mean, to the last bit."""

    def move(self, ref: Tensor, mean: Tensor, velocity: Tensor | None = None) -> None:
        """Move the common point by the mean displacement, which is overwritten."""
        if velocity is None:
            ref.add_(mean)
        else:
            self.outer.step(ref, mean, velocity, is_moving=self.is_moving, concentration=self.concentration)


@dataclass(frozen=True, kw_only=True, slots=True)
class WirePart:
    """A part of an arena in a piece: either parameters or other values."""

    source: Tensor
    place: slice
    """The range in the piece."""
    is_parameter: bool


class Wire:
    """The buffers of one wire; allocated once and used by every average.

    For each element of the arena a wire stores the common point and, if averages run in the background, a snapshot. The
    correction overwrites the snapshot.
    """

    def __init__(self, plan: WirePlan, *, arena_device: torch.device, spans: Sequence[WireSpan]) -> None:
        self.plan = plan
        # On devices other than CUDA we have no streams, and some lack a dtype, so the host computes for them.
        self.device = arena_device if arena_device.type in ("cpu", "cuda") else torch.device("cpu")
        self.ref = torch.zeros(plan.num_body, dtype=plan.dtype, device=self.device)
        self.velocity: Tensor | None = None
        self.squares = torch.zeros(3, dtype=torch.float64, device=self.device)
        """‖d‖² and ‖u‖² of this rank's parameters, and ‖mean‖² of the mean displacement, in the current average."""
        self.errors: Tensor | None = None
        """Rounding errors of this rank's displacements, not sent yet; None without error feedback."""
        self._snapshot: Tensor | None = None
        self._has_infinities = False
        self._mean = torch.zeros(0, dtype=plan.dtype, device=self.device)
        self._parts: dict[tuple[int, int], list[WirePart]] = {}
        self._is_plain: dict[tuple[int, int], bool] = {}
        self.prepare(spans)

    def prepare(self, spans: Sequence[WireSpan]) -> None:
        """Look up the contents of these spans once; spans may overlap."""
        num_scratch = max(span.numel + span.num_extra for span in spans)
        if num_scratch > self._mean.numel():
            self._mean = torch.zeros(num_scratch, dtype=self.plan.dtype, device=self.device)
        for span in spans:
            self._parts[span.start, span.stop] = list(_parts(self.plan, span))
            self._is_plain[span.start, span.stop] = not span.norms and all(
                span.overlap(section) is None for section in self.plan.nonnegative
            )

    @property
    def snapshot(self) -> Tensor:
        """The snapshot; allocated at its first use, because blocking averages need none."""
        if self._snapshot is None:
            self._snapshot = torch.zeros_like(self.ref)
        return self._snapshot

    @property
    def num_bytes(self) -> int:
        """Memory on the wire's device, not counting the arenas."""
        kept = [self.ref, self.velocity, self.errors, self._snapshot, self._mean, self.squares]
        return sum(tensor.nbytes for tensor in kept if tensor is not None)

    @property
    def parameters(self) -> slice:
        return slice(0, self.plan.num_parameters)

    def keep_errors(self) -> None:
        """Allocate the rounding errors that are kept for the next average."""
        self.errors = torch.zeros(self.plan.num_parameters, dtype=self.plan.dtype, device=self.device)

    def error(self, span: WireSpan) -> Tensor:
        assert self.errors is not None, "this wire keeps no errors"
        return self.errors[span.start : span.stop]

    def take_snapshot(self) -> None:
        """Copy the arenas on their own device, in the order of its stream."""
        self._copy_arenas(self.snapshot)

    def restart(self) -> None:
        """Make the arenas the common point; for averaged optimizer state, not yet equal on all ranks, it is zero."""
        self._copy_arenas(self.ref)
        if self.errors is not None:
            self.errors.zero_()
        self.ref[self.plan.num_arena :].zero_()
        # Attention masks often contain -inf, and -inf minus -inf would be NaN.
        self._has_infinities = not all(bool(torch.isfinite(part).all()) for part in self.ref.split(2**22))

    def take_ref(self, ref: Tensor) -> None:
        """Restore a saved common point; its optimizer state is dropped if the layout has changed."""
        kept = self.plan.num_body if ref.numel() == self.plan.num_body else self.plan.num_arena
        self.ref[:kept].copy_(ref[:kept])

    def pack(self, span: WireSpan, into: Tensor, *, samples: int, is_live: bool) -> None:
        """Write the piece's displacement since the common point, times samples, into `into`.

        If `is_live`, read the arenas, which do not change during a blocking average; otherwise read the snapshot.
        """
        body, ref = into[: span.numel], self.ref[span.start : span.stop]
        displacements, lengths = [], []
        for part, values in self._values(span, is_live):
            for block, own, common in self._blocks(body[part.place], values, ref[part.place]):
                torch.sub(own, common, out=block)
                self._still_where_equal(block, own, common)
                if part.is_parameter:
                    displacements.append(_length(block))
                    lengths.append(_length(own))
                if not span.norms:
                    _scale(block, samples)
        self._add_squares(0, displacements)
        self._add_squares(1, lengths)
        if span.norms:
            _scale(self._add_spreads(span, into), samples)

    def _add_spreads(self, span: WireSpan, into: Tensor) -> Tensor:
        """Append the squared displacements of running means, which are averaged too."""
        extra = span.numel
        for norm in span.norms:
            mean = into[norm.mean.start - span.start : norm.mean.stop - span.start]
            torch.mul(mean, mean, out=into[extra : extra + mean.numel()])
            extra += mean.numel()
        return into[:extra]

    def settle(
        self, span: WireSpan, segments: Sequence[Tensor], step: MeanStep, *, is_live: bool, counts: bool
    ) -> None:
        """Move the piece of the common point by the mean of all ranks; `segments` are consecutive parts of the sum.

        If `is_live`, the arenas then get the new common point; otherwise the correction overwrites the snapshot.
        `counts` adds the squares of the mean displacement to `squares`.
        """
        if self._is_plain[span.start, span.stop] and not step.is_alone:
            self._settle_blocks(span, segments, step, is_live=is_live, counts=counts)
            return
        ref = self.ref[span.start : span.stop]
        own = self._values(span, is_live)
        if step.is_alone:
            for part, values in own:
                ref[part.place].copy_(values)
        else:
            mean = self._scaled(span, segments, step.reciprocal)
            self._merge_variances(span, mean)
            self._move(span, ref, mean[: span.numel], step, counts=counts)
        self._hand_out(ref, span, own, is_live)

    def _settle_blocks(
        self, span: WireSpan, segments: Sequence[Tensor], step: MeanStep, *, is_live: bool, counts: bool
    ) -> None:
        """Like `settle`, in blocks that stay in the cache; only for spans whose elements are independent."""
        lengths = []
        for part, values in self._values(span, is_live):
            for at, summed in _within(segments, part.place):
                start, stop = span.start + at, span.start + at + summed.numel()
                own = values[at - part.place.start :][: summed.numel()]
                velocity = None if self.velocity is None or not part.is_parameter else self.velocity[start:stop]
                tensors = (summed, self.ref[start:stop], own, *(() if velocity is None else (velocity,)))
                for block, ref, target, *speed in self._blocks(*tensors):
                    mean = torch.mul(block, step.reciprocal, out=self._mean[: block.numel()])
                    if counts and part.is_parameter:
                        lengths.append(_length(mean))
                    step.move(ref, mean, *speed)
                    if is_live:
                        target.copy_(ref)
                    else:
                        self._correct(ref, target)
        self._add_squares(2, lengths)

    def _hand_out(self, ref: Tensor, span: WireSpan, own: Sequence[tuple[WirePart, Tensor]], is_live: bool) -> None:
        if not is_live:
            self._correct(ref, self.snapshot[span.start : span.stop])
            return
        for part, values in own:
            values.copy_(ref[part.place])

    def shift(self, fraction: Tensor, spans: Sequence[WireSpan]) -> None:
        """Move the common point, and the arenas with it, by a fraction of the velocity."""
        if self.velocity is None:
            return
        for span in spans:
            stop = min(span.stop, self.plan.num_parameters)
            if span.start >= stop:
                continue
            push = torch.mul(self.velocity[span.start : stop], fraction, out=self._mean[: stop - span.start])
            self.ref[span.start : stop].add_(push)
            for part in self._parts[span.start, span.stop]:
                if part.is_parameter:
                    part.source.add_(push[part.place].to(part.source.device))

    def load(self) -> None:
        """Set the arenas to the common point."""
        for section in self.plan.sections:
            section.source.copy_(section.of(self.ref))

    def add_correction(self) -> None:
        """Add the correction to the arenas; local steps since the snapshot are kept."""
        floors = [(section.source, self._floor(section)) for section in self.plan.nonnegative]
        for section in self.plan.sections:
            section.source.add_(section.of(self.snapshot).to(section.source.device))
        # The sum of two corrections can make a variance negative, so it is kept above the smaller of its sources.
        for source, floor in floors:
            torch.maximum(source, floor, out=source)

    def _floor(self, section: WireSection) -> Tensor:
        common = section.of(self.ref).to(section.source.device, section.source.dtype)
        return torch.minimum(section.source, common)

    def _copy_arenas(self, target: Tensor) -> None:
        for section in self.plan.sections:
            section.of(target).copy_(section.source)

    def _values(self, span: WireSpan, is_live: bool) -> list[tuple[WirePart, Tensor]]:
        """The parts of the arenas or of the snapshot, cut in the same way so that norms have the same bits."""
        parts = self._parts[span.start, span.stop]
        if is_live:
            return [(part, part.source) for part in parts]
        snapshot = self.snapshot[span.start : span.stop]
        return [(part, snapshot[part.place]) for part in parts]

    def _blocks(self, *tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
        if self.device.type != "cpu":
            return [tensors]
        return zip(*(tensor.split(BLOCK_NUMEL) for tensor in tensors), strict=True)

    def _add_squares(self, index: int, lengths: list[Tensor]) -> None:
        if lengths:
            self.squares[index].add_(torch.stack(lengths).double().square_().sum())

    def _scaled(self, span: WireSpan, segments: Sequence[Tensor], reciprocal: float | Tensor) -> Tensor:
        mean = self._mean[: span.numel + span.num_extra]
        at = 0
        for segment in segments:
            part = segment[: mean.numel() - at]
            torch.mul(part, reciprocal, out=mean[at : at + part.numel()])
            at += part.numel()
        return mean

    def _merge_variances(self, span: WireSpan, mean: Tensor) -> None:
        """Compute the variance of the mixture: mean of the variances (already there) plus variance of the means."""
        extra = span.numel
        for norm in span.norms:
            of_means = mean[norm.mean.start - span.start : norm.mean.stop - span.start]
            spread = mean[extra : extra + of_means.numel()]
            extra += of_means.numel()
            variance = mean[norm.variance.start - span.start : norm.variance.stop - span.start]
            variance.add_(spread.sub_(of_means.square()).clamp_(min=0.0))

    def _move(self, span: WireSpan, ref: Tensor, mean: Tensor, step: MeanStep, *, counts: bool) -> None:
        num_parameters = max(0, min(span.stop, self.plan.num_parameters) - span.start)
        if num_parameters:
            parameters = mean[:num_parameters]
            if counts:
                self._add_squares(2, [_length(parameters)])
            velocity = () if self.velocity is None else (self.velocity[span.start : span.start + num_parameters],)
            step.move(ref[:num_parameters], parameters, *velocity)
        if num_parameters < span.numel:
            ref[num_parameters:].add_(mean[num_parameters:])
        for section in self.plan.nonnegative:
            start, stop = max(section.start, span.start), min(section.stop, span.stop)
            if start < stop:
                self.ref[start:stop].clamp_(min=0.0)

    def _correct(self, ref: Tensor, snapshot: Tensor) -> None:
        equal = snapshot == ref if self._has_infinities else None
        torch.sub(ref, snapshot, out=snapshot)
        if equal is not None:
            snapshot.masked_fill_(equal, 0.0)

    def _still_where_equal(self, difference: Tensor, values: Tensor, ref: Tensor) -> None:
        if self._has_infinities:
            difference.masked_fill_(values == ref, 0.0)


def _parts(plan: WirePlan, span: WireSpan) -> Iterator[WirePart]:
    """Yield the parts of a span, cut at the end of the parameters."""
    end = plan.num_parameters - span.start
    for source, place in filter(None, map(span.overlap, plan.sections)):
        for start, stop in ((place.start, min(place.stop, end)), (max(place.start, end), place.stop)):
            if start < stop:
                own = source[start - place.start : stop - place.start]
                yield WirePart(source=own, place=slice(start, stop), is_parameter=start < end)


def _length(values: Tensor) -> Tensor:
    """‖values‖; does not use dot, because a BLAS library would start its own threads in the worker."""
    wide = values.dtype if values.dtype == torch.float64 else torch.float32
    length: Tensor = torch.linalg.vector_norm(values, dtype=wide)
    return length


def _scale(values: Tensor, samples: int) -> None:
    """Multiply by samples in place; without samples the result is zero even if values are not finite."""
    values.mul_(samples) if samples else values.zero_()


def _within(segments: Sequence[Tensor], place: slice) -> Iterator[tuple[int, Tensor]]:
    """Yield the parts of consecutive segments that lie in a range, each with its start."""
    at = 0
    for segment in segments:
        start, stop = max(at, place.start), min(at + segment.numel(), place.stop)
        if start < stop:
            yield start, segment[start - at : stop - at]
        at += segment.numel()
