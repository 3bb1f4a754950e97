"""Decides what one rank contributes to an average, and how it uses the sum.

Integer and bool buffers take the maximum over all ranks. Does not communicate: the caller sums each piece between pack
and settle. Called by the averagers and the lab.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.average.arena import Arena
from outrider.average.counters import Counters
from outrider.average.optimizer_state import OptimizerArena
from outrider.average.outer import Outer
from outrider.average.rank_facts import Settled, Tail, drift
from outrider.average.wire import MeanStep, Wire
from outrider.average.wire_codec import add_feedback, keep_feedback
from outrider.average.wire_piece import Chunk, Piece, chunked, written
from outrider.average.wire_plan import plan_wires
from outrider.errors import DataError

# Decay, per average, of the sample counts from which the ranks' shares are computed.
RECENT = 0.9
PIECE_NUMEL = 2**20
"""Elements of a piece that is summed on the host; fits in the cache, and is large enough that ranks rarely signal."""
DEVICE_PIECE_NUMEL = 2**24
"""Elements of a piece that is summed between devices, where kernel launches cost more than memory."""
NUM_CHUNKS = 16
"""With sums on the host, a GPU computes in about this many chunks of at most `DEVICE_PIECE_NUMEL // 2` elements."""


class Exchange:
    """Averages displacements since the last common point, `ref`, which is identical on all ranks.

    A rank contributes samples * (snapshot - ref); the sum over ranks divided by all samples moves `ref`. Values that no
    rank changed stay exact, and the drift between ranks follows from the norms of the displacements. An average has
    these steps:

    1. Call `snapshot` and `open`.
    2. For each of `pieces`, call `pack`, sum over ranks, and call `settle`.
    3. Sum the result of `pack_norms` over ranks, take the maximum of `maxima` over ranks, and call `read`.
    4. Call `load` if no step was taken since the snapshot, or else `add_correction`.

    Tensors are summed on `device`; the arithmetic runs on the arena's device.
    """

    def __init__(
        self,
        arena: Arena,
        *,
        rank: int,
        world_size: int,
        num_facts: int,
        outer: Outer | None = None,
        device: torch.device | str = "cpu",
        wire: str = "fp32",
    ) -> None:
        """`wire`, one of `WIRES`, is the format in which displacements of parameters are sent."""
        assert 0 <= rank < world_size, f"rank {rank} in a world of {world_size}"
        self.arena = arena
        self.rank = rank
        self.world_size = world_size
        self.num_facts = num_facts
        self.device = same_device(device, arena.device)
        self._outer = outer or Outer()
        self._optimizer: OptimizerArena | None = None
        self._tail = Tail(rank=rank, world_size=world_size, num_values=1 + num_facts)
        self._counters = Counters(arena, device=self.device)
        self._recent_samples = torch.zeros(world_size, dtype=torch.float64, device=self.device)
        self._ahead = torch.zeros((), dtype=torch.float64, device=self.device)
        """The fraction of the velocity by which the common point is ahead of the average."""
        self._wire = wire
        self.is_exact = False
        """Whether averages are sent without rounding, whatever the wire; used to merge the rest after shared steps."""
        self._values: Tensor | None = None
        self._samples = 0
        self._is_live = False
        self._step: MeanStep | None = None
        self._allocate()
        self.reset_ref()

    @property
    def maxima(self) -> list[Tensor]:
        """The buffers whose maximum over ranks is taken; empty for a model without integer buffers."""
        return [self._counters.maxima] if self._counters.maxima.numel() else []

    @property
    def pieces(self) -> list[Piece]:
        """The pieces that the next average sends, in order."""
        return self._plain_pieces if self.is_exact else self._pieces

    @property
    def chunks(self) -> list[Chunk]:
        """The pieces, joined into chunks that a GPU computes at once."""
        return self._plain_chunks if self.is_exact else self._chunks

    @property
    def can_be_live(self) -> bool:
        """Whether a blocking average can read and write the arena itself, without a snapshot."""
        return all(part.device == self.arena.device for part in self.parts)

    @property
    def num_bytes(self) -> int:
        """Bytes that one average sends: trained parameters, buffers, facts and counters."""
        body = sum(piece.num_bytes for piece in self.pieces)
        return body + sum(tensor.nbytes for tensor in [self._norms, *self.maxima])

    @torch.no_grad()
    def attach(self, optimizer: OptimizerArena) -> None:
        """Include optimizer state from the next average on; all ranks attach before the same average."""
        kept = self.state_dict()
        self._optimizer = optimizer
        self._allocate()
        self.reset_ref()
        self.load_state_dict(kept)

    @torch.no_grad()
    def reset_ref(self) -> None:
        """Make the arena the common point; call this when it is equal on all ranks, after a broadcast or a resume."""
        self.reclaim()
        for part in self.parts:
            part.restart()

    def snapshot(self) -> None:
        """Copy the arena; blocks until it is done."""
        self.stage()
        self.fetch()
        if self.arena.device.type == "cuda":
            torch.cuda.current_stream(self.arena.device).synchronize()

    @torch.no_grad()
    def stage(self) -> None:
        """Copy the arena on its own device, in the order of its stream; the counters still have to be fetched."""
        self.reclaim()
        for part in self.parts:
            part.take_snapshot()
        self._is_live = False
        self._counters.stage()

    @torch.no_grad()
    def stage_live(self) -> None:
        """Prepare a blocking average that reads the arena without a snapshot and writes the mean into it."""
        self.reclaim()
        self._is_live = True
        self._counters.stage()

    @torch.no_grad()
    def fetch(self) -> None:
        """Move the copy of the counters to the exchange's device, on the current stream."""
        self._counters.fetch()

    @torch.no_grad()
    def open(self, samples: int, facts: Sequence[float]) -> None:
        """Begin an average of the staged values."""
        assert len(facts) == self.num_facts, f"{len(facts)} facts, {self.num_facts} expected"
        self._counters.pack()
        self._samples, self._step = samples, None
        self._tail.encode([samples, *facts], self._row)
        for part in self.parts:
            part.squares.zero_()

    @torch.no_grad()
    def pack(self, piece: Piece, into: Tensor) -> None:
        """Fill a buffer of the piece's size on the arena's device, or on the host if the host does the arithmetic."""
        if piece.form is None:
            self._pack_values(piece, into)
            return
        form, values = piece.form, self._scratch(piece)
        self._pack_values(piece, values)
        error = piece.wire.error(piece.span) if form.has_feedback else None
        if error is not None:
            add_feedback(form, values, error, samples=self._samples)
        form.encode(values, into)
        if error is not None:
            keep_feedback(form, values, into, error, samples=self._samples)

    def _pack_values(self, piece: Piece, into: Tensor) -> None:
        piece.wire.pack(piece.span, into, samples=self._samples, is_live=self._is_live)
        if piece.num_slots:
            slots = into[piece.sum_numel - piece.num_slots : piece.sum_numel].zero_()
            self._tail.own_row(slots).copy_(self._row, non_blocking=True)

    def _scratch(self, piece: Piece) -> Tensor:
        """The buffer in which a piece is computed before it is rounded; on a device, only one stream uses it."""
        if self._values is None or self._values.numel() < piece.sum_numel:
            largest = max(one.sum_numel for one in self.pieces if one.form is not None)
            self._values = torch.zeros(largest, dtype=torch.float32, device=piece.wire.device)
        return self._values[: piece.sum_numel]

    @torch.no_grad()
    def take_facts(self, piece: Piece, segments: Sequence[Tensor]) -> None:
        """Read the facts at the end of the first piece, on the exchange's device; they decide how `ref` moves."""
        if not piece.num_slots:
            return
        slots = _last(segments, piece.sum_numel, piece.num_slots)
        if self.device.type == "cpu":
            self._report[: self._tail.num_slots].copy_(slots)
            self._step = self._step_on_host([row[0] for row in self._tail.decode(slots)])
        else:
            self._report[: self._tail.num_slots].copy_(slots)
            self._step = self._step_on_device(slots)

    @torch.no_grad()
    def settle(self, piece: Piece, segments: Sequence[Tensor]) -> None:
        """Move this piece of the common point by the sum, given in segments on the arena's device."""
        assert self._step is not None, "facts come with the first piece"
        # Only rank 0 contributes the norm of the mean, so that all ranks get the same number.
        piece.wire.settle(piece.span, segments, self._step, is_live=self._is_live, counts=self.rank == 0)

    @torch.no_grad()
    def pack_norms(self) -> Tensor:
        """The buffer to sum after the last piece: a row of squared norms per rank."""
        self._norms.zero_()
        for part in self.parts:
            self._norms[self.rank].add_(part.squares.to(self.device))
        return self._norms

    @torch.no_grad()
    def report(self) -> None:
        """Copy the sum of the norms to the buffer that `read` uses; queued on the current stream."""
        self._report[self._tail.num_slots + 1 :].copy_(self._norms.view(-1))
        if self._report_here is not self._report:
            self._report_here.copy_(self._report, non_blocking=True)

    def read(self) -> Settled:
        """Return the report of the average; its numbers must have reached the host."""
        rows = self._tail.decode(self._report_here[: self._tail.num_slots])
        concentration, *norms = self._report_here[self._tail.num_slots :].tolist()
        samples = [row[0] for row in rows]
        displacements, lengths = norms[0::3], norms[1::3]
        apart = drift(samples=samples, displacements=displacements, norms=lengths, mean_displacement=norms[2])
        return Settled(
            facts=tuple(tuple(row[1:]) for row in rows),
            total_samples=round(sum(samples)),
            drift=apart if self.world_size > 1 else 0.0,
            effective_ranks=1 / concentration if concentration > 0 else 1.0,
            not_finite=tuple(r for r, d in enumerate(displacements) if samples[r] and not math.isfinite(d)),
        )

    @torch.no_grad()
    def load(self) -> None:
        """Set the arena to the common point, which is bit-identical on all ranks."""
        if not self._is_live:
            for part in self.parts:
                part.load()
        self._counters.load()

    @torch.no_grad()
    def add_correction(self) -> None:
        """Add (new ref - snapshot) to the arena; steps since the snapshot are kept."""
        for part in self.parts:
            part.add_correction()
        self._counters.correct()

    def move_to_average(self) -> None:
        """Move from the look-ahead of the outer step back to the average itself; no average may be pending."""
        self._shift(-self._ahead)

    def move_to_lookahead(self) -> None:
        """Undo `move_to_average` before training continues."""
        self._shift(self._ahead)

    @torch.no_grad()
    def _shift(self, fraction: Tensor) -> None:
        self.arena.reclaim()
        for part in self.parts:
            part.shift(fraction, [piece.span for piece in self._plain_pieces if piece.wire is part])

    def state_dict(self) -> dict[str, Any]:
        """The common point (with attached optimizer state), outer velocity, and samples that define the shares."""
        return {
            "fingerprint": self.arena.fingerprint,
            "ref": {str(part.plan.dtype): part.ref.to("cpu", copy=True) for part in self.parts},
            "velocity": {
                str(part.plan.dtype): part.velocity.to("cpu", copy=True)
                for part in self.parts
                if part.velocity is not None
            },
            "recent_samples": self._recent_samples.to("cpu", copy=True),
            "ahead": self._ahead.item(),
            "errors": {
                str(part.plan.dtype): part.errors.to("cpu", copy=True) for part in self.parts if part.errors is not None
            },
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["fingerprint"] != self.arena.fingerprint:
            raise DataError(
                f"the saved average belongs to another model: layout {state['fingerprint']:012x}, "
                f"this model has {self.arena.fingerprint:012x}",
                hint="resume with the model that wrote the checkpoint",
            )
        for part in self.parts:
            dtype = str(part.plan.dtype)
            if dtype in state["ref"]:
                part.take_ref(state["ref"][dtype])
            # After a resume with another outer optimizer, the velocity starts at zero.
            if part.velocity is not None and dtype in state["velocity"]:
                part.velocity.copy_(state["velocity"][dtype])
        if state["recent_samples"].numel() == self.world_size:
            self._recent_samples.copy_(state["recent_samples"])
            self._load_errors(state.get("errors", {}))
        # Older checkpoints without this entry were taken at the look-ahead.
        self._ahead.fill_(state.get("ahead", 0.0))

    def _load_errors(self, errors: dict[str, Tensor]) -> None:
        """Restore rounding errors that this rank has not sent yet; not used if the number of ranks has changed."""
        for part in self.parts:
            saved = errors.get(str(part.plan.dtype))
            if part.errors is not None and saved is not None and saved.numel() == part.errors.numel():
                part.errors.copy_(saved)

    def reclaim(self) -> None:
        self.arena.reclaim()
        if self._optimizer is not None:
            self._optimizer.reclaim()

    def _allocate(self) -> None:
        plans = plan_wires(self.arena, self._optimizer)
        piece_numel = PIECE_NUMEL if self.device.type == "cpu" else DEVICE_PIECE_NUMEL
        spans = [plan.cut(piece_numel) for plan in plans]
        self.parts = [
            Wire(plan, arena_device=self.arena.device, spans=own) for plan, own in zip(plans, spans, strict=True)
        ]
        pieces = [(part, span) for part, own in zip(self.parts, spans, strict=True) for span in own]
        self._plain_pieces = [
            Piece(wire=part, span=span, num_slots=0 if number else self._tail.num_slots)
            for number, (part, span) in enumerate(pieces)
        ]
        self._pieces = [written(piece, self._wire) for piece in self._plain_pieces]
        self._plain_chunks, self._chunks = self._chunked(self._plain_pieces), self._chunked(self._pieces)
        self._values = None
        for part in {id(p.wire): p.wire for p in self._pieces if p.form is not None and p.form.has_feedback}.values():
            part.keep_errors()
        if self._outer.has_velocity:
            for part in self.parts:
                part.velocity = torch.zeros_like(part.ref[part.parameters])
        is_remote = self.device.type == "cuda"
        self._norms = torch.zeros(self.world_size, 3, dtype=torch.float64, device=self.device)
        num_report = self._tail.num_slots + 1 + self._norms.numel()
        self._report = torch.zeros(num_report, dtype=torch.float64, device=self.device)
        self._report_here = torch.zeros(num_report, dtype=torch.float64, pin_memory=True) if is_remote else self._report
        is_pinned = self.arena.device.type == "cuda"
        self._row = torch.zeros(self._tail.num_values, 2, dtype=plans[0].dtype, pin_memory=is_pinned)

    def _chunked(self, pieces: Sequence[Piece]) -> list[Chunk]:
        chunks = chunked(pieces, self._chunk_numel(sum(piece.span.numel for piece in pieces)))
        for chunk in chunks:
            chunk.whole.wire.prepare([chunk.whole.span])
        return chunks

    def _chunk_numel(self, whole: int) -> int:
        """Elements of a chunk; 0 unless a GPU computes and the host sums.

        Pieces need not be joined on a host, which computes what fits its cache, or for NCCL, whose pieces are large.
        """
        is_joined = self.arena.device.type == "cuda" and self.device.type == "cpu"
        return min(DEVICE_PIECE_NUMEL // 2, whole // NUM_CHUNKS) if is_joined else 0

    def _step_on_device(self, slots: Tensor) -> MeanStep:
        samples = self._tail.samples(slots)
        total = samples.sum()
        is_moving = (total > 0).double()
        # Use the last several windows, so that a short window or a rank without batches does not change the momentum.
        self._recent_samples.mul_(RECENT).add_(samples)
        share = self._recent_samples / self._recent_samples.sum().clamp(min=1e-9)
        concentration = share.square().sum()
        self._report[self._tail.num_slots].copy_(concentration)
        # Without samples nothing moves, and the look-ahead stays as it is.
        self._ahead.mul_(1.0 - is_moving).add_(is_moving * self._outer.look_ahead(concentration))
        return self._mean_step(total.clamp(min=1.0).reciprocal(), is_moving, concentration)

    def _step_on_host(self, samples: Sequence[float]) -> MeanStep:
        """Like `_step_on_device`, bit for bit, but with Python floats, because each tensor call costs microseconds."""
        total = math.fsum(samples)
        recent = self._recent_samples
        recent.mul_(RECENT).add_(torch.tensor(samples, dtype=torch.float64))
        concentration = recent.div(max(recent.sum().item(), 1e-9)).square_().sum().item()
        self._report[self._tail.num_slots] = concentration
        if total > 0:
            self._ahead.fill_(self._outer.look_ahead(concentration))
        return self._mean_step(1.0 / max(total, 1.0), 1.0 if total > 0 else 0.0, concentration)

    def _mean_step(
        self, reciprocal: float | Tensor, is_moving: float | Tensor, concentration: float | Tensor
    ) -> MeanStep:
        return MeanStep(
            reciprocal=reciprocal,
            is_moving=is_moving,
            concentration=concentration,
            outer=self._outer,
            is_alone=self.world_size == 1 and not self._outer.has_velocity,
        )


def _last(segments: Sequence[Tensor], numel: int, count: int) -> Tensor:
    """The last `count` of `numel` values, which are given in segments."""
    starts = [0, *itertools.accumulate(segment.numel() for segment in segments)]
    return torch.cat(
        [
            segment[max(0, numel - count - start) : numel - start]
            for start, segment in zip(starts, segments, strict=False)
            if start + segment.numel() > numel - count and start < numel
        ]
    )


def same_device(wanted: torch.device | str, arena_device: torch.device) -> torch.device:
    """The device of the arithmetic; `cuda` means the arena's own CUDA device."""
    device = torch.device(wanted)
    return arena_device if device.type == arena_device.type else device
