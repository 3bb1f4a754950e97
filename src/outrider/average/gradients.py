"""Decides what one rank contributes to a shared step, and turns the sum into the gradients of every rank.

Also decides which gradients are summed together: buckets, which are ranges of a wire, with the last parameters first as
in backward. Does not communicate or clip: the caller sums the wires between pack and settle, whole or bucket by bucket.
Called by the averages of a rank and by the lab.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from outrider.average.arena import Arena
from outrider.average.exchange import same_device
from outrider.average.rank_facts import Settled
from outrider.average.step_facts import StepFacts
from outrider.average.tensor_layout import ALIGNMENT_BYTES, LayoutPlanner, TensorPlace
from outrider.average.wire_plan import wire_dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """A range of a wire."""

    wire: Tensor
    """The summed tensor; the last bucket also has room for the facts."""
    summed: Tensor
    """The gradients in the bucket."""
    staged: Tensor
    """The gradients on the parameters' device; the same memory as `summed` unless the wires are on another device."""
    members: tuple[int, ...]
    """The indices of the bucket's parameters among the participating parameters."""

    @property
    def is_bridged(self) -> bool:
        return self.staged.device != self.summed.device

    def send(self) -> None:
        if self.is_bridged:
            self.summed.copy_(self.staged, non_blocking=self.staged.is_cuda)


def cut(
    places: Sequence[TensorPlace], members: Sequence[int], *, max_bytes: int, last_bytes: int
) -> list[tuple[int, tuple[int, ...]]]:
    """The start and the members of each bucket of one flat tensor, from the end of the tensor to its start.

    Gradients of at most `max_bytes` form one bucket. Otherwise a bucket is closed when it holds `max_bytes`. The last
    bucket has the first parameters: at most `last_bytes`, or a single parameter. It is small because backward ends with
    these parameters, so nothing can overlap the sum of this bucket.
    """
    sizes = [places[member].numel * places[member].dtype.itemsize for member in members]
    num_last = max(1, sum(size <= last_bytes for size in accumulate(sizes))) if sum(sizes) > max_bytes else 0
    buckets: list[tuple[int, tuple[int, ...]]] = []
    waiting: list[int] = []
    num_bytes = 0
    for number, member in reversed(list(enumerate(members))):
        waiting.append(member)
        num_bytes += sizes[number]
        start = places[member].offset
        if start > 0 and num_bytes >= (1 if number == num_last else max_bytes):
            buckets.append((start, tuple(waiting)))
            waiting, num_bytes = [], 0
    return [*buckets, (0, tuple(waiting))]


BUCKET_BYTES = 25 * 2**20
"""The default of DDP: much smaller buckets need more round trips; much larger ones complete only as backward ends."""
LAST_BYTES = 2**20
"""Size of the bucket that is summed after backward: small, but large enough that its round trip does not dominate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Body:
    """The gradients of one wire: summed, on the parameters' device, and rounded to the parameters' dtypes."""

    summed: Tensor
    staged: Tensor
    """The same memory as `summed`, unless parameters and wires are on different devices."""
    sections: dict[torch.dtype, Tensor] = field(default_factory=dict)
    rounded: dict[torch.dtype, Tensor] = field(default_factory=dict)

    def receive(self) -> None:
        if self.staged.device != self.summed.device:
            self.staged.copy_(self.summed, non_blocking=self.staged.is_cuda)
        for dtype, section in self.sections.items():
            if self.rounded[dtype] is not section:
                self.rounded[dtype].copy_(section)


class GradientExchange:
    """Gradients of one step in flat wires: sends samples * gradient, receives the mean weighted by samples.

    Frozen parameters take no part; a thawed parameter gets no gradient until the ranks agree on a new layout. A
    gradient that is missing on some ranks counts as zero there. A gradient that is missing on all ranks stays None, and
    optimizers skip it.
    """

    def __init__(
        self,
        arena: Arena,
        *,
        rank: int,
        world_size: int,
        num_facts: int,
        device: torch.device | str = "cpu",
        bucket_bytes: int = BUCKET_BYTES,
        last_bytes: int = LAST_BYTES,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = same_device(device, arena.device)
        self._facts = StepFacts(
            arena, rank=rank, world_size=world_size, num_facts=num_facts, pin_memory=self.device.type == "cuda"
        )
        self.parameters = self._facts.parameters
        """The participating parameters."""
        self.wires: list[Tensor] = []
        self.buckets: list[Bucket] = []
        """The wires in the order in which they are summed; the last one carries the facts."""
        self._arena_device = arena.device
        self._probe = torch.zeros((), dtype=torch.float32, device=arena.device)
        """Finite if all gradients packed so far in this step are finite."""
        self._num_packed = 0
        self._allocate(bucket_bytes, last_bytes)

    @property
    def has_all(self) -> bool:
        """Whether every parameter had a gradient when this step was packed."""
        return self._facts.has_all

    @property
    def maxima(self) -> list[Tensor]:
        """Empty: gradients have no counters."""
        return []

    @property
    def num_bytes(self) -> int:
        """Bytes that one average sends: gradients and facts."""
        return sum(wire.nbytes for wire in self.wires)

    @property
    def is_bridged(self) -> bool:
        """Whether gradients are copied to another device to be summed."""
        return self.device != self._arena_device

    @torch.no_grad()
    def pack_next(self, samples: int) -> Tensor:
        """Copy the gradients of the next bucket, times samples, before the step's `pack`; returns the tensor to sum.

        The last bucket is packed by `pack`, together with the facts.
        """
        bucket = self.buckets[self._num_packed]
        assert bucket is not self.buckets[-1], "the last bucket is packed with the facts"
        self._fill(bucket, samples)
        self._num_packed += 1
        return bucket.wire

    @torch.no_grad()
    def pack(self, samples: int, facts: Sequence[float]) -> list[Tensor]:
        """Copy the remaining gradients, the facts, and which parameters had a gradient; returns the tensors to sum."""
        self._facts.write(samples, facts)
        left = self.buckets[self._num_packed :]
        self._num_packed = 0
        for bucket in left:
            self._fill(bucket, samples)
        self._slots.copy_(self._facts.own, non_blocking=True)
        self._facts.mark_bad(self._slots, self._probe)
        self._probe.zero_()
        if self.is_bridged and self._arena_device.type == "cuda":
            torch.cuda.current_stream(self._arena_device).synchronize()
        return [bucket.wire for bucket in left]

    def settle(self) -> Settled:
        """Divide by the samples of all ranks and assign the gradients, which are equal on all ranks."""
        self.hand_out()
        return self.facts()

    @torch.no_grad()
    def hand_out(self) -> None:
        """Assign the mean gradients to the parameters; waits for the device only if this rank lacked a gradient."""
        share = self._facts.share(self._slots)
        for body in self._bodies:
            body.summed.mul_(share)
            body.receive()
        if self.has_all:
            for parameter, view in zip(self.parameters, self._results, strict=True):
                parameter.grad = view
            return
        num_present = self._facts.num_present(self._slots)
        for parameter, view, count in zip(self.parameters, self._results, num_present, strict=True):
            parameter.grad = view if count else None

    @torch.no_grad()
    def drop_bad(self) -> None:
        """Zero the mean gradients if any rank's gradients are not finite; the host does not wait for the device."""
        is_bad = self._facts.has_bad(self._slots).to(self._arena_device, non_blocking=True)
        for body in self._bodies:
            for gradients in body.rounded.values():
                gradients.masked_fill_(is_bad, 0.0)

    def facts(self) -> Settled:
        """The facts of all ranks; waits for the device."""
        return self._facts.settled(self._slots)

    def _fill(self, bucket: Bucket, samples: int) -> None:
        if samples:
            self._copy_gradients(bucket.members)
            bucket.staged.mul_(samples)
            # Any NaN or infinity makes this sum NaN or infinite.
            self._probe.add_(bucket.staged.sum())
        else:
            bucket.staged.zero_()
        bucket.send()

    def _copy_gradients(self, members: Sequence[int]) -> None:
        gradients = [_dense(self.parameters[member].grad) for member in members]
        present = [gradient for gradient in gradients if gradient is not None]
        views = [self._views[member] for member in members]
        if len(present) < len(gradients):
            # Zero only these views: since the last average, gradients that a user accumulates are views of the bucket.
            torch._foreach_zero_([view for view, own in zip(views, gradients, strict=True) if own is None])
            views = [view for view, own in zip(views, gradients, strict=True) if own is not None]
        if present:
            torch._foreach_copy_(views, present)

    # The facts are at the start of memory, next to the first parameters, which get their gradients last.

    def _allocate(self, bucket_bytes: int, last_bytes: int) -> None:
        planner = LayoutPlanner()
        places = [planner.place(parameter) for parameter in self.parameters]
        planner.align()
        num_slots = self._facts.num_slots
        dtypes = sorted({wire_dtype(dtype) for dtype in planner.ends} or {torch.float32}, key=lambda d: -d.itemsize)
        self._bodies: list[_Body] = []
        for dtype in dtypes:
            lengths = {own: n for own, n in planner.ends.items() if wire_dtype(own) == dtype}
            start = 0 if self.wires else _aligned(num_slots, dtype)
            self.wires.append(self._buffer(start + sum(lengths.values()), dtype))
            self._bodies.append(self._body(self.wires[-1][start:], lengths))
        self._slots = self.wires[0][:num_slots]
        self._views = _lay_out(places, {d: flat for body in self._bodies for d, flat in body.sections.items()})
        self._results = _lay_out(places, {d: flat for body in self._bodies for d, flat in body.rounded.items()})
        for wire, body in reversed(list(zip(self.wires, self._bodies, strict=True))):
            self.buckets += _buckets(wire, body, places, max_bytes=bucket_bytes, last_bytes=last_bytes)

    def _buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        is_pinned = self._arena_device.type == "cuda" and self.device.type == "cpu"
        return torch.zeros(numel, dtype=dtype, device=self.device, pin_memory=is_pinned)

    def _body(self, summed: Tensor, lengths: dict[torch.dtype, int]) -> _Body:
        staged = torch.zeros_like(summed, device=self._arena_device) if self.is_bridged else summed
        body = _Body(summed=summed, staged=staged)
        for dtype, section in zip(lengths, torch.split(staged, list(lengths.values())), strict=True):
            body.sections[dtype] = section
            body.rounded[dtype] = section if dtype == section.dtype else torch.zeros_like(section, dtype=dtype)
        return body


def _buckets(
    wire: Tensor, body: _Body, places: Sequence[TensorPlace], *, max_bytes: int, last_bytes: int
) -> list[Bucket]:
    """The buckets from the end of a wire to its start; one bucket if the wire has gradients of several dtypes."""
    members = tuple(number for number, place in enumerate(places) if place.dtype in body.sections)
    pieces = [(0, members)]
    if len(body.sections) == 1:
        pieces = cut(places, members, max_bytes=max_bytes, last_bytes=last_bytes)
    buckets, stop = [], body.summed.numel()
    first = wire.numel() - stop
    for start, own in pieces:
        buckets.append(
            Bucket(
                wire=wire[first + start if start else 0 : first + stop],
                summed=body.summed[start:stop],
                staged=body.staged[start:stop],
                members=own,
            )
        )
        stop = start
    return buckets


def _lay_out(places: Sequence[TensorPlace], flats: dict[torch.dtype, Tensor]) -> list[Tensor]:
    return [place.view(flats[place.dtype]) for place in places]


def _aligned(numel: int, dtype: torch.dtype) -> int:
    step = max(1, ALIGNMENT_BYTES // dtype.itemsize)
    return -(-numel // step) * step


def _dense(gradient: Tensor | None) -> Tensor | None:
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient
